"""Room for kernels: idle sessions are hibernated for others, surplus hibernated ones are closed.

The quotas of a principal and the server's own limits determine the number of kernels.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import HibernationError, QuotaReached, SessionLimitReached
from kernel_mcp.sessions.directory import SessionDirectory
from kernel_mcp.sessions.family import MOST as MOST_BRANCHES
from kernel_mcp.sessions.hibernation import IDLE, MAKE_ROOM, QUOTA
from kernel_mcp.sessions.principals import Principals, Use, cells_of, disk_of, is_running, memory_of
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext

logger = logging.getLogger(__name__)

ROOM_S = 30.0
"""Maximum wait of a new session for the hibernation of others, in seconds."""
SLOW_S = 10.0
"""Maximum wait for one hibernation, in seconds, before the next session is hibernated as well."""
RETRY_S = 60.0
"""Pause after a failed hibernation; each further failure doubles it up to `RETRY_MOST_S`."""
RETRY_MOST_S = 3600.0
AWAKE, ASLEEP = "sessions", "asleep"
"""Kinds of sessions that are counted on all servers together; see `Others`."""


class KernelAdmission:
    """Admits sessions with a kernel, and hibernates others for them. `drop` closes a session."""

    def __init__(
        self,
        settings: Settings,
        directory: SessionDirectory,
        shared: SharedContext[Session],
        principals: Principals,
        *,
        drop: Callable[[Session], Awaitable[None]],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        """`directory` has the sessions of one manager, `shared` those of the whole server.

        `spawn` starts a task in the manager's task group.
        """
        self._settings = settings
        self._directory = directory
        self._shared = shared
        self._principals = principals
        self._drop = drop
        self._spawn = spawn
        self._leaving: defaultdict[str, list[anyio.Event]] = defaultdict(list)
        """Hibernations in progress, by owner; each event is set at its end."""
        self._coming: Counter[str] = Counter()
        """Number of sessions for which `reserve` makes room, by owner."""
        self._clock = shared.clock
        self._turns: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._one_at_a_time = anyio.Lock()
        self._retries: WeakKeyDictionary[Session, tuple[float, float]] = WeakKeyDictionary()
        """Time of the next attempt after a failed hibernation, and the pause before it."""

    @asynccontextmanager
    async def reserve(self, owner: str) -> AsyncIterator[None]:
        """Reserve a kernel for one more session of `owner`, inside this block.

        Idle sessions are hibernated for it, for at most `ROOM_S` seconds. Raises
        SessionLimitReached if all are in use, or if the system has no room.
        """
        turn = self._turns.setdefault(owner, anyio.Lock())
        async with turn:  # by owner: other owners do not wait for these hibernations
            with anyio.move_on_after(ROOM_S):
                await self._make_room(owner)
            self._coming[owner] += 1
            try:
                await self._make_room_elsewhere(owner)
                async with self._one_at_a_time:
                    if lack := self._lack(owner):
                        raise SessionLimitReached(lack)
                    yield
            finally:
                self._coming[owner] -= 1
                self._coming += Counter()  # removes owners with a count of 0

    def check_branches(self, count: int, session: Session) -> None:
        """Raise SessionLimitReached if the session or the system has no room for `count` more."""
        there = len(session.family.members) - 1
        if there + count > MOST_BRANCHES:
            raise SessionLimitReached(
                f"There is no room for {count} more branches: this session has {there} already, "
                f"of at most {MOST_BRANCHES}. Adopt one, or end those that are not needed with "
                "close_session."
            )
        if shortage := self._shared.capacity.shortage(count):
            raise SessionLimitReached(
                f"The system has no room for {count} branches: {shortage}. Ask for fewer, or end a "
                "session with close_session."
            )

    async def admit(self, session: Session) -> None:
        """Reserve a kernel for a hibernated session, and mark it as awake.

        Raises SessionLimitReached.
        """
        family = (each for each in session.family.members if each is not session)
        if any(each.lifecycle.awake for each in family):  # counted already: a family counts once
            if lack := self._shortage():
                raise SessionLimitReached(lack)
            session.lifecycle.awake = True
            return
        async with self.reserve(session.owner):
            session.lifecycle.awake = True

    async def hibernate(self, session: Session, reason: str = IDLE) -> bool:
        """Hibernate a session unless it is in use; return True if it is hibernated now.

        See `Session.hibernate` for `reason`. A failure postpones the next attempt. A success closes
        surplus hibernated sessions.
        """
        asleep = False
        with (
            self._leaves(session.owner),
            Barrier("hibernating a session, which stays as it is", session.handle) as barrier,
        ):
            try:
                asleep = await session.hibernate(reason)
            except HibernationError as error:
                logger.info("session %s keeps its kernel: %s", session.handle, error)
                self._postpone(session)
        if barrier.failure is not None:
            self._postpone(session)
        if asleep:
            logger.info("session %s is hibernated: %s", session.handle, reason)
            with Barrier("dropping hibernated sessions"):
                await self._drop_surplus(session.owner)
        return asleep

    def retry_at(self, session: Session) -> float:
        """Return the time of the next attempt after a failed hibernation; 0 without a failure."""
        return self._retries.get(session, (0.0, 0.0))[0]

    def _postpone(self, session: Session) -> None:
        """Postpone the next hibernation after a failed one.

        The pause doubles with each failure, as long as the session is not used.
        """
        retry_at, pause_s = self._retries.get(session, (0.0, 0.0))
        unused = session.family.last_used < retry_at
        pause_s = min(2 * pause_s, RETRY_MOST_S) if unused else RETRY_S
        self._retries[session] = (self._clock() + pause_s, pause_s)

    @contextmanager
    def _leaves(self, owner: str) -> Iterator[None]:
        """Note that a session of `owner` may give up its kernel inside this block."""
        ended = anyio.Event()
        self._leaving[owner].append(ended)
        try:
            yield
        finally:
            self._leaving[owner].remove(ended)
            ended.set()

    async def _make_room(self, owner: str) -> None:
        leaving = self._leaving[owner]
        if leaving:
            await _one_of(leaving)
        tried: set[str] = set()
        while self._lack(owner):
            session = self._longest_idle(owner, without=tried)
            if session is not None:
                tried.add(session.handle)
                self._spawn(partial(self._force, session, started := anyio.Event()))
                await started.wait()
            elif not leaving and not await self._freed(owner):
                break
            if leaving:
                await _one_of(leaving)

    async def _freed(self, owner: str) -> bool:
        """Wait for a save, checkpoint or the like of an idle session; False if none was running."""
        for session in self._directory.owned_by(owner):
            if session.lifecycle.awake and await session.family.wait_until_free():
                return True
        return False

    async def _make_room_elsewhere(self, owner: str) -> None:
        """Make room for one more session of a principal in its quota on all servers.

        Raises QuotaReached.
        """
        most = self._principals.shared(owner).sessions or 0
        with anyio.move_on_after(ROOM_S):
            if await self._fits(owner, AWAKE, most):
                return
        raise QuotaReached(self._too_many(owner, most))

    async def _fits(self, owner: str, kind: str, most: int) -> bool:
        """Hibernate or close the longest idle sessions, on any server, until `most` are left.

        Return False if no further one can be ended. A `most` of 0 is no limit.
        """
        others = self._principals.others
        without: set[str] = set()
        """Servers on which no session can end; "" is this one."""
        while most and not await others.claim(owner, kind, self._count(owner, kind), most):
            there = await others.idlest(owner, kind, without)
            # `idlest` has updated the use of the other servers, which may be lower now.
            if await others.claim(owner, kind, self._count(owner, kind), most):
                break
            here = None if "" in without else self.idle_s(owner, kind)
            if there is not None and (here is None or here < there[1]):
                if not await others.evict_one(there[0], owner, kind):
                    without.add(there[0])
            elif here is None:
                return False
            elif not await self.evict_one(owner, kind):
                without.add("")
        return True

    def _count(self, owner: str, kind: str) -> int:
        if kind == ASLEEP:
            return len(self._asleep(owner))
        awake = [each for each in self._directory.owned_by(owner) if each.lifecycle.awake]
        return len({id(each.family) for each in awake}) + self._coming[owner]

    def most_sessions(self, principal: str) -> int:
        """Return the maximum number of sessions with a kernel that a principal may have at once."""
        most, all_most = self._principals.quotas(principal).sessions, self._settings.max_sessions
        return min(most or all_most, all_most)

    def uses(self) -> dict[str, Use]:
        """Return the use, on this server, of principals whose quotas span all servers."""
        owners = {each.owner for each in self._directory.sessions} | set(self._coming)
        shared = self._principals.shared
        return {each: self.use(each) for each in owners if shared(each) != Quotas()}

    def use(self, owner: str) -> Use:
        """Return a principal's use on this server, including sessions that are being opened."""
        own = self._directory.owned_by(owner)
        kernels = [each for each in own if each.kernel is not None]
        running = [each for each in kernels if is_running(each)]
        _, largest, memory = memory_of(running)
        return Use(
            sessions=self._count(owner, AWAKE),
            asleep=self._count(owner, ASLEEP),
            cells=sum(map(cells_of, own)),
            computing=sum(
                each.kernel is not None and each.kernel.handle.limits.awake for each in running
            ),
            memory=memory,
            largest=largest,
            disk=sum(map(disk_of, kernels)),
        )

    def idle_s(self, owner: str, kind: str) -> float | None:
        """Return the idle seconds of the principal's session that would end first; None if none."""
        if kind == ASLEEP:
            found = min(self._asleep(owner), key=_first_to_drop, default=None)
        else:
            found = self._longest_idle(owner, without=set())
        return None if found is None else self._clock() - found.family.last_used

    async def evict_one(self, owner: str, kind: str) -> bool:
        """Hibernate the principal's longest idle session, or close its oldest hibernated one.

        If a session cannot be hibernated, the next one is tried. Return True on success.
        """
        if kind == ASLEEP:
            asleep = min(self._asleep(owner), key=_first_to_drop, default=None)
            if asleep is not None:
                logger.info("dropping a hibernated session that is one too many")
                await self._drop(asleep)
            return asleep is not None
        tried: set[str] = set()
        while (session := self._longest_idle(owner, without=tried)) is not None:
            if await self.hibernate(session, QUOTA):
                return True
            tried.add(session.handle)
        return False

    def _asleep(self, owner: str) -> list[Session]:
        return [session for session in self._directory.owned_by(owner) if session.stays_hibernated]

    async def _force(self, session: Session, started: anyio.Event) -> None:
        """Hibernate a session, even after the caller has stopped waiting."""
        with self._leaves(session.owner):
            started.set()
            await self.hibernate(session, MAKE_ROOM)

    def _longest_idle(self, owner: str, without: set[str]) -> Session | None:
        """Return the session of `owner` to hibernate first, blank ones before others; or None."""
        own = self._directory.owned_by(owner)
        found = [s for s in own if s.can_hibernate and s.handle not in without]
        return min(found, key=lambda s: (not s.blank, s.family.last_used), default=None)

    async def _drop_surplus(self, owner: str) -> None:
        for session in surplus(
            self._asleep(owner),
            most=self._principals.quotas(owner).asleep or sys.maxsize,
            most_bytes=self._settings.saved_bytes or sys.maxsize,
        ):
            if session in self._asleep(owner):  # unless it changed while others were closed
                logger.info("dropping a hibernated session that is one too many")
                await self._drop(session)
        await self._fits(owner, ASLEEP, self._principals.shared(owner).asleep or 0)

    def _lack(self, owner: str) -> str:
        """Return the reason why `owner` may have no further kernel; empty if allowed."""
        awake = [session for session in self._directory.sessions if session.lifecycle.awake]
        most, all_most = self._principals.quotas(owner).sessions or 0, self._settings.max_sessions
        own = len({id(session.family) for session in awake if session.owner == owner})
        if most and own >= min(most, all_most):
            return self._too_many(owner, min(most, all_most))
        running = {id(each.family) for each in self._shared.sessions if each.lifecycle.awake}
        if len(running) >= all_most:
            return (
                f"This server runs {all_most} sessions at once (--max-sessions), and has no room "
                "for one more now: others are in use. Try again in a minute, or end a session of "
                "yours with close_session."
            )
        return self._shortage()

    def _shortage(self) -> str:
        """Return the reason why the system has no room for one more kernel; empty if it has.

        Without any session there is room, as was checked at the server's start. A shortage is then
        temporary, such as by the threads of uv while it builds the environment.
        """
        if not any(session.lifecycle.awake for session in self._shared.sessions):
            return ""
        awake = (session for session in self._directory.sessions if session.lifecycle.awake)
        coming = sum(session.kernel is None for session in awake)
        if shortage := self._shared.capacity.shortage(coming + 1):
            return (
                f"The system has no room for one more session of this server: {shortage}. End a "
                "session that is not needed with close_session; list_sessions shows yours."
            )
        return ""

    def _too_many(self, owner: str, most: int) -> str:
        limit = "this server may run at once (--max-sessions)"
        if most < self._settings.max_sessions:
            limit = "you may run at once (your quota `sessions`)"
        sessions = f"All {most} sessions that {limit}"
        if self._leaving[owner]:
            return (
                f"{sessions} have kernels. One of them is being hibernated, which takes "
                "unusually long. Try again in a minute, or end a session with close_session."
            )
        return (
            f"{sessions} are in use, and none of them is idle and can be hibernated. Wait for "
            "a cell to end, or end a session with close_session; list_sessions shows yours."
        )


