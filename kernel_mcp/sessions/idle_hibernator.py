"""Hibernation of sessions that were idle for a time."""

from __future__ import annotations

import math

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import Clock

LOOKS_PER_TIMEOUT = 20
MAX_PAUSE_S = 30.0
MIN_PAUSE_S = 0.05
AT_ONCE = 4
"""Maximum number of concurrent hibernations."""


class IdleHibernator:
    """Hibernates sessions that were idle for `idle_timeout_s` seconds; infinity for never."""

    def __init__(self, manager: SessionManager, idle_timeout_s: float, clock: Clock) -> None:
        self._manager = manager
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock

    def expired(self) -> list[Session]:
        """Return the idle sessions to hibernate now, the longest idle first."""
        now = self._clock()
        found = [
            session
            for session in self._manager.sessions
            if session.can_hibernate
            and session.family.last_used <= now - self._idle_timeout_s
            and self._manager.admission.retry_at(session) <= now
        ]
        return sorted(found, key=lambda session: session.family.last_used)

    async def hibernate_expired(self) -> None:
        """Hibernate expired sessions."""
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for session in self.expired():
                tasks.start_soon(self._hibernate, session, limiter)

    async def _hibernate(self, session: Session, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            idle = self._clock() - session.family.last_used
            if session.can_hibernate and idle >= self._idle_timeout_s:
                with Barrier("hibernating an idle session", session.handle):
                    await self._manager.admission.hibernate(session)

    async def run(self) -> None:
        """Hibernate until cancelled, at intervals of a twentieth of the timeout."""
        if math.isinf(self._idle_timeout_s):
            return
        pause = max(MIN_PAUSE_S, min(MAX_PAUSE_S, self._idle_timeout_s / LOOKS_PER_TIMEOUT))
        while True:
            await anyio.sleep(pause)
            with Barrier("looking for idle sessions"):
                await self.hibernate_expired()
