"""Checkpoints of a session's kernel: when to make one, which to keep, and which to restore.

A checkpoint is a forked copy. It costs the time of the fork, and afterwards one page fault for each
page that either process changes. A checkpoint is made when its cost is below 5 % of the work that
it protects, or below `TRIFLE_S`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError, Uncopyable
from kernel_mcp.linux.proc import available_memory, memory_lines

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.launch.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

LEAST_WORK_S = 1.0
"""Minimum seconds of work since the last copy, for another one right after a cell."""
PART = 20
"""Minimum work that a copy protects, as a multiple of its cost."""
FAULT_S = 3e-6
"""Seconds to copy one page on write, measured in a virtual machine; less on real hardware."""
TRIFLE_S = 0.025
"""Cost in seconds up to which a copy is made in every pause, however little it protects."""
SMALL = 256 * 1024 * 1024
"""Resident bytes up to which a kernel's first fork is expected to take at most `TRIFLE_S`. For 512
MiB in small pages 21 ms were measured."""
PAUSE_S = 1.0
"""Seconds without a cell after which a changed kernel is copied."""
PACE_S = 0.04
"""Seconds between copies of sessions whose pauses begin at the same time. A fork and the page
faults after it use some 20 ms of processor time."""
IDLE_S = 600.0
"""Seconds without a cell after which copies are dropped."""
RESTING = 2
"""Minimum number of idle sessions that keep copies which are cheap to make again."""
RESTING_MEMORY = 1 / 16
"""Fraction of the machine's free memory that the copies of further idle sessions may hold."""
RESTING_BYTES = 16 * 1024 * 1024
"""Estimated bytes of one such copy, more than usual."""
CROWD = 8
"""Number of sessions that run cells, per processor, above which no copies are made."""
MOST = 3
"""Maximum number of copies of one session."""
SHARED = 0.8
"""Fraction of its memory that an older copy must share; below it the copy is dropped."""
MEMORY = 0.5
"""Maximum size of a kernel that is copied, as a fraction of the machine's free memory."""
PROCESSORS = os.cpu_count() or 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def most_idle() -> int:
    """Return the number of idle sessions that may keep copies which are cheap to make again."""
    with suppress(OSError):
        return max(RESTING, int(available_memory() * RESTING_MEMORY) // RESTING_BYTES)
    return RESTING


class IdleCheckpoints:
    """Limits the copies of idle sessions: only the most recently used sessions keep theirs.

    A suspended copy costs some 3 MB, a tenth of a small kernel or more. Both processes write to
    pages that they shared, if only to count references.
    """

    def __init__(
        self,
        most: Callable[[], int] = most_idle,
        busy: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`most` returns how many sessions may keep copies.

        `busy` returns the number of sessions that run cells, per processor.
        """
        self._busy = busy
        self._most = most
        self._turns = anyio.Semaphore(PROCESSORS)
        self._waiting: set[anyio.CancelScope] = set()
        self._known: OrderedDict[Checkpoints, Callable[[], None]] = OrderedDict()
        self._used: OrderedDict[Checkpoints, None] = OrderedDict()
        """Sessions in the order in which they ran their last cells."""
        self._refused: set[Checkpoints] = set()

    @property
    def crowded(self) -> bool:
        """True if more than `CROWD` sessions per processor run cells: no copies are made then."""
        return self._busy() > CROWD

    @property
    def part(self) -> float:
        """Estimated fraction of a processor for each running cell, at most 1."""
        return 1 / max(1.0, self._busy())

    def worked(self, session: Checkpoints) -> None:
        """Note that a session has run a cell."""
        self._used[session] = None
        self._used.move_to_end(session)

    def forget(self, session: Checkpoints) -> None:
        """Remove a session that no longer has a kernel."""
        self._used.pop(session, None)

    def keeps(self, session: Checkpoints) -> bool:
        """Return True if a session is among the most recently used, which keep their copies."""
        return any(each is session for each in islice(reversed(self._used), self._most()))

    def pause_s(self, session: Checkpoints) -> float:
        """Return the idle seconds before a session may try `at_once`.

        Refused sessions retry one at a time, `PACE_S` apart.
        """
        if session not in self._refused or self.crowded:
            return PAUSE_S
        return PACE_S * min(len(self._refused), max(1, self._most()))

    @contextmanager
    def at_once(self, session: Checkpoints) -> Iterator[bool]:
        """Yield True if a copy may be made in this pause.

        Yields False if `crowded`, or if one copy per processor is already being made.
        """
        free = not self.crowded
        if free:
            try:
                self._turns.acquire_nowait()
            except anyio.WouldBlock:
                free = False
        if free:
            self._refused.discard(session)
        else:
            self._refused.add(session)
        try:
            yield free
        finally:
            if free:
                self._turns.release()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """Wait until a copy may be made before a cell; one per processor is made at a time.

        Yields True then, but False if it is `crowded` or becomes so during the wait.
        """
        with anyio.CancelScope() as waiting:
            self._waiting.add(waiting)
            try:
                await self._turns.acquire()
            finally:
                self._waiting.discard(waiting)
        if waiting.cancelled_caught:
            yield False
            return
        try:
            yield not self.crowded
        finally:
            self._turns.release()

    def add(self, session: Checkpoints, give_up: Callable[[], None]) -> None:
        """Add a session that became idle; `give_up` is called if later ones exceed the limit."""
        self._known.pop(session, None)
        self._known[session] = give_up
        most = self._most()
        while len(self._known) > most:
            self._known.popitem(last=False)[1]()

    def remove(self, session: Checkpoints) -> None:
        """Remove a session that is used again or has no copies; if `crowded`, end all waits."""
        self._known.pop(session, None)
        self._refused.discard(session)
        if self._waiting and self.crowded:
            for each in self._waiting:
                each.cancel()


class Checkpoints:
    """The copies of one session's kernel, each with the last cell whose effects it has."""

    def __init__(
        self,
        mode: str,
        clock: Callable[[], float],
        news: Callable[[str], object],
        saved: Callable[[], bool] = lambda: False,
        idle_checkpoints: IdleCheckpoints | None = None,
    ) -> None:
        """`mode` is that of `--checkpoints`, `clock` returns seconds, `news` adds a notice.

        `saved` returns True if the variables are also saved in the background. `idle_checkpoints`
        is shared by all sessions of the principal.
        """
        self._mode = mode
        self._clock = clock
        self._news = news
        self._saved = saved
        self._idle_checkpoints = idle_checkpoints or IdleCheckpoints()
        self._given_up = False
        self._as_of: dict[Checkpoint, int] = {}
        self._work_s = 0.0
        self._fork_s = 0.0
        self._cost = 0.0
        self._stale = False
        self._reported: set[str] = set()
        self._useless: Kernel | None = None

    def worked(self, seconds: float) -> None:
        """Note that a cell has run for `seconds`, which count by its fraction of a processor."""
        self._work_s += seconds * self._idle_checkpoints.part
        self._stale = True
        self._idle_checkpoints.worked(self)

    def pause_s(self, kernel: Kernel | None) -> float | None:
        """Return the seconds without a cell after which to call `pause`; None for never."""
        if kernel is None or kernel.exit is not None or self._mode == "off":
            return None
        possible = kernel.handle.sandbox_group is not None and kernel is not self._useless
        if self._stale and possible:
            return self._idle_checkpoints.pause_s(self)
        return IDLE_S if self._as_of else None

    async def pause(self, kernel: Kernel, as_of: int) -> None:
        """Make a copy while no cell runs, if it is cheap or protects enough work; or drop copies.

        Copies are dropped if nothing has changed since the last one. They are also dropped if they
        are cheap to make again and too many sessions were used after this one.
        """
        if not self._stale:
            self._give_up(kernel)
            return
        if self._trifling(kernel) and not self._idle_checkpoints.keeps(self):
            self._idle_checkpoints.remove(self)
            self._give_up(kernel)
            self._stale, self._given_up = False, True
            return
        with self._idle_checkpoints.at_once(self) as free:
            if not free:
                return  # try again in the next pause
            cost_s = await self._cost_s()
            if cost_s <= TRIFLE_S or self._work_s > PART * cost_s:
                await self.take(kernel, as_of)
        self._stale = False
        if self._as_of and self._trifling(kernel):
            self._idle_checkpoints.add(self, partial(self._give_up, kernel))

    def stir(self) -> None:
        """Note that the session is used: its copies are not dropped for other sessions."""
        self._idle_checkpoints.remove(self)

    async def after(self, kernel: Kernel, as_of: int) -> None:
        """Make a copy after a cell if that protects enough work."""
        if kernel.handle.sandbox_group is None:
            return
        if self._work_s > LEAST_WORK_S and self._work_s > PART * await self._cost_s():
            await self.take(kernel, as_of)

    async def ahead(self, kernel: Kernel, as_of: int) -> None:
        """Make a copy before a cell with a long time limit, unless one of this state exists."""
        if self._stale or self._given_up:
            await self.take(kernel, as_of)

    @property
    def owed(self) -> bool:
        """True if a cheap copy was dropped and is due again before the next cell."""
        return self._given_up and not self._idle_checkpoints.crowded

    async def pay(self, kernel: Kernel, as_of: int) -> None:
        """Make the copy that is `owed`, unless sessions become crowded during the wait."""
        async with self._idle_checkpoints.turn() as free:
            if free:
                await self.take(kernel, as_of)

    async def asked(self, kernel: Kernel, as_of: int) -> None:
        """Make a copy that the agent has requested. Raises LaunchError."""
        await self.take(kernel, as_of, asked=True)

    async def take(
        self, kernel: Kernel, as_of: int, *, asked: bool = False, hurry: bool = False
    ) -> Checkpoint | None:
        """Make a copy and return it; None if none can be made.

        Objects that prevent it are named in a notice, each once. With `hurry` the memory of older
        copies is not measured. With `asked` LaunchError is raised instead of returning None.
        """
        if not asked and (self._mode == "off" or kernel is self._useless):
            return None
        found = self.at(as_of)
        current = found is not None and self._as_of[found] == as_of
        self._given_up = False
        if found is not None and current and not self._stale and not self._work_s:
            return found
        try:
            made = await self._make(kernel)
        except Uncopyable as reason:
            self._stale = False
            self._tell(reason.words)
            if asked:
                raise
            return None
        except LaunchError as reason:
            self._useless = None if kernel.handle.sandbox_group is None else kernel
            logger.info("no checkpoint could be made: %s", reason)
            if asked:
                raise
            return None
        self._as_of[made] = as_of
        self._work_s, self._stale = 0.0, False
        self._useless = None
        await self._thin_out(kernel, look=not hurry)
        return made

    def at(self, as_of: int) -> Checkpoint | None:
        """Return the newest usable copy without effects of cells after `as_of`; None for none."""
        found = [each for each, cell in self._as_of.items() if each.usable and cell <= as_of]
        return found[-1] if found else None

    @property
    def newest(self) -> Checkpoint | None:
        """The last usable copy; None without one."""
        return self.at(sys.maxsize)

    def words(self, kernel: Kernel | None) -> str:
        """Return, for `info`, the mode and the cells after which copies were made.

        If none can be made, return the reason instead.
        """
        if self._mode == "off":
            return OFF
        if kernel is not None and kernel.handle.sandbox_group is None:
            return none_of(kernel)
        cells = ", ".join(str(cell) for each, cell in self._as_of.items() if each.usable)
        return f"{self._mode}; {f'as after cell {cells}' if cells else 'none now'}"

    def advice(self, kernel: Kernel) -> str:
        """Return a sentence on when checkpoints are made; empty if none can be made."""
        if self._mode == "off" or kernel.handle.sandbox_group is None:
            return ""
        return (
            " One is made in a pause of a second, after work of a second, and before a cell with "
            "checkpoint=true."
        )

    def state_of(self, checkpoint: Checkpoint) -> int:
        """Return the last cell whose effects a copy has; 0 for none."""
        return self._as_of.get(checkpoint, 0)

    def share(self, checkpoint: Checkpoint, as_of: int) -> None:
        """Add a copy that another session made; its state counts as that after cell `as_of`."""
        checkpoint.users += 1
        self._as_of[checkpoint] = as_of

    def back_at(self, kernel: Kernel, checkpoint: Checkpoint) -> None:
        """Drop all copies later than the one from which the kernel was restored."""
        later = False
        for each in list(self._as_of):
            if later:
                self.drop(kernel, each)
            later = later or each is checkpoint
        self._work_s, self._stale = 0.0, False

    def drop(self, kernel: Kernel, checkpoint: Checkpoint) -> None:
        """Drop a copy."""
        del self._as_of[checkpoint]
        if kernel.handle.sandbox_group is not None:
            kernel.handle.sandbox_group.drop(checkpoint)

    def drop_all(self, kernel: Kernel) -> None:
        """Drop all copies, because the session no longer has that kernel."""
        self._idle_checkpoints.forget(self)
        self._drop_copies(kernel)

    def _drop_copies(self, kernel: Kernel) -> None:
        self._idle_checkpoints.remove(self)
        self._given_up = False
        for each in list(self._as_of):
            self.drop(kernel, each)

    def _give_up(self, kernel: Kernel) -> None:
        """Drop the copies of an idle session; those of a dead kernel stay, to restore it."""
        if kernel.exit is None and self._as_of:
            self._drop_copies(kernel)
            self._given_up = self._fork_s <= TRIFLE_S

    def _trifling(self, kernel: Kernel) -> bool:
        """Return True if a copy is cheap to make again before the next cell.

        Its fork then takes at most `TRIFLE_S`.
        """
        return self._fork_s <= TRIFLE_S if self._fork_s else _resident(kernel) <= SMALL

    async def _make(self, kernel: Kernel) -> Checkpoint:
        if kernel.handle.sandbox_group is None:
            raise LaunchError(OFF if self._mode == "off" else none_of(kernel))
        if not self._affordable(kernel):
            raise LaunchError("the machine has too little free memory for a copy of the kernel")
        made, self._fork_s = await kernel.checkpoint()
        return made

    async def _thin_out(self, kernel: Kernel, *, look: bool) -> None:
        """Drop copies that have ended, exceed `MOST`, or share too little memory; never the newest.

        With `look` the shared memory is measured, in some 10 ms for each gigabyte of each copy.
        """
        former = list(self._as_of)[:-1]
        for number, each in enumerate(former):
            own = 1.0
            if each.usable and number > len(former) - MOST:
                if not look:
                    continue
                with Barrier("looking at the memory of a checkpoint"):
                    alone, whole = await anyio.to_thread.run_sync(_memory, each.pid)
                    own = alone / whole
            if own > 1 - SHARED:
                self.drop(kernel, each)

    def _affordable(self, kernel: Kernel) -> bool:
        with suppress(OSError):
            return _resident(kernel) <= available_memory() * MEMORY
        return False

    async def _cost_s(self) -> float:
        """Return the cost of the last copy in seconds: its fork and one fault per unshared page.

        Without a usable copy, return the last known cost, initially 0.
        """
        if (last := self.newest) is not None:
            with Barrier("looking at the memory of a checkpoint"):
                own, _ = await anyio.to_thread.run_sync(_memory, last.pid)
                self._cost = self._fork_s + own / _PAGE * FAULT_S
        return self._cost

    def _tell(self, words: Sequence[str]) -> None:
        """Add a notice of objects that prevent a checkpoint, once for each of `words`."""
        if news := [word for word in words if word not in self._reported]:
            self._reported.update(news)
            self._news(
                f"No checkpoint of this session can be made while its kernel has "
                f"{', '.join(news)}: if the kernel dies, {SAVED if self._saved() else LOST}"
            )


OFF = "off (--checkpoints off)"
NONE_HERE = "there are no checkpoints of this kernel: it was not forked from a template, as "
NEVER = "no kernel of this server is (--no-template, or a sandbox other than bubblewrap)"
NONE_FOREIGN = "only this server's own Python kernels have checkpoints"


def none_of(kernel: Kernel) -> str:
    """Return why a kernel that was not forked from a template has no checkpoints."""
    if not kernel.extended:
        return NONE_FOREIGN
    return NONE_HERE + (kernel.handle.report.unforked or NEVER)


LOST = "all variables are lost. Save what took long to compute"
SAVED = (
    "it goes back to the last save in the background, which comes 2 s after a cell, or 30 s after "
    "the first of many in a row"
)


def _resident(kernel: Kernel) -> float:
    """Return the resident bytes of a kernel; infinity if they cannot be read."""
    with suppress(OSError):
        return int(Path(f"/proc/{kernel.handle.pid}/statm").read_bytes().split()[1]) * _PAGE
    return math.inf


def _memory(pid: int) -> tuple[int, int]:
    """Return the unshared resident bytes of a process, and all its resident bytes.

    This takes some 10 ms per gigabyte.
    """
    names = (b"Rss:", b"Private_Clean:", b"Private_Dirty:")
    found = memory_lines(pid, "smaps_rollup", names)
    own = found.get(b"Private_Clean:", 0) + found.get(b"Private_Dirty:", 0)
    return own, max(1, found.get(b"Rss:", 0))
