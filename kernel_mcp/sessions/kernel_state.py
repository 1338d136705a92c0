"""The state of a session: its kernel, or the save of a former one, and the cells in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_mcp.barriers import Barrier
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.checkpoints import Checkpoints
from kernel_mcp.sessions.hibernation import SavedState
from kernel_mcp.sessions.losses import FILES_KEPT, closed_words, lost_names
from kernel_mcp.sessions.notifications import Loss, Notice, NotificationQueue
from kernel_mcp.sessions.words import listing

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.launch.checkpoint import Checkpoint


class KernelState:
    """The kernel of one session, and the cells whose effects its variables have.

    kernel           None before its start, and without one
    used             True if the kernel has variables of cells
    pending_restore  the saved state that the next kernel loads; None without one
    worked           the cells whose effects the variables have, in order

    Every loss becomes a notice in `notifications`.
    """

    def __init__(
        self,
        session: str,
        notifications: NotificationQueue,
        checkpoints: Checkpoints,
        contents: str = PYTHON.state,
    ) -> None:
        """`contents` is what ends with a kernel, in words."""
        self.session = session
        self.contents = contents
        self.notifications = notifications
        self.checkpoints = checkpoints
        self.kernel: Kernel | None = None
        self.used = False
        self.pending_restore: SavedState | None = None
        self.worked: list[int] = []
        self.lost = ""
        """Reason why all variables were lost, until the next cell; empty if they were not."""
        self.branch_folder = ""
        """The own folder of a branch, relative to the workspace; empty for other sessions."""
        self.branch_checkpoint: Checkpoint | None = None
        """The checkpoint of another session from which a branch began."""
        self._hibernation_notice: Notice | None = None

    @property
    def holds(self) -> bool:
        """True if variables of cells exist, in a kernel or in a save."""
        return self.used or self.pending_restore is not None

    @property
    def as_of(self) -> int | None:
        """The last cell whose effects the variables have; None without variables."""
        return self.worked[-1] if self.holds and self.worked else None

    def holds_cell(self, number: int) -> bool:
        """Return True if the variables have the effects of a cell."""
        return self.holds and number in self.worked

    def note_cell_run(self, cell: int, seconds: float) -> None:
        """Note that the variables have the effects of `cell`, which ran for `seconds`."""
        self.worked.append(cell)
        self.checkpoints.worked(seconds)

    def note_removal(self, cell: Cell) -> None:
        """Add notices of variables that `cell` has removed without a `del` that names them."""
        count, names = cell.removed
        if not count:
            return
        loss = Loss.of(f"cell {cell.number} removed them", names, count - len(names))
        what = "1 variable" if count == 1 else f"{count:,} variables"
        text = f"Cell {cell.number} removed {what} without a `del` of them.{lost_names(loss)}"
        before = self.worked[-2] if len(self.worked) > 1 else 0
        checkpoint = self.checkpoints.at(before)
        if checkpoint is not None and (as_of := self.checkpoints.state_of(checkpoint)):
            text = f"{text} undo brings variables back as they were after cell {as_of}."
        cell.caused_loss = self.notifications.add(text, loss)
        cell.notice(text)

    def take_back(self, as_of: int) -> tuple[int, ...]:
        """Return the cells after `as_of`, whose effects the variables no longer have."""
        undone = tuple(cell for cell in self.worked if cell > as_of)
        del self.worked[len(self.worked) - len(undone) :]
        return undone

    def lost_state(self, cause: str) -> Loss:
        """Return the loss if all variables were lost now, because of `cause`."""
        if self.pending_restore is not None:
            pending = self._hibernation_notice in self.notifications.pending
            undelivered = self.pending_restore.gone if pending else ()
            return Loss.of(cause, dict.fromkeys((*undelivered, *self.pending_restore.names)))
        if self.kernel is None or not self.used:
            return Loss(cause)
        return Loss.of(cause, self.kernel.names, self.kernel.names.more)

    def lose(self, what: str, loss: Loss) -> Notice:
        """Add a notice that all variables are lost; `what` is a sentence with the reason."""
        self.lost = what
        text = f"{what}: all {self.contents} made before are lost; {FILES_KEPT}"
        return self.notifications.add(f"{text}.{lost_names(loss)}", loss)

    def report_hibernation(self, saved: SavedState) -> None:
        """Add a notice of a saved state, which is that of this session, with the loss if any."""
        loss: Loss | None
        if saved.failure:
            loss = self.lost_state(f"the session was hibernated, and {saved.failure}")
        elif saved.gone:
            loss = Loss.of(f"hibernation could not keep {listing(saved.gone)}", saved.gone)
        else:
            loss = Loss(saved.after) if saved.after else None
        self._hibernation_notice = self.notifications.add(saved.remark(), loss)

    def forget_hibernation(self) -> Notice | None:
        """Return the notice of the hibernation, which is over; None without one."""
        notice, self._hibernation_notice = self._hibernation_notice, None
        return notice

    async def drop(self) -> None:
        """End the kernel."""
        kernel = self._release()
        if self.pending_restore is None:
            self.worked.clear()
        if kernel is not None:
            with Barrier("ending a kernel", self.session):
                await kernel.aclose()

    def release_kernel(self) -> None:
        """Release the kernel without ending it, because another session takes it over."""
        self._release()
        self.worked.clear()

    def _release(self) -> Kernel | None:
        kernel, self.kernel, self.used = self.kernel, None, False
        if kernel is not None:
            self.checkpoints.drop_all(kernel)
        return kernel

    def start_as_branch(self, kernel: Kernel, checkpoint: Checkpoint, folder: str) -> None:
        """Use a kernel that was restored from another session's `checkpoint`.

        `folder` is the branch's own folder, relative to the workspace.
        """
        self.kernel, self.used = kernel, True
        self.checkpoints.share(checkpoint, 0)
        self.branch_checkpoint, self.branch_folder = checkpoint, folder
        if words := closed_words(kernel.closed_files):
            self.notifications.add(words.strip(), None)
