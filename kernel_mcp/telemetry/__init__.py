"""Observability of a running server: metrics, spans and the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from kernel_mcp.records import dataclass


@dataclass(slots=True)
class Readiness:
    """Readiness of a server: `ready` if kernels can be started, else the `reason` why not.

    It is public, so it tells nothing about the users of the server.
    """

    ready: bool = False
    reason: str = "preparing for kernels"


@dataclass(frozen=True, slots=True)
class Levels:
    """Gauges of a server at one moment. Sizes are bytes.

    sessions   number of sessions by state: new, idle, busy, hibernated
    templates  number of templates by state: ready, loading, failed
    spares     pooled kernels
    calls      calls in progress
    """

    sessions: Mapping[str, int] = field(default_factory=dict)
    templates: Mapping[str, int] = field(default_factory=dict)
    spares: int = 0
    calls: int = 0
    server_bytes: int = 0
    kernels_bytes: int = 0


class Meters:
    """Receiver of metrics; this one drops them. Labels come from small sets, never from users."""

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Count an event of `Events`."""

    def call(self, tool: str, seconds: float) -> None:
        """Count an answered tool call."""

    def refusal(self, reason: str) -> None:
        """Count a refusal: quota, or one of the HTTP gate."""

    def moved(self, received: int, sent: int) -> None:
        """Add bytes of request and response bodies."""

    def text(self, levels: Levels, accept: str = "") -> tuple[bytes, str] | None:
        """Return all metrics and `levels` as text, with its content type; None without metrics.

        The format is chosen by the HTTP header `accept`.
        """
        return None
