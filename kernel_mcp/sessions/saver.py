"""Saves what sessions hold before the server ends, however it ends: in the background, by itself.

A session is saved once it was idle for a moment after it has changed, and between two of its cells
where it never is. What a save costs bounds how often there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.values import MIB
from kernel_mcp.errors import HibernationError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.hibernation import Sleep
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.keeping import Keeping, Past, moment, python_of, saved_of
from kernel_mcp.sessions.manifest import Saved, sync
from kernel_mcp.sessions.saving import Saving, pause_after
from kernel_mcp.sessions.snapshot import SECONDS, Dump, take
from kernel_mcp.sessions.store import Entry
from kernel_mcp.sessions.trace import Trace

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

logger = logging.getLogger(__name__)

NOTEBOOK = "notebook"
"""What a session had asked for besides its kernel."""
TOO_LARGE = "too large"
"""How the reason begins why a value without room was left out."""
ATTEMPTS = 3
"""Children in one save, each without the variable that ended the one before."""
HERE_S = 2.0
"""Processor time of a kernel that may not be forked, for its own saving; twice as much with each
attempt that left out for lack of it what was saved before, up to `snapshot.SECONDS`."""
LATE = ("took longer than ", "there was no time left")
"""How the reasons begin why a value was left out for lack of time."""


class Kept:
    """The `Shelf` of a session that outlives the server: its entry, its trace, what is saved."""

    def __init__(
        self,
        entry: Entry,
        keeping: Keeping,
        request: KernelRequest,
        timeout_s: float,
        masks: Masks | None = None,
    ) -> None:
        """`masks` are put over previews of variables. Raises OSError."""
        self._masks = masks or Masks()
        self.entry = entry
        self.cells: History | None = None
        self.cell: Callable[[], int | None] = lambda: None
        """The last cell whose work the variables hold."""
        self.holds: Callable[[int], bool] = lambda _cell: True
        """Whether they hold the work of a cell."""
        self.notebook: Callable[[], str] = str
        """The path of the notebook to which cells are added, if there is one."""
        self._keeping = keeping
        doors = keeping.doors(request.network)
        self._base = saved_of(entry, request, timeout_s, doors)
        self._next = self._base
        self._count = 0
        self.late = 0
        """Attempts in a row that ran out of time."""
        self._kept = -1
        """The count of cells that the entry has."""
        self._live = False
        """Whether what is saved is of the kernel that lives, or was loaded into it."""
        self._known = (-1, -1)
        self._trace = Trace(entry.trace)

    @property
    def unlogged(self) -> bool:
        """Whether there are cells that were not saved."""
        return len(self.cells or ()) != self._known[0]

    @property
    def dirty(self) -> bool:
        """Whether there is something that was not saved."""
        return (len(self.cells or ()), self.cell() or 0) != self._known

    def clear(self) -> None:
        """All that the trace has is saved, or of no use."""
        self._trace.forget(self._count)

    def begins(self, number: int, code: str) -> None:
        """A cell begins."""
        self._trace.add(number, code)

    def fresh(self, kernel: Kernel) -> Path:
        """See `Shelf`."""
        environment, logged = kernel.environment, self._logged()
        self._next = replace(
            logged,
            moment=self._keeping.store.now(),
            cell=self.cell(),
            through=self._count,
            undone=False,
            python=python_of(environment.version),
            environment=tuple(environment.packages),
            doors=self._base.doors,
        )
        return self.entry.fresh()

    def keep(self, sleep: Sleep) -> None:
        """See `Shelf`."""
        dump = sleep.dump
        lost = {name: self._masks.masked(reason) for name, reason in sleep.lost.items()}
        saved = replace(self._next, dump="", size=0, checksum="", variables={"lost": lost})
        if dump is not None:
            row = {**dump.row(), "lost": lost, "changed": {**sleep.changed}}
            row["files"] = [*sleep.files]
            row["variables"] = self._masks.anywhere(row["variables"], {"name"})
            sync(dump.path)
            saved = replace(
                saved,
                dump=dump.path.name,
                size=dump.size,
                checksum=dump.checksum,
                variables=row,
            )
        self.entry.commit(saved)
        if self.entry.adopted:
            self.entry.adopt(False)
        self._live = True
        self._kept = self._count

    def adopted(self) -> None:
        """Note that the kernel is that of a branch: nothing of it was saved. Raises OSError."""
        self._live, self._known = False, (-1, -1)
        self.entry.adopt(True)

    def used(self) -> None:
        """See `Shelf`: the variables stay saved, and are those of the kernel."""
        self._live = True

    def drop(self) -> None:
        """See `Shelf`."""
        self._live = False
        self.entry.drop_variables(len(self.cells or ()))
        if self.entry.adopted:
            self.entry.adopt(False)

    async def log(self) -> None:
        """Save the cells alone. Raises OSError."""
        await self._log(self._logged())

    async def disown(self) -> bool:
        """Note that the session has gone back behind what is saved; False where it has not.

        Nothing brings that back by itself any more. Raises OSError.
        """
        saved = self.entry.saved
        if not self._live or saved is None or saved.cell is None or self.holds(saved.cell):
            return False
        self._live = False
        await self._log(replace(self._logged(), undone=bool(saved.dump)))
        return True

    async def _log(self, saved: Saved) -> None:
        self._next = saved
        await anyio.to_thread.run_sync(self.entry.commit, saved)
        self._kept = self._count
        self.settled()

    def settled(self) -> None:
        """Forget the cells of what was written last in the trace; nothing where that has failed."""
        if self._kept == self._count:
            self._known = (self._count, self._next.cell or 0)
            self._trace.forget(self._count)

    def had(self, names: Iterable[str]) -> list[str]:
        """Those of some names that are among the variables saved, and held by the kernel."""
        past = self.past()
        there = past.dump.names if past is not None and past.dump is not None else ()
        return [name for name in names if name in there]

    def past(self) -> Past | None:
        """What was saved by this server of variables, to go back to."""
        saved = self.entry.saved
        if not self._live or saved is None or not saved.dump:
            return None
        try:
            dump = self.entry.dump()
        except HibernationError:
            return None
        return Past(saved, moment(saved.moment, self._keeping.store.now()), dump)

    def room(self) -> int:
        """Bytes that the variables may take."""
        return self.entry.room()

    def close(self) -> None:
        """Let others have the entry."""
        self._trace.close()
        self.entry.close()

    def _logged(self) -> Saved:
        """What was saved, with the cells of now."""
        assert self.cells is not None
        history = self.cells.state()
        self._count = len(history["places"])
        before = self.entry.saved or self._base
        asked = {**self._base.asked, NOTEBOOK: self.notebook()}
        return replace(before, history=history, asked=asked)


@dataclass(frozen=True, slots=True)
class Written:
    """A save: its bytes, and the seconds of processor time that it has used."""

    size: int = 0
    cpu_s: float = 0.0


class Saveable(Protocol):
    """A session as its saver sees it. Times are seconds of its clock."""

    handle: str
    last_used: float

    @property
    def changed(self) -> bool:
        """Whether there is something that was not saved."""

    @property
    def threaded(self) -> bool:
        """True if threads of its code may change it at any time."""

    async def save(self, *, urgent: bool = False, most_bytes: int | None = None) -> Written | None:
        """Save what it holds, or return None while it is in use.

        An `urgent` save waits for the cell that runs, and the next cell waits for it. With
        `most_bytes` all variables are saved, or none where they do not fit. Raises
        HibernationError, OSError.
        """

    async def settle(self) -> bool:
        """Stop its cells and wait until it can be saved; False where nothing was under way."""

    def unsaved(self, reason: str) -> None:
        """The last save has failed for a reason; an empty one: it has not."""

    def rarely_saved(self, pause_s: float) -> None:
        """Report that what it holds can be saved every `pause_s` seconds only; 0 for as usual."""


Turn = Callable[[], AbstractAsyncContextManager[bool]]
"""Holds a kernel between two cells, and says whether it may be saved now."""


async def write_forked(
    kernel: Kernel, kept: Kept, turn: Turn, *, most_bytes: int | None
) -> tuple[Sleep, float] | None:
    """Let forked children of a kernel write its variables; return None when it may not be saved.

    The second value is the processor time in seconds. Raises UnfitToFork, HibernationError,
    OSError.
    """
    left: dict[str, str] = {}
    failure = HibernationError("nothing was tried")
    for _ in range(ATTEMPTS):
        most = await anyio.to_thread.run_sync(kept.room)
        most = most if most_bytes is None else min(most, most_bytes)
        with Saving() as saving:
            async with turn() as free:
                if not free:
                    return None
                path = kept.fresh(kernel)
                await saving.begin(kernel, max_bytes=most, whole=most_bytes is not None, leave=left)
            try:
                dump = await saving.finish(path, max_bytes=most)
                return _told(dump, left), saving.cpu_s
            except HibernationError as error:
                if not saving.last:
                    raise
                left[saving.last] = f"ended the process that stored it: {error}"
                failure = error
    raise failure


async def write_here(kernel: Kernel, kept: Kept, *, most_bytes: int | None) -> tuple[Sleep, float]:
    """Let the kernel itself write its variables, while no cell runs in it.

    The second value is the processor time in seconds. Raises HibernationError, OSError.
    """
    before, began = kernel.handle.usage().cpu_s, anyio.current_time()
    room = await anyio.to_thread.run_sync(kept.room)
    most = room if most_bytes is None else min(room, most_bytes)
    path = kept.fresh(kernel)
    seconds = min(HERE_S * 2**kept.late, SECONDS)
    dump = await take(kernel, path, max_bytes=most, seconds=seconds)
    late = kept.had(name for name, why in dump.lost.items() if why.startswith(LATE))
    if late and seconds < SECONDS:
        kept.late += 1
        raise HibernationError(
            f"{seconds:g} s of processor time were not enough for {one_line(late[0])}, which was "
            "saved before"
        )
    kept.late = 0
    if most_bytes is not None and any(why.startswith(TOO_LARGE) for why in dump.lost.values()):
        raise HibernationError(TOO_LARGE)
    used = kernel.handle.usage().cpu_s - before  # with that of other threads
    return _told(dump, {}), min(used, anyio.current_time() - began)


def _told(dump: Dump, left: Mapping[str, str]) -> Sleep:
    return Sleep(
        0.0,
        0.0,
        dump=dump if dump.stored else None,
        lost={**dump.lost, **left},
        changed=dump.changed,
        files=dump.files,
    )


IDLE_S = 2.0
"""Seconds without a cell after which what has changed is saved."""
LONGEST_S = 30.0
"""Seconds after the first unsaved change at which a session is saved that is never idle."""
RETRY_S = 60.0
RETRY_MOST_S = 3600.0
AT_ONCE = 2
"""Saves at a time. Those that wait for a cell do not count: they could keep others waiting."""
LAST_S = 30.0
"""Seconds for all saves at the server's end, small ones first: many clients kill it after 4 s."""
SETTLE_S = 2.5
"""Seconds that cells have to stop at the end. Shorter than `--grace`, after which a kernel is
killed: a session that stops later has no time left for its save."""
LAST_AT_ONCE = 8
SMALL_BYTES = 20 * MIB


