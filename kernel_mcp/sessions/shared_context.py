"""Objects that all tenant pools of a server share; made before anything else of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Generic, Protocol, TypeVar

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.capacity import Capacity
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.start_queue import CellStartQueue

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
Clock = Callable[[], float]


class OpenSessions(Protocol[S_co]):
    """The open sessions of one tenant pool."""

    @property
    def sessions(self) -> Sequence[S_co]:
        """Every open session, oldest first."""


@dataclass(frozen=True, slots=True)
class SharedContext(Generic[S]):
    """The objects that all tenant pools of a server share; see `web`.

    By default only the settings limit the number of sessions. `clock` returns seconds.
    """

    events: Events = field(default_factory=Events)
    capacity: Capacity = field(default_factory=Capacity)
    checks: Checks = field(default_factory=Checks)
    start_queue: CellStartQueue = field(default_factory=CellStartQueue)
    clock: Clock = time.monotonic
    pools: list[OpenSessions[S]] = field(default_factory=list)

    @property
    def sessions(self) -> list[S]:
        """All open sessions of the server."""
        return [session for pool in self.pools for session in pool.sessions]
