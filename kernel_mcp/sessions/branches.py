"""Branches: sessions that continue from one state of another, and adopting one of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from kernel_mcp.errors import BranchError, KernelMcpError, SessionNotFound
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.kernel_state import KernelState
    from kernel_mcp.sessions.lifecycle import KernelLifecycle

MOST = 16
"""Maximum number of branches that a session has at a time."""
FOLDER = ".branches"
"""Folder in the workspace that holds a private folder for each branch."""


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
    """The part of a session that this module uses."""

    handle: str
    origin: BranchOrigin | None
    turn: anyio.Lock
    kernel_state: KernelState
    lifecycle: KernelLifecycle

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


def folder_of(handle: str) -> str:
    """Return the folder of the branch with this handle, relative to the workspace."""
    return f"{FOLDER}/{handle}"


async def begin(
    session: FamilyMember, handles: Sequence[str]
) -> list[tuple[BranchStart, BranchOrigin]]:
    """Start kernels that continue from a session's current state, one for each handle.

    Raises BranchError, LaunchError or SessionNotFound, and ends the kernels that it had started.
    """
    idle(session, "branch")
    with session.needed():
        async with session.turn:
            if session.state == "closed":
                raise SessionNotFound("This session was closed meanwhile.")
            return await _begin(session, handles)


async def _begin(
    session: FamilyMember, handles: Sequence[str]
) -> list[tuple[BranchStart, BranchOrigin]]:
    """Do the work of `begin`; the caller holds the lock `turn`."""
    state = session.kernel_state
    kernel = await session.lifecycle.ensure()
    woken = _Woken()
    try:
        as_of = state.as_of or 0
        state.checkpoints.stir()
        made = await state.checkpoints.take(kernel, as_of, asked=True, hurry=True)
        assert made is not None
        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(woken.add, kernel, made, handle)
        if woken.failure is not None:
            raise woken.failure
    except BaseException as error:
        await woken.aclose()
        if not isinstance(error, KernelMcpError):
            raise
        raise BranchError(
            f"No branches could be made: {error}. The session goes on as it was; "
            "create_session opens a separate, empty one."
        ) from error
    origin = session.origin
    worked = tuple(state.worked) if origin is None else origin.worked
    starts = [woken.found[handle] for handle in handles]
    return [(start, BranchOrigin(session.handle, start.folder, worked)) for start in starts]


class _Woken:
    """Kernels of branches, which are started concurrently."""

    def __init__(self) -> None:
        self.found: dict[str, BranchStart] = {}
        self.failure: KernelMcpError | None = None

    async def add(self, kernel: Kernel, checkpoint: Checkpoint, handle: str) -> None:
        """Start the kernel of the branch with this handle; an error is stored in `failure`."""
        folder = folder_of(handle)
        try:
            self.found[handle] = BranchStart(
                await kernel.wake(checkpoint, folder), checkpoint, folder
            )
        except KernelMcpError as error:
            self.failure = error

    async def aclose(self) -> None:
        """End the kernels."""
        with anyio.CancelScope(shield=True):
            for start in self.found.values():
                await start.kernel.aclose()


async def adopt(branch: FamilyMember, root: FamilyMember, origin: BranchOrigin) -> list[int]:
    """Replace the kernel of `root` by that of a branch, and return the cells that are thus undone.

    Raises BranchError, LaunchError.
    """
    idle(branch, "adopt")
    idle(root, "adopt")
    with root.needed(), branch.needed():
        async with root.turn, branch.turn:
            if "closed" in (root.state, branch.state):
                raise BranchError("Nothing was adopted: one of the sessions was closed meanwhile.")
            return await _adopt(branch, root, origin)


async def _adopt(branch: FamilyMember, root: FamilyMember, origin: BranchOrigin) -> list[int]:
    """Do the work of `adopt`; the caller holds the lock `turn` of both sessions."""
    kernel = await branch.lifecycle.ensure() if branch.kernel_state.holds else None
    if kernel is None or not branch.kernel_state.used:
        raise BranchError(
            "This branch has no variables: it was reset, or they were lost. Run a cell in it "
            "first, or close it with close_session."
        )
    gone: list[int] = []
    with anyio.CancelScope(shield=True):
        branch.kernel_state.release_kernel()
        gone = await root.lifecycle.take_over_kernel(kernel, origin.worked)
    await root.lifecycle.checkpoint(root.kernel_state.checkpoints.ahead)
    return gone


def idle(session: FamilyMember, what: str) -> None:
    """Raise BranchError for a session in which a cell or an install is under way.

    `what` is the name of the tool, for the error text.
    """
    if session.state == "busy":
        raise BranchError(
            f"A cell or an install is under way in session {session.handle}: wait for its end, or "
            f"interrupt it, then call {what} again."
        )
