"""Families of sessions: a session and its branches, which share files and a sandbox."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import StopReason
from kernel_mcp.sessions.kernel_state import KernelState
from kernel_mcp.sessions.lifecycle import KernelLifecycle
from kernel_mcp.sessions.runner import CellQueue

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

MOST = 16
"""Maximum number of branches that a session has at a time."""
FOLDER = ".branches"
"""Folder in the workspace that holds a private folder for each branch."""
ENDED = "the server ended before this cell began"


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The start of a branch: its kernel, the checkpoint that was restored, and its own folder."""

    kernel: Kernel
    checkpoint: Checkpoint
    folder: str


@dataclass(frozen=True, slots=True)
class BranchOrigin:
    """Origin of a branch: the handle of the session or branch from which it was made.

    `folder` is the branch's own folder, relative to the workspace. `worked` are the cells of the
    family's root whose effects the branch had at its start.
    """

    handle: str
    folder: str
    worked: tuple[int, ...]


class FamilyMember(Protocol):
    """The part of a session that its family and `branches` use."""

    handle: str
    origin: BranchOrigin | None
    turn: anyio.Lock
    installing: anyio.Lock
    kernel_state: KernelState
    lifecycle: KernelLifecycle
    queue: CellQueue

    @property
    def state(self) -> str:
        """One of new, idle, busy, hibernated, closed."""

    def needed(self) -> AbstractContextManager[None]:
        """Prevent hibernation inside this block."""

    @property
    def kernel(self) -> Kernel | None:
        """The live kernel; None without one."""


S = TypeVar("S", bound=FamilyMember)


@dataclass(slots=True)
class Family(Generic[S]):
    """A session and its branches, which have one sandbox, working folder and memory limit.

    Quotas count them as one session. `last_used` is the time of the last use of any of them, in
    seconds. `root` is the session from which the branches were made, None once it has ended. It
    alone can outlive the server. `adopting` is True while a branch is being adopted.
    """

    last_used: float
    members: list[S] = field(default_factory=list)
    root: S | None = None
    ended: list[S] = field(default_factory=list)
    adopting: bool = False

    def leave(self, session: S) -> list[S]:
        """Remove a session that has ended, and return sessions whose files are no longer needed.

        The result is empty until the last member has ended. Then it is all former members.
        """
        self.members.remove(session)
        self.ended.append(session)
        if self.root is session:
            self.root = None
        return [] if self.members else self.ended

    async def settle(self) -> bool:
        """Stop all cells at the server's end, and wait until they have ended.

        Running cells are interrupted, waiting ones are withdrawn. Return False if nothing was in
        progress.
        """
        held = [each for each in self.members if each.state == "busy" or each.turn.locked()]
        for each in held:
            while each.queue.withdraw(ENDED):
                pass
            if (cell := each.queue.current) is not None:
                cell.stop(StopReason.END)
        for each in held:
            if (cell := each.queue.current) is not None:
                await cell.finished.wait()
            async with each.installing, each.turn:
                await anyio.lowlevel.checkpoint()
        return bool(held)

    async def wait_until_free(self) -> bool:
        """Wait for the server's own work that prevents hibernation, such as a checkpoint.

        Return True if there was any. Do not wait for cells, which may never end.
        """
        if any(each.state == "busy" for each in self.members):
            return False
        held = [each.turn for each in self.members if each.turn.locked()]
        for turn in held:
            async with turn:
                pass
        return bool(held)


def folder_of(handle: str) -> str:
    """Return the folder of the branch with this handle, relative to the workspace."""
    return f"{FOLDER}/{handle}"
