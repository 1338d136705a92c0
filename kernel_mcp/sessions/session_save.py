"""Saves of sessions, for hibernation or also for a later server."""

from __future__ import annotations

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
from kernel_mcp.sessions.cell_journal import CellJournal
from kernel_mcp.sessions.compatibility import CompatibilityCheck, compatibility_check, python_of
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.manifest import Saved, sync
from kernel_mcp.sessions.output_journal import OutputJournal
from kernel_mcp.sessions.persistence import Persistence, PreviousSession, saved_of
from kernel_mcp.sessions.snapshot import Dump
from kernel_mcp.sessions.store_entry import SaveFolder, StoreEntry
from kernel_mcp.sessions.words import moment

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

NOTEBOOK = "notebook"
"""Key of the open notebook's path in `Saved.asked`."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """Room for variables in bytes: `bound` is the limit, `free` the space on the disk."""

    bound: int
    free: int

    @property
    def size(self) -> int:
        """Bytes that variables may take."""
        return min(self.bound, self.free)


class SessionSave:
    """The save of a session that is not persisted; it is removed once a kernel has loaded it.

    All methods are blocking and raise OSError.
    """

    def __init__(
        self,
        entry: SaveFolder,
        *,
        masks: Masks | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`masks` hide values in previews of variables."""
        self.entry = entry
        self.late = 0
        """Number of consecutive saves by the kernel itself that exceeded their time."""
        self._masks = masks or Masks()
        self._now = now
        self._next = Saved("", "")

    def room(self, *, hibernating: bool = False) -> Headroom:
        """Return the room for variables, see `SaveFolder.bound`."""
        private_folder(self.entry.folder)
        return Headroom(self.entry.bound(hibernating=hibernating), self.entry.free())

    def new_dump_path(self, kernel: Kernel) -> Path:
        """Return the path for a dump of this kernel, and prepare the manifest for it."""
        environment = kernel.environment
        self._next = replace(
            self._logged(),
            moment=self._now(),
            undone=False,
            python=python_of(environment.version),
            environment=tuple(environment.packages),
        )
        return self.entry.new_dump_path()

    def commit_dump(self, dump: Dump) -> CompatibilityCheck:
        """Commit a dump that was written to `new_dump_path`.

        Return a function that checks if a kernel can load it.
        """
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
        return compatibility_check(saved)

    def saved_names(self, names: Iterable[str]) -> list[str]:
        """Return the `names` that are in the last save of this kernel."""
        return []

    def mark_unneeded(self) -> None:
        """Discard the save if it is of no further use, because the kernel was not ended."""
        self.entry.clear()

    def mark_loaded(self) -> None:
        """Note that a kernel has loaded the variables; discard the save if not persisted."""
        self.entry.clear()

    def drop(self) -> None:
        """Remove the saved variables."""
        self.entry.clear()

    def _logged(self) -> Saved:
        """Return the manifest on which the next one is based."""
        return Saved("", "")


