"""Bounds of a server's sessions: kernels, hibernated sessions, own memory, records on disk."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import GIB, MIB, format_bytes
from kernel_mcp.errors import HibernationError, SessionLimitReached
from kernel_mcp.limits.capacity import Capacity
from kernel_mcp.linux import process
from kernel_mcp.sessions.hibernation import MAKE_ROOM
from kernel_mcp.sessions.session import Clock, Session

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
RELIEF_S = 10.0
"""Pause when memory is beyond the bound and no session holds `LARGE_BYTES` of it."""
OWN_BYTES = 256 * MIB
SESSION_BYTES = 48 * MIB
"""What the server needs: for itself some 80 MiB, and as much again for what it is asked; for each
session that runs a message of 16 MiB as bytes and as text, and 8 MiB of displays."""
NOTABLE_BYTES = 8 * MIB
"""Growth after which memory is given back to the system."""
REST_LOOKS = 10
"""Idle looks until closed sessions have freed their memory."""
LARGE_BYTES = 16 * MIB
"""A session that holds less is never relieved."""
RECORD_BYTES = 2 * GIB
"""Cells and outputs on disk of all sessions: as much as the variables of those that sleep."""


MOST_OBJECTS = 300_000
"""Objects that `size_of` counts, in some tenths of a second; it ignores further ones."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OWN = (
    "kernel_mcp.kernels.",
    "kernel_mcp.output.",
    "kernel_mcp.sessions.cell",
    "kernel_mcp.sessions.history",
    "kernel_mcp.sessions.runner",
    "kernel_specs.restricted.wire.zmtp",
)
"""Modules whose objects belong to one session; `size_of` does not follow other objects."""
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def size_of(*roots: object) -> int:
    """Bytes of `roots` and of the objects of one session that they reach, each once."""
    seen: set[int] = set()
    pending: list[object] = list(roots)
    total = 0
    while pending and len(seen) < MOST_OBJECTS:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item, 0)
        if isinstance(item, _CONTAINERS) or type(item).__module__.startswith(_OWN):
            pending += gc.get_referents(item)
    return total


def held_by(session: Session) -> int:
    """Bytes of the server's memory that its cells and the messages of its kernel take."""
    return size_of(session.queue, session.kernel)


def relieve(session: Session, cause: str) -> str:
    """Let go of what the server holds for it, as little as will do; what was done, in words.

    Cells that have ended go to disk first. Then those that wait are ended with `cause`, then the
    kernel is. The next answer tells of it.
    """
    enough = held_by(session) // 2
    done, refused = "had its ended cells moved to disk", list[int]()
    filed = session.queue.file_away()
    if held_by(session) > enough:
        refused = session.queue.refuse(cause)
        done = f"had {len(refused)} waiting cells ended"
    if held_by(session) > enough and session.kernel is not None:
        session.kernel.handle.limits.give_up(cause)
        done = "lost its kernel"
    if filed:
        where = f"kernel://{session.handle}/cells/N"
        session.ledger.add(
            f"{_cells(filed)} ended meanwhile: what they put out can be read as {where}"
        )
    if refused:
        session.ledger.add(f"{_cells(refused)} were not run: {cause}")
    return done


def _cells(numbers: list[int]) -> str:
    return f"Cells {min(numbers)} to {max(numbers)} ({len(numbers)})"


class OwnMemory:
    """The private memory of this process in bytes, read without opening anything."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        """Raises OSError."""
        _, resident, shared, *_ = map(int, os.pread(self._fd, 256, 0).split())
        return (resident - shared) * self._page

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class ServerBounds:
    """Keeps the server within its memory and its records, while `run` is running."""

    def __init__(
        self,
        sessions: Callable[[], Iterable[Session]],
        *,
        memory: Callable[[], int],
        most_memory: int,
        most_records: int = RECORD_BYTES,
    ) -> None:
        """`memory` returns the bytes that the server holds; the bounds are bytes too."""
        self._sessions = sessions
        self._memory = memory
        self._most_memory = most_memory
        self._most_records = most_records
        self._told = False
        self._least = most_memory
        self._quiet = 0
        self._untidy = False

    async def run(self) -> None:
        """Look for ever; has to be run as a task."""
        while True:
            await anyio.sleep(PAUSE_S)
            with Barrier("comparing the records of sessions with their bound"):
                self.check_records()
            relieved = True
            with Barrier("comparing the server's memory with its bound"):
                relieved = self.check_memory()
            with Barrier("giving memory back to the system"):
                self.tidy()
            if not relieved:
                await anyio.sleep(RELIEF_S)

    def check_memory(self) -> bool:
        """Have the session that holds most let go of it, if the server holds too much.

        False when there is too much and no session that holds a notable part of it.
        """
        if self._memory() <= self._most_memory:
            self._told = False
            return True
        process.trim()
        if (held := self._memory()) <= self._most_memory:
            return True
        parts = {session: held_by(session) for session in self._sessions()}
        largest = max(parts, key=lambda session: parts[session], default=None)
        if largest is None or parts[largest] < LARGE_BYTES:
            if not self._told:
                logger.error(
                    "the server holds %s of memory, which is more than %s, and no session much of "
                    "it: nothing was ended", format_bytes(held), format_bytes(self._most_memory),
                )  # fmt: skip
            self._told = True
            return False
        part = format_bytes(parts[largest])
        done = relieve(
            largest,
            f"the server's memory ran short (it holds {format_bytes(held)}, limit "
            f"{format_bytes(self._most_memory)}), and this session held most of it: {part} of "
            "outputs and code",
        )
        logger.warning(
            "the server held %s of memory, limit %s: session %s, which held %s, %s",
            format_bytes(held), format_bytes(self._most_memory), largest.handle, part, done,
        )  # fmt: skip
        process.trim()
        return True

    def tidy(self) -> None:
        """Give memory back to the system when no session is in use and there may be much to give.

        Takes some 40 ms, so it is done again once when all has come to rest, and then not before
        the server has grown by as much again.
        """
        held = self._memory()
        self._least = min(self._least, held)
        if any(session.state == "busy" for session in self._sessions()):
            self._quiet = 0
            return
        self._quiet += 1
        grown = held > self._least + NOTABLE_BYTES
        if grown or (self._untidy and self._quiet >= REST_LOOKS):
            process.trim()
            self._least = self._memory()
            self._untidy, self._quiet = grown, 0

    def check_records(self) -> None:
        """Have the sessions with the largest records remove their oldest outputs."""
        sizes = {session: session.cells.disk_bytes for session in self._sessions()}
        if sum(sizes.values()) <= self._most_records:
            return
        level = _level(sizes.values(), self._most_records)
        for session in (session for session, size in sizes.items() if size > level):
            logger.info("the oldest outputs of session %s make room for others", session.handle)
            session.cells.make_room(level, before=len(session.cells) + 1)


def memory_bound(sessions: int) -> int:
    """Bytes of memory for a server with so many sessions that may run at once."""
    return OWN_BYTES + sessions * SESSION_BYTES


def _level(sizes: Iterable[int], most: int) -> int:
    """The bytes at which to cut each size so that the sum is `most`."""
    ascending = sorted(sizes)
    for place, size in enumerate(ascending):
        fair = most // (len(ascending) - place)
        if size > fair:
            return fair
        most -= size
    return most


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
