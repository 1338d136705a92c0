"""Open sessions: choose their folders, look up their persisted state; release both at their end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.grants import granted
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.files.quota import DiskQuota, DiskShare
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.sessions.audit import moment_of
from kernel_mcp.sessions.directory import HANDLE, Caller, SessionDirectory
from kernel_mcp.sessions.family import BranchOrigin, BranchStart
from kernel_mcp.sessions.history import ClosedRecords
from kernel_mcp.sessions.manifest import Saved
from kernel_mcp.sessions.notifications import Loss
from kernel_mcp.sessions.persistence import (
    HELD_HERE,
    NOT_KEPT,
    NOTHING_FOUND,
    UNUSED,
    LookupResult,
    Persistence,
    SessionRequest,
)
from kernel_mcp.sessions.principals import Principals
from kernel_mcp.sessions.session import Session, SessionContext
from kernel_mcp.sessions.session_save import PersistedSave, SessionSave
from kernel_mcp.sessions.storage import SCRIPT, SessionFolders
from kernel_mcp.sessions.store_entry import SaveFolder


class SessionFactory:
    """Makes the sessions of one manager, which are in `directory`."""

    def __init__(
        self,
        context: SessionContext,
        folders: SessionFolders,
        persistence: Persistence | None,
        directory: SessionDirectory,
        principals: Principals,
        records: ClosedRecords,
    ) -> None:
        """Without `persistence` no session outlives the server.

        `principals` have a quota of the disk. `records` are those of closed sessions.
        """
        self._context = context
        self._settings = context.settings
        self._folders = folders
        self._persistence = persistence
        self._directory = directory
        self._principals = principals
        self._records = records
        self._shares: WeakValueDictionary[str, DiskShare] = WeakValueDictionary()

    async def create(
        self, caller: Caller, wanted: SessionRequest, request: KernelRequest, timeout_s: float
    ) -> Session:
        """Make the requested session with its workspace and persisted state. It is in `directory`.

        Raises InputError if another session or server uses its workspace.
        """
        handle = request.session
        with ExitStack() as undo:
            found = NOTHING_FOUND
            if request.interpreter.saves:
                found = await self._look_up(caller, wanted, handle, undo)
            name, folder = self._folders.place(
                handle, wanted.name, undo, default=wanted.default, principal=caller.principal
            )
            request = replace(request, workspace=folder, layer=self._folders.layers / handle)
            if self._persistence is not None and found.previous is not None:
                try:
                    continued = partial(self._persistence.request, request, found.previous.saved)
                    request = await anyio.to_thread.run_sync(continued)
                    handle = self._former_handle(found.previous.saved) or handle
                    request = replace(request, session=handle)
                    timeout_s = timeout_s or self._persistence.timeout_s(found.previous.saved)
                except KernelMcpError as error:
                    if found.entry is not None:
                        found.entry.close()
                    note = f"{UNUSED}: {error}"
                    loss = Loss.of(note, found.previous.saved.names)
                    found = LookupResult(note=note, held_back=True, loss=loss)
            if (entry := found.entry) is not None:
                persisted = folder if self._folders.keep else entry.workspace
                request = replace(request, workspace=persisted, layer=entry.layer)
            session = await self._open(caller, name, request, timeout_s, found)
            session.locks = undo.pop_all()
        return session

    def _former_handle(self, saved: Saved) -> str:
        """Return the handle that a persisted session had; empty if another session has it.

        Empty also in a fleet, whose sessions are stored under the handle that they keep.
        """
        former = str(saved.asked.get("handle", ""))
        taken = any(each.handle == former for each in self._directory.sessions)
        fit = HANDLE.fullmatch(former) and not HANDLE.fullmatch(saved.name)
        return former if fit and not taken else ""

    async def _look_up(
        self, caller: Caller, wanted: SessionRequest, handle: str, undo: ExitStack
    ) -> LookupResult:
        """Lock and return the persisted state of a session; `undo` unlocks it.

        The `note` of the result reports a failure.
        """
        persistence = self._persistence
        key = None
        if persistence is not None and wanted.name != SCRIPT:
            key = persistence.key(
                caller.principal, wanted.name, default=wanted.default, handle=handle
            )
        if persistence is None or key is None:
            return LookupResult(note=NOT_KEPT) if wanted.resume else NOTHING_FOUND
        for family in (each.family for each in self._directory.sessions):
            entries = [each.persistence.entry for each in family.ended]
            if any(entry is not None and entry.key == key for entry in entries):
                return LookupResult(note=HELD_HERE)
        found = NOTHING_FOUND
        with Barrier("looking for what was kept of a session") as barrier:
            work = partial(persistence.look_up, key, fresh=wanted.fresh, resume=wanted.resume)
            found = await anyio.to_thread.run_sync(work)
        if barrier.failure is not None:
            return LookupResult(note=f"This session is not kept: {reason_of(barrier.failure)}")
        if found.entry is not None:
            undo.callback(found.entry.close)
        return found

    async def _open(
        self,
        caller: Caller,
        name: str,
        request: KernelRequest,
        timeout_s: float,
        found: LookupResult,
    ) -> Session:
        handle, folder, entry = request.session, request.workspace, found.entry
        workspace = self._folders.workspace(folder)
        workspace.quota.share = self._share_of(caller.principal)
        records = self._folders.records / handle if entry is None else entry.records
        assert request.layer is not None
        self._folders.make(folder, request.layer, records)
        persisted = None
        if entry is not None and self._persistence is not None:
            with Barrier("keeping a session", handle) as barrier:
                persisted = PersistedSave(
                    entry,
                    self._persistence,
                    request,
                    timeout_s,
                    masks=self._context.masks,
                )
            if barrier.failure is not None:
                found = LookupResult(note=f"This session is not kept: {reason_of(barrier.failure)}")
        session = Session(
            self._context,
            request,
            owner=caller.principal,
            name=name,
            workspace=workspace,
            cells_dir=records,
            session_save=persisted or self._temporary_save(handle),
            timeout_s=timeout_s or self._settings.timeout_s,
        )
        session.held_back = found.held_back
        await session.persistence.restore(found)
        self._directory.add(session)
        _note_start(session, self._settings)
        if found.previous is not None:
            saved = moment_of(found.previous.saved.moment)
            session.events.note("resume", saved=saved, cells=len(session.cells))
        return session

    def branch(
        self, parent: Session, handle: str, start: BranchStart, origin: BranchOrigin
    ) -> Session:
        """Make a branch of `parent`, whose kernel has started. It is in `directory`."""
        request = replace(parent.request, session=handle)
        records = self._folders.records / handle
        make_private(records)
        session = Session(
            self._context,
            request,
            owner=parent.owner,
            name="",
            workspace=parent.workspace,
            cells_dir=records,
            session_save=self._temporary_save(handle),
            timeout_s=parent.timeout_s,
        )
        session.installing = parent.installing
        session.join(parent.family, start, origin)
        self._directory.add(session)
        _note_start(session, self._settings)
        return session

    def _temporary_save(self, handle: str) -> SessionSave:
        """Return the save of a session that is not persisted."""
        folder = SaveFolder(self._folders.save_of(handle), self._settings.saved_bytes)
        return SessionSave(folder, masks=self._context.masks)

    def _share_of(self, principal: str) -> DiskShare:
        """Return the disk quota that the workspaces of a principal share."""

        def quotas() -> set[DiskQuota]:
            return {each.workspace.quota for each in self._directory.owned_by(principal)}

        found = self._shares.get(principal)
        if found is None:
            found = DiskShare(lambda: self._disk_of(principal), quotas)
            self._shares[principal] = found
        return found

    def _disk_of(self, principal: str) -> int:
        """Return the limit of a principal's workspaces on this server, in bytes; 0 for none."""
        most = self._principals.quotas(principal).disk
        return max(1, most - self._principals.others.use(principal).disk) if most else 0

    async def release(self, session: Session) -> None:
        """Release the files and locks of a session that has ended: remove what does not outlive it.

        With `keep_record` its cells stay readable for `history.KEPT_S` seconds.
        """
        if session.persistence.entry is not None:
            await session.persistence.release(remove=session.forgotten or session.blank)
        else:
            with Barrier("keeping a session's record", session.handle) as barrier:
                if session.keep_record:
                    await self._records.keep(session.owner, session.handle, session.cells)
            recorded = session.keep_record and barrier.failure is None
            await self._folders.remove(
                session.handle, script=session.name == SCRIPT, recorded=recorded
            )
        session.locks.close()


def _note_start(session: Session, settings: Settings) -> None:
    request = session.request
    interpreter, kind = request.interpreter, {}
    if interpreter.external:
        kind = {"attach": interpreter.place}
    elif interpreter.name:
        kind = {"interpreter": interpreter.name}
    session.events.note(
        "session_start",
        name=session.name,
        packages=[str(each) for each in request.packages],
        python=request.python,
        doors=granted(settings, request.network, request.tools),
        **kind,
    )
