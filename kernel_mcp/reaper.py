"""Collects sessions that nobody has used for a while."""

from __future__ import annotations

import logging

import anyio

from kernel_mcp.manager import SessionManager
from kernel_mcp.session import Clock, Session

logger = logging.getLogger(__name__)

LOOKS_PER_TIMEOUT = 20
MAX_PAUSE_S = 30.0
MIN_PAUSE_S = 0.05


class Reaper:
    """Closes idle sessions. A busy session is never idle; `idle_timeout_s` 0 collects none."""

    def __init__(self, manager: SessionManager, idle_timeout_s: float, clock: Clock) -> None:
        self._manager = manager
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock

    def expired(self) -> list[Session]:
        """The sessions whose time is over now."""
        limit = self._clock() - self._idle_timeout_s
        return [
            session
            for session in self._manager.sessions
            if session.state in ("new", "idle") and session.last_used <= limit
        ]

    async def collect(self) -> None:
        """Close what has expired."""
        for session in self.expired():
            logger.info("closing a session idle for %.0f s", self._clock() - session.last_used)
            await self._manager.close(session)

    async def run(self) -> None:
        """Collect for ever, looking often enough to be late by a twentieth of the timeout."""
        if not self._idle_timeout_s:
            return
        pause = max(MIN_PAUSE_S, min(MAX_PAUSE_S, self._idle_timeout_s / LOOKS_PER_TIMEOUT))
        while True:
            await anyio.sleep(pause)
            await self.collect()