class PersistedSave(SessionSave):
    """The save of a persisted session: variables, cells, and a journal of cells since the save.

    All methods are blocking, except those that are async.
    """

    entry: StoreEntry

    def __init__(
        self,
        entry: StoreEntry,
        persistence: Persistence,
        request: KernelRequest,
        timeout_s: float,
        *,
        masks: Masks | None = None,
    ) -> None:
        """See `SessionSave`. Raises OSError."""
        super().__init__(entry, masks=masks, now=persistence.store.now)
        self.cells: History | None = None
        self.last_cell: Callable[[], int | None] = lambda: None
        """Returns the last cell whose effects the variables have; None for none."""
        self.holds: Callable[[int], bool] = lambda _cell: True
        """Returns True if the variables have the effects of a cell."""
        self.notebook: Callable[[], str] = str
        """Returns the path of the open notebook; empty for none."""
        grants = persistence.grants(request.network, request.tools)
        self._base = saved_of(entry, request, timeout_s, grants)
        self._next = self._base
        self._count = 0
        self._saved_count = -1
        """Number of cells in the entry."""
        self._live = False
        """True if the save was written by the live kernel, or loaded into it."""
        self._known = (-1, -1)
        self._journal = CellJournal(entry.journal_path)
        self.output = OutputJournal(entry.output_path)

    @property
    def unlogged(self) -> bool:
        """True if there are unsaved cells."""
        return len(self.cells or ()) != self._known[0]

    @property
    def dirty(self) -> bool:
        """True if there are unsaved cells or variables."""
        return (len(self.cells or ()), self.last_cell() or 0) != self._known

    def clear_journal(self) -> None:
        """Remove saved cells from the journal, and cells of an earlier server."""
        self._journal.forget(self._count)
        self.output.forget(self._count)

    def log_cell(self, number: int, code: str) -> None:
        """Write a cell that is about to run to the journal.

        Before the first save the manifest has what the session has requested, such as its kernel.
        """
        if self.entry.saved is None and any(self._base.asked.values()):
            self.entry.commit(self._base)
        self._journal.add(number, code)

    def new_dump_path(self, kernel: Kernel) -> Path:
        """See `SessionSave`."""
        path = super().new_dump_path(kernel)
        self._next = replace(
            self._next, cell=self.last_cell(), through=self._count, doors=self._base.doors
        )
        return path

    def commit_dump(self, dump: Dump) -> CompatibilityCheck:
        """See `SessionSave`."""
        judge = super().commit_dump(dump)
        if self.entry.adopted:
            self.entry.set_adopted(False)
        self._live = True
        self._saved_count = self._count
        return judge

    def mark_adopted(self) -> None:
        """Note that the kernel is that of a branch and was not saved. Raises OSError."""
        self._live, self._known = False, (-1, -1)
        self.entry.set_adopted(True)

    def mark_unneeded(self) -> None:
        """Do nothing: a persisted save stays."""

    def mark_loaded(self) -> None:
        """Note that the save, which stays, is that of the live kernel."""
        self._live = True

    def drop(self) -> None:
        """See `SessionSave`."""
        self._live = False
        self.entry.drop_variables(len(self.cells or ()))
        if self.entry.adopted:
            self.entry.set_adopted(False)

    async def save_cells(self) -> None:
        """Save the cells alone. Raises OSError."""
        await self._log(self._logged())

    async def mark_undone(self) -> bool:
        """Mark the save as undone if the variables returned to an earlier state; else return False.

        From then on it is restored only on request. Raises OSError.
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
        self._saved_count = self._count
        self.trim_journal()

    def trim_journal(self) -> None:
        """Remove saved cells from the journal, unless the last save failed."""
        if self._saved_count == self._count:
            self._known = (self._count, self._next.cell or 0)
            self._journal.forget(self._count)
            self.output.forget(self._count)

    def saved_names(self, names: Iterable[str]) -> list[str]:
        """See `SessionSave`."""
        previous = self.last_save()
        there = previous.dump.names if previous is not None and previous.dump is not None else ()
        return [name for name in names if name in there]

    def last_save(self) -> PreviousSession | None:
        """Return the last save of the live kernel; None for none."""
        saved = self.entry.saved
        if not self._live or saved is None or not saved.dump:
            return None
        try:
            dump = self.entry.dump()
        except HibernationError:
            return None
        return PreviousSession(saved, moment(saved.moment, self._now()), dump)

    def close(self) -> None:
        """Close the journal and release the entry."""
        self._journal.close()
        self.output.close()
        self.entry.close()

    def _logged(self) -> Saved:
        """Return the last manifest, with the present cells and notebook."""
        assert self.cells is not None
        history = self.cells.state()
        self._count = len(history["places"])
        before = self.entry.saved or self._base
        asked = {**self._base.asked, NOTEBOOK: self.notebook()}
        return replace(before, history=history, asked=asked)
