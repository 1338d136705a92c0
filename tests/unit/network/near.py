"""The surroundings of sessions' connections: a near host, and the reports about them."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket

from kernel_mcp.network.http import ProxyRefusal
from kernel_mcp.network.records import Records, Traffic
from kernel_mcp.network.tunnel import Dialer


class Told(Records):
    """Keeps what is told of connections: place, verdict and words."""

    def __init__(self) -> None:
        self.all: list[tuple[tuple[str, int], str, str]] = []

    def add(
        self, number: int, place: tuple[str, int], refusal: ProxyRefusal | None, used: Traffic
    ) -> None:
        verdict, words = ("ok", "") if refusal is None else (refusal.verdict, refusal.message)
        self.all.append((place, verdict, words))


class Near(Dialer):
    """Finds every host where `connected` leads."""

    def __init__(self, connected: Callable[[], socket]) -> None:
        super().__init__()
        self._connected_to = connected

    async def connect(self, *_: object) -> socket:
        return self._connected_to()