class Saver:
    """Saves sessions that have changed; `clock` is theirs, `after` is called behind each save."""

    def __init__(self, clock: Callable[[], float], after: Callable[[], object]) -> None:
        self._clock = clock
        self._after = after
        self._waiting: dict[str, Saveable] = {}
        self._since: dict[str, float] = {}
        """The first unsaved change."""
        self._looks: dict[str, tuple[Saveable, float]] = {}
        """When to look for what has changed without a cell."""
        self._not_before: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._hurried: set[str] = set()
        self._saving: set[str] = set()
        self._wake = anyio.Event()

    def touch(self, session: Saveable, *, at_once: bool = False) -> None:
        """A session has changed; `at_once` where what was saved before is of no use."""
        if at_once:
            self._hurried.add(session.handle)
            self._not_before.pop(session.handle, None)
        if at_once or session.handle not in self._waiting:
            self._waiting[session.handle] = session
            self._since.setdefault(session.handle, self._clock())
            self._wake.set()

    def forget(self, session: Saveable) -> None:
        """A session has ended."""
        for known in (
            self._waiting,
            self._since,
            self._looks,
            self._not_before,
            self._failures,
        ):
            known.pop(session.handle, None)
        self._hurried.discard(session.handle)

    def due(self) -> dict[str, float]:
        """When each session that has changed is to be saved, by handle."""
        return {
            handle: max(self._wanted(session), self._not_before.get(handle, 0.0))
            for handle, session in self._waiting.items()
            if handle not in self._saving
        }

    def _wanted(self, session: Saveable) -> float:
        if session.handle in self._hurried:
            return session.last_used
        return min(session.last_used + IDLE_S, self._overdue(session))

    def _overdue(self, session: Saveable) -> float:
        return self._since[session.handle] + LONGEST_S

    async def run(self) -> None:
        """Save for ever; has to be run as a task."""
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as tasks:
            while True:
                self._wake = anyio.Event()
                self._look()
                due, now = self.due(), self._clock()
                for handle, moment in due.items():
                    if moment <= now:
                        self._saving.add(handle)
                        tasks.start_soon(self._save, self._waiting[handle], limiter)
                later = [moment for moment in due.values() if moment > now]
                later += [moment for _, moment in self._looks.values()]
                with anyio.move_on_after(min(later) - now if later else None):
                    await self._wake.wait()

    def _look(self) -> None:
        """Look for what threads, tasks and timers of code have changed between cells."""
        now = self._clock()
        due = {name: each for name, (each, moment) in self._looks.items() if moment <= now}
        for handle, session in due.items():
            del self._looks[handle]
            if session.changed:
                self.touch(session)
            elif session.threaded:
                self._looks[handle] = (session, now + LONGEST_S)

    async def finish(self) -> None:
        """Save what has changed at the server's end, in `LAST_S`: small sessions first."""
        found = dict(self._waiting)
        found |= {name: each for name, (each, _) in self._looks.items() if each.changed}
        left, self._waiting, self._looks = list(found.values()), {}, {}
        with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_S):
            for most_bytes in (SMALL_BYTES, None):
                limiter, sessions, left = anyio.CapacityLimiter(LAST_AT_ONCE), left, []
                async with anyio.create_task_group() as tasks:
                    for session in sessions:
                        tasks.start_soon(self._last, session, most_bytes, limiter, left)

    async def _save(self, session: Saveable, limiter: anyio.CapacityLimiter) -> None:
        handle, began = session.handle, self._clock()
        urgent = began >= self._overdue(session)
        try:
            with Barrier("keeping a session", handle) as barrier:
                try:
                    if urgent:
                        written = await session.save(urgent=True)
                    else:
                        async with limiter:
                            written = await session.save()
                    self._saved(session, began, written)
                except HibernationError as error:
                    logger.info("session %s could not be kept: %s", handle, error)
                    self._fail(session, began, str(error))
            if barrier.failure is not None:
                self._fail(session, began, reason_of(barrier.failure))
            with Barrier("making room for kept sessions"):
                await anyio.to_thread.run_sync(self._after)
        finally:
            self._saving.discard(handle)
            self._wake.set()

    def _saved(self, session: Saveable, began: float, written: Written | None) -> None:
        handle = session.handle
        if written is None:  # it has come into use
            self._not_before[handle] = self._clock() + IDLE_S
            return
        session.unsaved("")
        self._failures.pop(handle, None)
        self._hurried.discard(handle)
        pause = pause_after(written.size, written.cpu_s)
        self._not_before[handle] = began + pause
        session.rarely_saved(pause if pause > LONGEST_S else 0.0)
        if handle not in self._waiting:  # it has ended
            return
        if session.changed:
            self._since[handle] = began
            return
        self._waiting.pop(handle, None)
        self._since.pop(handle, None)
        self._looks[handle] = (session, self._clock() + LONGEST_S)

    def _fail(self, session: Saveable, began: float, reason: str) -> None:
        handle = session.handle
        session.unsaved(reason)
        count = self._failures[handle] = self._failures.get(handle, 0) + 1
        self._not_before[handle] = began + min(RETRY_S * 2 ** (count - 1), RETRY_MOST_S)

    async def _last(
        self,
        session: Saveable,
        most_bytes: int | None,
        limiter: anyio.CapacityLimiter,
        left: list[Saveable],
    ) -> None:
        """Stop the cells of a session and save it; add it to `left` where it is too large."""
        with Barrier("keeping a session at the end", session.handle):
            with anyio.move_on_after(SETTLE_S) as settling:
                await session.settle()
            if settling.cancelled_caught:
                logger.warning("session %s was not kept: its cell did not stop", session.handle)
                return
            try:
                async with limiter:
                    while await session.save(most_bytes=most_bytes) is None:
                        if not await session.settle():
                            return
            except HibernationError as error:
                if most_bytes is None:
                    logger.warning("what has changed in a session was not kept: %s", error)
                else:
                    left.append(session)
