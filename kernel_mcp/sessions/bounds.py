"""Bounds of the server's own memory, and of the records that its sessions keep on disk."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.linux import process
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.sharing import level, totals
from kernel_mcp.units import GIB, MIB, format_bytes

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
RELIEF_S = 10.0
"""Additional pause in seconds if the bound is exceeded and no session holds `LARGE_BYTES`."""
OWN_BYTES = 256 * MIB
SESSION_BYTES = 48 * MIB
"""Parts of the memory bound: a constant, and bytes for each session that may run. The server itself
uses some 80 MiB, and as much again for requests. Each running session may hold a message of 16 MiB
as bytes and as text, and 8 MiB of displays."""
NOTABLE_BYTES = 8 * MIB
"""Growth in bytes after which free memory is returned to the operating system."""
REST_LOOKS = 10
"""Number of consecutive idle checks, after which closed sessions have freed their memory."""
LARGE_BYTES = 16 * MIB
"""A session that holds less is never relieved."""
RECORD_BYTES = 2 * GIB
"""Maximum bytes of cells and outputs on disk, of all sessions together. It equals the default of
`--persist`."""


MOST_OBJECTS = 300_000
"""Maximum number of objects that `size_of` counts, which takes a few tenths of a second. Further
ones are ignored."""

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
    """Return the bytes of `roots` and of reachable objects of the session, each counted once."""
    seen: set[int] = set()
    pending: list[object] = list(roots)
    total = 0
    while pending and len(seen) < MOST_OBJECTS:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item, 0)
        if isinstance(item, _CONTAINERS) or str(type(item).__module__).startswith(_OWN):
            pending += gc.get_referents(item)
    return total


def held_by(session: Session) -> int:
    """Return the bytes of server memory held by a session's cells and its kernel's messages."""
    return size_of(session.queue, session.kernel)


def relieve(session: Session, cause: str) -> str:
    """Free half of the memory that the server holds for a session; return the last step taken.

    First, ended cells are moved to disk. If that is not enough, waiting cells are ended with
    `cause`. If that is not enough either, the kernel is killed. The next answer reports the steps.
    """
    enough = held_by(session) // 2
    done, refused = "had its ended cells moved to disk", list[int]()
    filed = session.queue.file_away()
    if held_by(session) > enough:
        refused = session.queue.refuse(cause)
        done = f"had {len(refused)} waiting cells ended"
    if held_by(session) > enough and session.kernel is not None:
        session.kernel.handle.limits.kill_for(cause)
        done = "lost its kernel"
    if filed:
        where = f"kernel://{session.handle}/cells/N"
        session.notifications.add(
            f"{_cells(filed)} ended meanwhile: what they put out can be read as {where}"
        )
    if refused:
        session.notifications.add(f"{_cells(refused)} were not run: {cause}")
    return done


def _cells(numbers: list[int]) -> str:
    return f"Cells {min(numbers)} to {max(numbers)} ({len(numbers)})"


class OwnMemory:
    """The private memory of this process in bytes, read without opening anything."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        """Return resident bytes that are not shared. Raises OSError."""
        _, resident, shared, *_ = map(int, os.pread(self._fd, 256, 0).split())
        return (resident - shared) * self._page

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class ServerBounds:
    """Enforces bounds on the server's memory and on the records of sessions, while `run` runs."""

    def __init__(
        self,
        sessions: Callable[[], Iterable[Session]],
        *,
        memory: Callable[[], int],
        most_memory: int,
        most_records: int = RECORD_BYTES,
    ) -> None:
        """`memory` returns the server's memory in bytes; both bounds are in bytes too."""
        self._sessions = sessions
        self._memory = memory
        self._most_memory = most_memory
        self._most_records = most_records
        self._warned = False
        self._least = most_memory
        self._quiet = 0
        self._untidy = False
        self._known: frozenset[Session] = frozenset()
        self._ended = False
        """True if sessions have ended since the last garbage collection: they leave cycles."""

    async def run(self) -> None:
        """Check the bounds until cancelled."""
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
        """Relieve a session if the server holds more memory than its bound.

        The session is the largest one of the principal whose sessions hold the most. Returns False
        if the bound is exceeded but no session holds `LARGE_BYTES`.
        """
        if self._memory() <= self._most_memory:
            self._warned = False
            return True
        process.trim()
        if (held := self._memory()) <= self._most_memory:
            return True
        parts = {session: held_by(session) for session in self._sessions()}
        owners = totals((session.owner, part) for session, part in parts.items())
        notable = [session for session, part in parts.items() if part >= LARGE_BYTES]
        largest = max(notable, key=lambda each: (owners[each.owner], parts[each]), default=None)
        if largest is None:
            if not self._warned:
                logger.error(
                    "the server holds %s of memory, which is more than %s, and no session much of "
                    "it: nothing was ended", format_bytes(held), format_bytes(self._most_memory),
                )  # fmt: skip
            self._warned = True
            return False
        part = format_bytes(parts[largest])
        done = relieve(
            largest,
            f"the server's memory ran short (it holds {format_bytes(held)}, limit "
            f"{format_bytes(self._most_memory)}), and this session held much of it: {part} of "
            "outputs and code",
        )
        logger.warning(
            "the server held %s of memory, limit %s: session %s, which held %s, %s",
            format_bytes(held), format_bytes(self._most_memory), largest.handle, part, done,
        )  # fmt: skip
        process.trim()
        return True

    def tidy(self) -> None:
        """Return free memory to the operating system, unless a session is busy.

        It is returned when the server has grown by `NOTABLE_BYTES`, and once more after
        `REST_LOOKS` idle checks. After the end of a session this takes some 40 ms.
        """
        held, sessions = self._memory(), frozenset(self._sessions())
        self._ended = self._ended or bool(self._known - sessions)
        self._known = sessions
        self._least = min(self._least, held)
        if any(session.state == "busy" for session in sessions):
            self._quiet = 0
            return
        self._quiet += 1
        grown = held > self._least + NOTABLE_BYTES
        if grown or (self._untidy and self._quiet >= REST_LOOKS):
            process.trim(collect=self._ended)
            self._least = self._memory()
            self._untidy, self._quiet = grown, 0
            self._ended = False

    def check_records(self) -> None:
        """Remove the oldest outputs of the largest records if all records exceed the bound.

        The bound is divided equally among owners, then among the sessions of each. A record within
        its share stays complete.
        """
        sizes = {session: session.cells.disk_bytes for session in self._sessions()}
        if sum(sizes.values()) <= self._most_records:
            return
        owners = totals((session.owner, size) for session, size in sizes.items())
        part = level(owners.values(), self._most_records)
        for owner in (owner for owner, size in owners.items() if size > part):
            own = {session: size for session, size in sizes.items() if session.owner == owner}
            most = level(own.values(), part)
            for session in (session for session, size in own.items() if size > most):
                logger.info("the oldest outputs of session %s make room for others", session.handle)
                session.cells.make_room(most, before=len(session.cells) + 1)


def memory_bound(sessions: int) -> int:
    """Return the memory bound, in bytes, of a server that may run so many sessions at once."""
    return OWN_BYTES + sessions * SESSION_BYTES
