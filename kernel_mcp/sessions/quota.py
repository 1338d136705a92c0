"""Which sessions may have a kernel: idle ones are hibernated for others, surplus ones dropped."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import HibernationError, SessionLimitReached
from kernel_mcp.limits.capacity import Capacity
from kernel_mcp.sessions.hibernation import MAKE_ROOM
from kernel_mcp.sessions.session import Clock, Session

logger = logging.getLogger(__name__)

ROOM_S = 30.0
"""How long a new session may wait until others have been hibernated for it."""
SLOW_S = 10.0
"""How long one session may take until the next one is hibernated as well."""


class SessionQuota:
    """Keeps the sessions of a server within its limits. `drop` closes a hibernated one."""

    def __init__(
        self,
        settings: Settings,
        *,
        sessions: Callable[[], Iterable[Session]],
        drop: Callable[[Session], Awaitable[None]],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        clock: Clock,
        capacity: Capacity,
    ) -> None:
        """`spawn` starts a task that ends with the manager."""
        self._settings = settings
        self._capacity = capacity
        self._sessions = sessions
        self._drop = drop
        self._spawn = spawn
        self._forced: dict[str, anyio.Event] = {}
        self._clock = clock
        self._one_at_a_time = anyio.Lock()

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Inside this block one more session may have a kernel, and no other call takes its place.

        Raises SessionLimitReached when all sessions are in use, or the system has no room.
        """
        async with self._one_at_a_time:
            with anyio.move_on_after(ROOM_S):
                await self._make_room()
            if lack := self._lack():
                raise SessionLimitReached(lack)
            yield

    async def admit(self, session: Session) -> None:
        """Let a hibernated session have a kernel again. Raises SessionLimitReached."""
        async with self.reserve():
            session.lifecycle.awake = True

    async def hibernate(self, session: Session, purpose: str = "") -> bool:
        """Hibernate a session unless it is in use; whether it sleeps now."""
        asleep = False
        with Barrier("hibernating a session, which stays as it is", session.handle) as barrier:
            try:
                asleep = await session.hibernate(purpose)
            except HibernationError as error:
                logger.info("session %s keeps its kernel: %s", session.handle, error)
                session.spare()
        if barrier.failure is not None:
            session.spare()
        if asleep:
            with Barrier("dropping hibernated sessions"):
                await self._drop_surplus()
        return asleep

    async def _make_room(self) -> None:
        if self._forced:
            await _one_of(self._forced)
        tried: set[str] = set()
        while self._lack():
            session = self._longest_idle(without=tried)
            if session is not None:
                tried.add(session.handle)
                self._forced[session.handle] = anyio.Event()
                self._spawn(partial(self._force, session))
            elif not self._forced:
                break
            await _one_of(self._forced)

    async def _force(self, session: Session) -> None:
        """Hibernate a session, also when no caller waits for it any more."""
        try:
            await self.hibernate(session, MAKE_ROOM)
        finally:
            self._forced.pop(session.handle).set()

    def _longest_idle(self, without: set[str]) -> Session | None:
        if not self._settings.hibernate_sessions:
            return None
        found = [s for s in self._sessions() if s.restful and s.handle not in without]
        return min(found, key=lambda s: (not s.blank, s.last_used), default=None)

    async def _drop_surplus(self) -> None:
        asleep = [session for session in self._sessions() if session.state == "hibernated"]
        for session in surplus(
            asleep,
            most=self._settings.hibernate_sessions,
            most_bytes=self._settings.hibernate_total_bytes,
        ):
            logger.info("dropping a hibernated session that is one too many")
            await self._drop(session)

    def _lack(self) -> str:
        """Why no further session may have a kernel; empty when one may."""
        awake = [session for session in self._sessions() if session.lifecycle.awake]
        if len(awake) >= self._settings.max_sessions:
            sessions = (
                f"All {self._settings.max_sessions} sessions that this server may run at once "
                "(--max-sessions)"
            )
            if self._forced:
                return (
                    f"{sessions} have kernels. One of them is being hibernated, which takes "
                    "unusually long. Try again in a minute, or end a session with close_session."
                )
            return (
                f"{sessions} are in use, and none of them is idle and can be hibernated. Wait for "
                "a cell to end, or end a session with close_session; list_sessions shows yours."
            )
        coming = sum(session.kernel is None for session in awake)
        if shortage := self._capacity.shortage(coming + 1):
            return (
                f"The system has no room for one more session of this server: {shortage}. End a "
                "session that is not needed with close_session; list_sessions shows yours."
            )
        return ""


async def _one_of(forced: dict[str, anyio.Event]) -> None:
    """Wait for the newest forced hibernation, at most `SLOW_S` seconds."""
    with anyio.move_on_after(SLOW_S):
        await forced[next(reversed(forced))].wait()


def surplus(asleep: Sequence[Session], *, most: int, most_bytes: int) -> list[Session]:
    """The hibernated sessions to drop: beyond `most`, and beyond `most_bytes`.

    Those that were never used go first, then the oldest sleep. `most_bytes` 0 is no limit; it is
    never a reason to drop a session that has saved nothing.
    """
    oldest_first = sorted(asleep, key=lambda s: (not s.blank, s.sleep.since if s.sleep else 0.0))
    dropped = oldest_first[: max(0, len(oldest_first) - most)]
    kept = oldest_first[len(dropped) :]
    sizes = {session.handle: session.sleep.size if session.sleep else 0 for session in kept}
    excess = sum(sizes.values()) - most_bytes if most_bytes else 0
    for session in kept:
        if excess > 0 and sizes[session.handle]:
            dropped.append(session)
            excess -= sizes[session.handle]
    return dropped
