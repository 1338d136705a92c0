"""What operators see of a running server: meters, spans, lines of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kernel_mcp.records import dataclass


@dataclass(slots=True)
class Readiness:
    """Whether kernels can be started, and why not; it says nothing about who uses the server."""

    ready: bool = False
    reason: str = "preparing for kernels"


@dataclass(frozen=True, slots=True)
class Levels:
    """What a server has now. Sizes are bytes.

    sessions   by state: new, idle, busy, hibernated
    templates  by state: ready, loading, failed
    spares     kernels in reserve
    calls      that are being answered
    """

    sessions: Mapping[str, int] = field(default_factory=dict)
    templates: Mapping[str, int] = field(default_factory=dict)
    spares: int = 0
    calls: int = 0
    server_bytes: int = 0
    kernels_bytes: int = 0


class Meters:
    """Hears what is counted; this one counts nothing. Every word is one of a few, never a name."""

    def cell(self, outcome: str, seconds: float) -> None:
        """A cell has ended: ok, error, interrupted, timeout, killed."""

    def kill(self, cause: str) -> None:
        """A kernel was lost: memory, time, cpu, disk, asked, lost."""

    def start(self, kind: str, seconds: float) -> None:
        """A session has got a kernel: pooled, forked, cold."""

    def failed_start(self) -> None:
        """A session has got no kernel."""

    def hibernation(self, way: str) -> None:
        """A session sleeps or is back: hibernated, woke."""

    def install(self, outcome: str) -> None:
        """Packages were added, or could not be: ok, failed."""

    def call(self, tool: str, seconds: float) -> None:
        """A tool has answered."""

    def refusal(self, reason: str) -> None:
        """Something was refused: policy, quota, network, and what the gate of HTTP refuses."""

    def moved(self, received: int, sent: int) -> None:
        """So many bytes of bodies came in and went out."""

    def text(self, levels: Levels, accept: str = "") -> tuple[bytes, str] | None:
        """All that was counted, with what the server has now, in the format that is accepted, and
        the name of that; None where nothing is counted.
        """
        return None