async def _one_of(leaving: Sequence[anyio.Event]) -> None:
    """Wait for the last of these hibernations, at most `SLOW_S` seconds."""
    with anyio.move_on_after(SLOW_S):
        await leaving[-1].wait()


def _first_to_drop(session: Session) -> tuple[bool, float]:
    saved = session.kernel_state.pending_restore
    return not session.blank, saved.since if saved else 0.0


def surplus(asleep: Sequence[Session], *, most: int, most_bytes: int) -> list[Session]:
    """Return the hibernated sessions to close, so that at most `most` of them are left.

    Their saves may have `most_bytes` together. Sessions that were never used come first, then those
    that were hibernated first. A session without a save is not closed for its size.
    """
    oldest_first = sorted(asleep, key=_first_to_drop)
    dropped = oldest_first[: max(0, len(oldest_first) - most)]
    left = oldest_first[len(dropped) :]
    sizes = {each.handle: _saved_bytes(each) for each in left}
    excess = sum(sizes.values()) - most_bytes
    for session in left:
        if excess > 0 and sizes[session.handle]:
            dropped.append(session)
            excess -= sizes[session.handle]
    return dropped


def _saved_bytes(session: Session) -> int:
    saved = session.kernel_state.pending_restore
    return saved.size if saved else 0
