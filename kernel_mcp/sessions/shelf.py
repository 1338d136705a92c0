"""Saves of sessions: for their own hibernation, or for a later server as well."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.errors import HibernationError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.linux.folders import private_folder
from kernel_mcp.output.text import Masks
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.keeping import Judge, Keeping, Past, judge_of, moment, python_of, saved_of
from kernel_mcp.sessions.manifest import Saved, sync
from kernel_mcp.sessions.snapshot import Dump
from kernel_mcp.sessions.store import Entry, SaveFolder
from kernel_mcp.sessions.trace import Trace

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

NOTEBOOK = "notebook"
"""Key of the notebook in the request of a session."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that variables are allowed to take, and that the disk has."""

    bound: int
    free: int

    @property
    def size(self) -> int:
        """Bytes that variables may take."""
        return min(self.bound, self.free)


class Shelf:
    """The save of a session that ends with its use, or at last with the session.

    All methods block, and raise OSError.
    """

    def __init__(
        self,
        entry: SaveFolder,
        *,
        asleep_bytes: int,
        masks: Masks | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """A session that sleeps may have `asleep_bytes` in any case; 0 is no bound.

        `masks` are put over previews of variables.
        """
        self.entry = entry
        self.late = 0
        """Attempts of the kernel itself in a row that ran out of time."""
        self._asleep_bytes = asleep_bytes
        self._masks = masks or Masks()
        self._now = now
        self._next = Saved("", "")

    def room(self, *, asleep: bool = False) -> Room:
        """Return the room for variables, of a session that is about to sleep or goes on."""
        private_folder(self.entry.folder)
        bound = self.entry.bound()
        if asleep:
            bound = max(bound, self._asleep_bytes or sys.maxsize)
        return Room(bound, self.entry.free())

    def fresh(self, kernel: Kernel) -> Path:
        """Return where to write what this kernel holds now."""
        environment = kernel.environment
        self._next = replace(
            self._logged(),
            moment=self._now(),
            undone=False,
            python=python_of(environment.version),
            environment=tuple(environment.packages),
        )
        return self.entry.fresh()

    def keep(self, dump: Dump) -> Judge:
        """Make the dump that was written there the save; return what judges its readers."""
        lost = {name: self._masks.masked(reason) for name, reason in dump.lost.items()}
        saved = replace(self._next, dump="", size=0, checksum="", variables={"lost": lost})
        if dump.stored:
            row = {**dump.row(), "lost": lost}
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
        return judge_of(saved)

    def had(self, names: Iterable[str]) -> list[str]:
        """Return those of some names that are among the variables saved, and held by the kernel."""
        return []

    def unneeded(self) -> None:
        """Note that the kernel stays that was to sleep."""
        self.entry.clear()

    def used(self) -> None:
        """Note that a kernel has the variables."""
        self.entry.clear()

    def drop(self) -> None:
        """Forget the variables."""
        self.entry.clear()

    def _logged(self) -> Saved:
        """Return what is known of the session besides its variables."""
        return Saved("", "")


class Kept(Shelf):
    """The save of a session that outlives the server: with its cells, and a trace of those since.

    All methods block but for what is async.
    """

    entry: Entry

    def __init__(
        self,
        entry: Entry,
        keeping: Keeping,
        request: KernelRequest,
        timeout_s: float,
        *,
        asleep_bytes: int,
        masks: Masks | None = None,
    ) -> None:
        """See `Shelf`. Raises OSError."""
        super().__init__(entry, asleep_bytes=asleep_bytes, masks=masks, now=keeping.store.now)
        self.cells: History | None = None
        self.cell: Callable[[], int | None] = lambda: None
        """The last cell whose work the variables hold."""
        self.holds: Callable[[int], bool] = lambda _cell: True
        """Returns True if the variables hold the work of a cell."""
        self.notebook: Callable[[], str] = str
        """The path of the notebook to which cells are added, if there is one."""
        self._base = saved_of(entry, request, timeout_s, keeping.doors(request.network))
        self._next = self._base
        self._count = 0
        self._kept = -1
        """The count of cells that the entry has."""
        self._live = False
        """True if the save is of the kernel that lives, or was loaded into it."""
        self._known = (-1, -1)
        self._trace = Trace(entry.trace)

    @property
    def unlogged(self) -> bool:
        """Return True if there are cells that were not saved."""
        return len(self.cells or ()) != self._known[0]

    @property
    def dirty(self) -> bool:
        """Return True if there are cells or variables that were not saved."""
        return (len(self.cells or ()), self.cell() or 0) != self._known

    def clear(self) -> None:
        """Forget the cells in the trace: they are saved, or of no use."""
        self._trace.forget(self._count)

    def begins(self, number: int, code: str) -> None:
        """Write to the trace that a cell begins."""
        self._trace.add(number, code)

    def fresh(self, kernel: Kernel) -> Path:
        """See `Shelf`."""
        path = super().fresh(kernel)
        self._next = replace(
            self._next, cell=self.cell(), through=self._count, doors=self._base.doors
        )
        return path

    def keep(self, dump: Dump) -> Judge:
        """See `Shelf`."""
        judge = super().keep(dump)
        if self.entry.adopted:
            self.entry.adopt(False)
        self._live = True
        self._kept = self._count
        return judge

    def adopted(self) -> None:
        """Note that the kernel is that of a branch: nothing of it was saved. Raises OSError."""
        self._live, self._known = False, (-1, -1)
        self.entry.adopt(True)

    def unneeded(self) -> None:
        """See `Shelf`: what was saved stays so."""

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
        """See `Shelf`."""
        past = self.past()
        there = past.dump.names if past is not None and past.dump is not None else ()
        return [name for name in names if name in there]

    def past(self) -> Past | None:
        """Return what this server saved of the variables that the kernel holds, if anything."""
        saved = self.entry.saved
        if not self._live or saved is None or not saved.dump:
            return None
        try:
            dump = self.entry.dump()
        except HibernationError:
            return None
        return Past(saved, moment(saved.moment, self._now()), dump)

    def close(self) -> None:
        """Let others have the entry."""
        self._trace.close()
        self.entry.close()

    def _logged(self) -> Saved:
        """Return the last save with the cells of now."""
        assert self.cells is not None
        history = self.cells.state()
        self._count = len(history["places"])
        before = self.entry.saved or self._base
        asked = {**self._base.asked, NOTEBOOK: self.notebook()}
        return replace(before, history=history, asked=asked)
