"""Branches: sessions that continue from one state of another, and adopting one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.errors import BranchError, InputError, KernelMcpError, SessionNotFound
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.output.outputs import Position
from kernel_mcp.sessions.factory import SessionFactory
from kernel_mcp.sessions.family import (
    MOST,
    BranchOrigin,
    BranchStart,
    Family,
    FamilyMember,
    folder_of,
)
from kernel_mcp.sessions.kernel_admission import KernelAdmission
from kernel_mcp.sessions.registry import SessionRegistry
from kernel_mcp.sessions.session import Session

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

LATE_CHARS = 2000
"""Maximum characters of a branch's last output, from its end, that an adoption reports."""


class Host(Protocol):
    """The part of a session manager that branches use."""

    def start(self, session: Session) -> Awaitable[None]:
        """Start the task of a session."""

    def close(self, session: Session, why: str) -> Awaitable[None]:
        """End a session; `why` is reported to its owner."""


class Branches:
    """Makes and adopts branches of one manager's sessions."""

    def __init__(
        self,
        host: Host,
        factory: SessionFactory,
        registry: SessionRegistry,
        admission: KernelAdmission,
    ) -> None:
        self._host = host
        self._factory = factory
        self._registry = registry
        self._admission = admission

    async def make(self, session: Session, count: int) -> list[tuple[Session, str]]:
        """Open `count` sessions that continue from the current state of `session`.

        Returns each with its own folder, relative to the workspace. Raises InputError, BranchError,
        SessionLimitReached.
        """
        if not 1 <= count <= MOST:
            raise InputError(f"n={count} is not usable: pass 1 to {MOST} branches.")
        self._admission.check_branches(count, session)
        handles = [self._registry.new_handle() for _ in range(count)]
        made = []
        try:
            starts = await begin(session, handles)
        except BaseException:
            for handle in handles:
                await _remove_folder(session, folder_of(handle))
            raise
        with anyio.CancelScope(shield=True):  # no kernel is left without a session
            for handle, (start, origin) in zip(handles, starts, strict=True):
                branch = self._factory.branch(session, handle, start, origin)
                await self._host.start(branch)
                made.append((branch, start.folder))
        session.events.note("branch", branches=handles)
        await _note_branches(session.family)
        return made

    async def adopt(self, branch: Session) -> tuple[Session, list[int]]:
        """Replace the kernel of the family's root by that of a branch, and close the other members.

        Returns the root and its cells that were undone. If the root has ended, the branch becomes
        the root. Raises BranchError.
        """
        family = branch.family
        root = family.root
        others = [each for each in family.members if each not in (branch, root)]
        if branch is root or (not others and root is None):
            raise BranchError(
                "This is no branch: pass the handle of one that branch has given, or go on here "
                "and close the branches with close_session."
            )
        if family.adopting:
            raise BranchError("Another branch is being adopted, and this one is closed with that.")
        family.adopting = True
        try:
            return await self._adopt(branch, root, others)
        finally:
            family.adopting = False

    async def _adopt(
        self, branch: Session, root: Session | None, others: list[Session]
    ) -> tuple[Session, list[int]]:
        gone: list[int] = []
        origin = branch.origin
        if root is None or origin is None:
            branch.family.root = root = branch
        else:
            gone = await adopt(branch, root, origin)
            root.cells.undone.update(gone)
            for cell in branch.cells.late:
                text = cell.log.news(cell.late_since or Position(), LATE_CHARS)
                branch.remark(f"since its end, cell {cell.number} has put out: {text}")
            root.notifications.take_over(branch.notifications, f"branch {branch.handle}")
            others.append(branch)
        branch.origin = None  # its folder stays
        with anyio.CancelScope(shield=True):
            for each in others:
                adopted = "it was adopted" if each is branch else "another branch was adopted"
                await self._host.close(each, f"was closed, as {adopted}")
        root.events.note("adopt", branch=branch.handle)
        await root.persistence.mark_undone()
        await root.persistence.note_adoption()
        root.persistence.touch()
        return root, gone

    async def leave(self, session: Session) -> None:
        """Remove a session that has ended from its family, with its own folder if it is a branch.

        The end of the last member releases the files of all.
        """
        if session.origin is not None:
            await _remove_folder(session, session.origin.folder)
        left = session.family.leave(session)
        await _note_branches(session.family)
        for each in left:
            await self._factory.release(each)


async def _note_branches(family: Family[Session]) -> None:
    """Note in the store whether a family has branches, which a later server does not have."""
    for each in (*family.members, *family.ended):
        there = len(family.members) > 1
        if (entry := each.persistence.entry) is not None and entry.branched != there:
            with Barrier("noting branches", each.handle):
                await run_in_thread(partial(entry.set_branched, there))


async def _remove_folder(session: Session, folder: str) -> None:
    """Remove a branch's own folder."""
    with Barrier("removing a branch's folder", session.handle):
        await run_in_thread(partial(session.workspace.remove_folder, folder))


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
