"""All sessions of a server: their owners, their number and the folders of their files."""

from __future__ import annotations

import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier, reason_of, run_in_thread
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.errors import BranchError, InputError, KernelMcpError, SessionGone, SessionNotFound
from kernel_mcp.files.workspace import DiskShare, Workspace
from kernel_mcp.identity import LOCAL, Principal
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.output.text import Masks
from kernel_mcp.records import dataclass
from kernel_mcp.sessions import branches
from kernel_mcp.sessions.audit import Audit
from kernel_mcp.sessions.capacity import Capacity
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.checkpoints import IdleCheckpoints
from kernel_mcp.sessions.history import ClosedRecords, History
from kernel_mcp.sessions.losses import lost_names
from kernel_mcp.sessions.notifications import Loss, ResponseContext
from kernel_mcp.sessions.persistence import (
    DEFAULT_NAME,
    HELD_HERE,
    NOT_KEPT,
    NOTHING_FOUND,
    UNUSED,
    LookupResult,
    Persistence,
    SessionRequest,
)
from kernel_mcp.sessions.principals import Others, Overseer, Principals, Use
from kernel_mcp.sessions.quota import SessionQuota
from kernel_mcp.sessions.registry import LocalRegistry, SessionRegistry
from kernel_mcp.sessions.saver import Saver
from kernel_mcp.sessions.session import Clock, Preparation, Session
from kernel_mcp.sessions.session_save import PersistedSave, SessionSave
from kernel_mcp.sessions.start_queue import CellStartQueue
from kernel_mcp.sessions.storage import SCRIPT, SessionFolders
from kernel_mcp.sessions.store import SaveFolder
from kernel_mcp.sessions.tombstones import Tombstone, Tombstones

if TYPE_CHECKING:
    from packaging.requirements import Requirement

AT_WORK = 1
"""Maximum number of concurrent calls of one principal that the server computes itself, if there are
several principals."""
JUST_NOW_S = 0.5
"""Upper bound on the delay of file-system events, in seconds, on a busy machine too."""
CLOSE_TIMEOUT_S = 2.0
NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")
"""Valid names of sessions; `--workspace` may have a folder of that name."""
HANDLE = re.compile(r"s-[A-Za-z0-9_-]{12}(\.[a-z0-9-]{1,32})?")
"""Valid handles of sessions; those of a fleet end with the name of a node."""
PREAMBLE = '[session {0}: pass session="{0}" to keep using these variables]'
SHARED = (
    "default session, last used by another client {}; create_session for your own. Variables and "
    "files of this one are those of all clients of your principal"
)
_REPLACED = "was closed, as you asked for what was kept under its name"
MOST_CLIENTS = 50
"""Clients of a default session that are distinguished; the least recent are forgotten."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a call: the owner of its sessions, and the key of its default session.

    `default` is empty if there is no default session, as over HTTP without a session id. `known` is
    False for a caller that cannot be distinguished from others; its answers name the handle to pass
    on. `client` identifies a client among those of its principal, empty if unknown. `request` is
    the id of the HTTP request. `response` is the context of the answer to the call.
    """

    principal: str = LOCAL
    default: str = "default"
    who: Principal = field(default_factory=Principal, compare=False)
    known: bool = field(default=True, compare=False)
    client: str = field(default="", compare=False)
    response: ResponseContext = field(default_factory=ResponseContext, compare=False)
    request: str = field(default="", compare=False)


def ago(seconds: float) -> str:
    """Return a duration in words, such as `5 min ago`."""
    if seconds < 60:
        return "less than a minute ago"
    unit, count = ("min", seconds / 60) if seconds < 3600 else ("h", seconds / 3600)
    return f"{count:.0f} {unit} ago"


PROCESSORS = os.cpu_count() or 1


class SessionManager:
    """Creates, finds and closes sessions, while `running`."""

    def __init__(
        self,
        *,
        settings: Settings,
        source: KernelSource,
        folders: SessionFolders,
        workspace: Callable[[Path], Workspace],
        clock: Clock,
        audit: Audit | None = None,
        capacity: Capacity | None = None,
        checks: Checks | None = None,
        start_queue: CellStartQueue | None = None,
        preparation: Preparation | None = None,
        persistence: Persistence | None = None,
        everyone: Callable[[], Sequence[Session]] | None = None,
        registry: SessionRegistry | None = None,
        others: Others | None = None,
    ) -> None:
        """Without a `capacity` only the settings limit the number of sessions.

        Without `persistence` no session outlives the server. `everyone` returns the sessions of all
        managers of the server. `registry` creates handles. `others` are the servers that share the
        quotas of principals with this one.
        """
        self._registry = registry or LocalRegistry()
        self._settings = settings
        self._masks = Masks(settings.masked_values)
        self._source = source
        self._folders = folders
        self._workspace = workspace
        self._clock = clock
        self.checks = checks or Checks()
        self._start_queue = start_queue or CellStartQueue()
        self._preparation = preparation
        self._idle_checkpoints: WeakValueDictionary[str, IdleCheckpoints] = WeakValueDictionary()
        """Idle sessions that have checkpoints, by principal."""
        self._persistence = persistence
        self._audit = audit or Audit()
        self._saver = Saver(clock, lambda: persistence.store.make_room() if persistence else None)
        self._sessions: dict[str, Session] = {}
        self.ended_ran = -math.inf
        """Time at which code last ran in a session that has been closed since."""
        self._defaults: dict[tuple[str, str], str] = {}
        self._held: dict[str, ExitStack] = {}
        """Locks on workspaces and persisted entries, by the handle of the session that has them."""
        self._tombstones = Tombstones()
        self._records = ClosedRecords(folders.records, clock, self._spawn)
        self._dismissed: set[str] = set()
        """Principals whose sessions now belong to another manager."""
        self._shares: WeakValueDictionary[str, DiskShare] = WeakValueDictionary()
        self._default_locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._call_limiters: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()
        self.principals = Principals(settings, others)
        self._clients: dict[str, OrderedDict[str, float]] = {}
        """Time of the last use of a default session, by handle and client."""
        self.quota = SessionQuota(
            settings,
            sessions=lambda: self.sessions,
            everyone=everyone or (lambda: self.sessions),
            drop=self._drop,
            spawn=self._spawn,
            clock=clock,
            capacity=capacity or Capacity(),
            principals=self.principals,
        )
        self._opening = 0
        """Number of calls that are opening a session."""
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run sessions inside this block; leaving it closes all of them."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if self._persistence is not None:
                tasks.start_soon(self._collect, self._persistence)
                tasks.start_soon(self._saver.run)
            if self.principals.several or self._settings.quotas != Quotas():
                tasks.start_soon(Overseer(self.principals, lambda: self.sessions).run)
            try:
                yield
            finally:
                for session in self.sessions:
                    if session.persisted is not None:
                        with Barrier("saying that a session ends", session.handle):
                            session.persisted.entry.mark_closing()
                for session in self.sessions:
                    if session.state == "busy":
                        session.touch()
                await self._saver.finish()
                for session in self.sessions:
                    with Barrier("closing a session", session.handle):
                        session.close()
                longest_s = CLOSE_TIMEOUT_S * self._settings.patience
                with anyio.CancelScope(shield=True), anyio.move_on_after(longest_s):
                    for session in self.sessions:
                        await session.ended.wait()
                tasks.cancel_scope.cancel()

    async def _collect(self, persistence: Persistence) -> None:
        with Barrier("removing what is left of closed sessions"):
            await anyio.to_thread.run_sync(persistence.store.collect)

    @property
    def sessions(self) -> list[Session]:
        """Every open session, oldest first."""
        return list(self._sessions.values())

    def _busy(self) -> float:
        """Return the number of sessions, per processor, that run cells, start or are opened."""
        there = sum(each.state == "busy" or each.starting for each in self._sessions.values())
        return (self._opening + there) / PROCESSORS

    @property
    def at_work(self) -> list[Session]:
        """Sessions in which code runs, or ran less than `JUST_NOW_S` seconds ago."""
        last = self._clock() - JUST_NOW_S
        return [each for each in self.sessions if each.state == "busy" or each.last_ran > last]

    def remark(self, text: str) -> None:
        """Add a text to the next answer of every session."""
        for session in self.sessions:
            session.notifications.add(text)

    def _share_of(self, principal: str) -> DiskShare:
        """Return the disk quota that the workspaces of a principal share."""

        def workspaces() -> list[Workspace]:
            own = (each for each in self.sessions if each.owner == principal)
            return list({id(each.workspace): each.workspace for each in own}.values())

        found = self._shares.get(principal)
        if found is None:
            found = DiskShare(lambda: self._disk_of(principal), workspaces)
            self._shares[principal] = found
        return found

    def _disk_of(self, principal: str) -> int:
        """Return the limit of a principal's workspaces on this server, in bytes; 0 for none."""
        most = self.principals.quotas(principal).disk
        return max(1, most - self.principals.others.use(principal).disk) if most else 0

    def uses(self) -> dict[str, Use]:
        """Return the use, on this server, of principals whose quotas span all servers."""
        owners = {each.owner for each in self._sessions.values()} | self.quota.awaited
        shared = self.principals.shared
        return {each: self.quota.use(each) for each in owners if shared(each) != Quotas()}

    def call_limiter(self, caller: Caller) -> anyio.CapacityLimiter:
        """Return the limiter of the caller's principal for calls that the server computes itself.

        With several principals at most `AT_WORK` calls of each run at a time.
        """
        most = AT_WORK if self.principals.several else sys.maxsize
        return self._call_limiters.setdefault(caller.principal, anyio.CapacityLimiter(most))

    def most_sessions(self, principal: str) -> int:
        """Return the maximum number of sessions with a kernel that a principal may have at once."""
        return min(
            self.principals.quotas(principal).sessions or sys.maxsize, self._settings.max_sessions
        )

    def check_cells(self, caller: Caller) -> None:
        """Raise SessionLimitReached if the caller may run no further cell now."""
        self.principals.seen(caller.who)
        own = (each for each in self._sessions.values() if each.owner == caller.principal)
        self.principals.check_cells(caller.principal, own)

    def owned_by(self, caller: Caller) -> list[Session]:
        """Return the caller's own sessions, oldest first."""
        return [s for s in self._sessions.values() if s.owner == caller.principal]

    async def create(
        self,
        caller: Caller,
        *,
        name: str = "",
        packages: tuple[Requirement, ...] = (),
        python: str = "",
        limits: Limits | None = None,
        timeout_s: float = 0.0,
        network: tuple[str, ...] | None = None,
        default: bool = False,
        fresh: bool = False,
        resume: bool = False,
        attach: str = "",
        handle: str = "",
    ) -> Session:
        """Open a session; the longest idle one may be hibernated to make room.

        `handle` is passed for a session that had it before. Empty or None `limits`, `timeout_s` and
        `network` stand for those of the settings. Persisted state is restored unless `fresh`. With
        `resume` it is restored even if more is granted now, and the session that began in its place
        is closed. With `attach` the session uses an external kernel, is not persisted, and is never
        the default one.

        Raises SessionLimitReached, and InputError for a `name` that is in use or malformed.
        """
        wanted = SessionRequest(name, default=default, fresh=fresh, resume=resume)
        self.principals.seen(caller.who)
        if attach and self._is_default(caller, name):
            raise InputError(
                f"{name!r} is your default session, whose kernel is its own: choose another name, "
                "or none, for one that joins a kernel."
            )
        limits = self.principals.limits(caller.principal, limits, self._settings.limits)
        async with (
            self._being_opened(),
            self._replacing(caller, wanted) as wanted,
            self.quota.reserve(caller.principal),
        ):
            self._check_name(caller, wanted.name)  # again: the reservation may have waited
            if attach:
                handle = self._registry.new_handle()
            async with self._entered(caller, wanted, handle) as handle:
                request = KernelRequest(
                    handle,
                    Path(),
                    python,
                    packages,
                    layer=self._folders.layers / handle,
                    limits=limits,
                    network=network,
                    attach=attach,
                )
                return await self._create(caller, wanted, request, timeout_s)

    @asynccontextmanager
    async def _entered(
        self, caller: Caller, wanted: SessionRequest, handle: str
    ) -> AsyncIterator[str]:
        """Yield the handle for a session that this block opens; unregister it on failure."""
        if handle:
            yield handle
            return
        default = caller.default if wanted.default else ""
        handle = await self._registry.register(caller.principal, wanted, default)
        try:
            yield handle
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._registry.unregister(handle)
            raise

    async def _create(
        self, caller: Caller, wanted: SessionRequest, request: KernelRequest, timeout_s: float
    ) -> Session:
        """Open the requested session with its workspace and persisted state."""
        handle = request.session
        with ExitStack() as undo:
            found = NOTHING_FOUND
            if not request.attach:
                found = await self._look_up(caller, wanted, handle, undo)
            name, folder = self._folders.place(
                handle, wanted.name, undo, default=wanted.default, principal=caller.principal
            )
            request = replace(request, workspace=folder)
            if self._persistence is not None and found.previous is not None:
                try:
                    continued = partial(self._persistence.request, request, found.previous.saved)
                    request = await anyio.to_thread.run_sync(continued)
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
            self._held[handle] = undo.pop_all()
        self._register(caller, session, default=wanted.default)
        if caller.principal in self._dismissed:
            session.close()
            raise SessionNotFound(
                "The session was not opened: your access was changed meanwhile. Call again."
            )
        return session

    @asynccontextmanager
    async def _being_opened(self) -> AsyncIterator[None]:
        """Count a session that is opened inside this block."""
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    @asynccontextmanager
    async def _replacing(
        self, caller: Caller, wanted: SessionRequest
    ) -> AsyncIterator[SessionRequest]:
        """Close the session that began in place of the requested one, and yield the request.

        The name of the default session stands for the default session. Raises InputError if the
        session exists and its persisted state was not held back.
        """
        wanted.check()
        if wanted.default or not self._is_default(caller, wanted.name):
            self._check_name(caller, wanted.name, but_held_back=wanted.decides)
            if (there := self._named(caller, wanted.name)) is not None:
                await self.close(there, _REPLACED)
            yield wanted
            return
        async with self._lock_of(caller.principal):
            there = self._sessions.get(self._defaults.get((caller.principal, caller.default), ""))
            if there is not None:
                if not (wanted.decides and there.held_back):
                    raise InputError(
                        f"{wanted.name!r} is your default session, which is there: leave `session` "
                        "empty. reset empties it, close_session ends it."
                    )
                await self.close(there, _REPLACED)
            yield replace(wanted, name="", default=True)

    def _register(self, caller: Caller, session: Session, *, default: bool) -> None:
        """Register a session as the default one or by its name.

        If it replaces one whose end was not reported, a notice reports that end.
        """
        owner, name, ended = caller.principal, session.name, None
        if default:
            which, new = "default session", "default session"
            ended = self._tombstones.pop(owner, self._defaults.get((owner, caller.default), ""))
            if caller.default:
                self._defaults[owner, caller.default] = session.handle
        elif name:
            which, new = f"session {name!r}", "one"
            ended = self._tombstones.find(owner, name) if name != SCRIPT else None
            self._tombstones.reassign_name(owner, name)
        if ended is not None:
            text = f"The {which} {self._end_in_words(ended)} This is a new {new}"
            session.notifications.add(text, ended.loss)

    def _is_default(self, caller: Caller, name: str) -> bool:
        """Return True if this is the name of the caller's default session.

        If that is not persisted, a session that was created with this name comes first.
        """
        if name != DEFAULT_NAME or not caller.default:
            return False
        store = self._persistence
        if store is not None and store.key(caller.principal, "", default=True) is not None:
            return True
        named = self._named(caller, name) is not None
        return not (named or (store is not None and store.has(caller.principal, name)))

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
        found = NOTHING_FOUND
        for family in (each.family for each in self._sessions.values()):
            if any(each.persisted and each.persisted.entry.key == key for each in family.ended):
                return LookupResult(note=HELD_HERE)
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
        workspace = self._workspace(folder)
        workspace.share = self._share_of(caller.principal)
        limits = request.limits or self._settings.limits
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
                    hibernated_bytes=self._settings.hibernate_bytes,
                    masks=self._masks,
                )
            if barrier.failure is not None:
                found = LookupResult(note=f"This session is not kept: {reason_of(barrier.failure)}")
        session = Session(
            request=request,
            owner=caller.principal,
            name=name,
            workspace=workspace,
            cells_dir=records,
            session_save=persisted or self._temporary_save(handle),
            source=self._source,
            admit=self.quota.admit,
            grace_s=self._settings.grace_s,
            cpu_s=limits.cpu_seconds,
            timeout_s=timeout_s or self._settings.timeout_s,
            clock=self._clock,
            journal=self._audit.journal(caller.principal, handle),
            checks=self.checks,
            start_queue=self._start_queue,
            preparation=self._preparation,
            saver=self._saver,
            checkpoints=self._settings.checkpoints,
            idle_checkpoints=self._idle_checkpoints.setdefault(
                caller.principal, IdleCheckpoints(busy=self._busy)
            ),
            masks=self._masks,
        )
        session.held_back = found.held_back
        if persisted is not None:
            await self._continue(session, persisted, found)
        elif found.note:
            session.notifications.add(found.note, found.loss)
        self._sessions[handle] = session
        session.journal.opened(
            name=name,
            packages=map(str, request.packages),
            python=request.python,
            attach=request.attach,
        )
        if found.previous is not None:
            session.journal.resumed(found.previous.saved.moment, len(session.cells))
        assert self._tasks is not None
        await self._tasks.start(self._serve, session)
        return session

    def _temporary_save(self, handle: str) -> SessionSave:
        """Return the save of a session that is not persisted."""
        most = self._settings.hibernate_bytes
        folder = SaveFolder(self._folders.save_of(handle), most)
        return SessionSave(folder, hibernated_bytes=most, masks=self._masks)

    async def branch(self, session: Session, count: int) -> list[tuple[Session, str]]:
        """Open `count` sessions that continue from the current state of `session`.

        Returns each with its own folder, relative to the workspace. Raises InputError, BranchError,
        SessionLimitReached.
        """
        if not 1 <= count <= branches.MOST:
            raise InputError(f"n={count} is not usable: pass 1 to {branches.MOST} branches.")
        self.quota.check_branches(count, session)
        handles = [self._registry.new_handle() for _ in range(count)]
        made = []
        try:
            starts = await branches.begin(session, handles)
        except BaseException:
            for handle in handles:
                await self._remove_folder(session, branches.folder_of(handle))
            raise
        with anyio.CancelScope(shield=True):  # no kernel is left without a session
            for handle, (start, origin) in zip(handles, starts, strict=True):
                made.append((await self._open_branch(session, handle, start, origin), start.folder))
        session.journal.branched(handles)
        await self._tell_of_branches(session.family)
        return made

    async def _tell_of_branches(self, family: branches.Family[Session]) -> None:
        """Note in the store whether a family has branches, which a later server does not have."""
        for each in (*family.members, *family.ended):
            there = len(family.members) > 1
            if each.persisted is not None and each.persisted.entry.branched != there:
                with Barrier("noting branches", each.handle):
                    await run_in_thread(partial(each.persisted.entry.set_branched, there))

    async def _remove_folder(self, session: Session, folder: str) -> None:
        """Remove a branch's own folder."""
        with Barrier("removing a branch's folder", session.handle):
            await run_in_thread(partial(session.workspace.remove_folder, folder))

    async def _open_branch(
        self,
        parent: Session,
        handle: str,
        start: branches.BranchStart,
        origin: branches.BranchOrigin,
    ) -> Session:
        request = replace(parent.request, session=handle)
        limits = request.limits or self._settings.limits
        records = self._folders.records / handle
        make_private(records)
        session = Session(
            request=request,
            owner=parent.owner,
            name="",
            workspace=parent.workspace,
            cells_dir=records,
            session_save=self._temporary_save(handle),
            source=self._source,
            admit=self.quota.admit,
            grace_s=self._settings.grace_s,
            cpu_s=limits.cpu_seconds,
            timeout_s=parent.timeout_s,
            clock=self._clock,
            journal=self._audit.journal(parent.owner, handle),
            checks=self.checks,
            start_queue=self._start_queue,
            preparation=self._preparation,
            checkpoints=self._settings.checkpoints,
            idle_checkpoints=self._idle_checkpoints.setdefault(
                parent.owner, IdleCheckpoints(busy=self._busy)
            ),
            masks=self._masks,
        )
        session.installing = parent.installing
        session.join(parent.family, start, origin)
        self._sessions[handle] = session
        session.journal.opened(name="", packages=map(str, request.packages), python=request.python)
        assert self._tasks is not None
        await self._tasks.start(self._serve, session)
        return session

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
            gone = await branches.adopt(branch, root, origin)
            root.cells.undone.update(gone)
            root.notifications.take_over(branch.notifications, f"branch {branch.handle}")
            others.append(branch)
        branch.origin = None  # its folder stays
        with anyio.CancelScope(shield=True):
            for each in others:
                adopted = "it was adopted" if each is branch else "another branch was adopted"
                await self.close(each, f"was closed, as {adopted}")
        root.journal.adopted(branch.handle)
        await root.mark_save_undone()
        await root.note_adoption()
        root.touch()
        return root, gone

    async def _continue(
        self, session: Session, persisted: PersistedSave, found: LookupResult
    ) -> None:
        """Restore the cells of a persisted session; its next kernel loads the variables."""
        previous, note = found.previous, found.note
        if previous is not None:
            with Barrier("bringing back a kept session", session.handle) as barrier:
                await anyio.to_thread.run_sync(session.remember, previous)
            if barrier.failure is not None:
                unread = (
                    f"The cells of {previous.when} cannot be read: {reason_of(barrier.failure)}"
                )
                note = ". ".join(filter(None, (note, unread)))
            session.continue_from(previous)
            if previous.cells:
                with Barrier("keeping the cells of a session", session.handle):
                    await persisted.save_cells()
        else:
            persisted.clear_journal()
        if note:
            session.notifications.add(note, found.loss)

    def _check_name(self, caller: Caller, name: str, *, but_held_back: bool = False) -> None:
        """Raise InputError for a name that is malformed, or used by a session of this caller.

        With `but_held_back` a used name is allowed if that session's persisted state was held back.
        """
        if name in ("", SCRIPT):
            return
        if not NAME.fullmatch(name) or HANDLE.fullmatch(name):
            raise InputError(
                f"{name[:80]!r} cannot be the name of a session: it takes 1 to 64 letters, digits, "
                "dots, hyphens and underscores, and may not look like a handle."
            )
        there = self._named(caller, name)
        if there is not None and not (but_held_back and there.held_back):
            raise InputError(
                f"You have a session named {name!r} already. Use it by session={name!r}, end it "
                f"with close_session(session={name!r}), or choose another name."
            )

    def _named(self, caller: Caller, name: str) -> Session | None:
        if not NAME.fullmatch(name):
            return None
        found = (each for each in self.owned_by(caller) if each.name == name)
        return next((each for each in found if not each.closing.is_set()), None)

    def _own(self, caller: Caller, session: str) -> Session | None:
        """Return the caller's session with this handle or name; None without one."""
        found = self._sessions.get(session)
        own = found is not None and found.owner == caller.principal
        return found if own else self._named(caller, session)

    async def resolve(self, caller: Caller, session: str) -> Session:
        """Return the caller's session with this handle or name; `""` is the default one.

        The default session, and a persisted one of this name, are opened if missing. Raises
        SessionGone for an ended session whose end was not reported yet. Raises SessionNotFound,
        with the same text for unknown, foreign and expired sessions.
        """
        if session and not self._is_default(caller, session):
            if (found := self._own(caller, session)) is not None:
                return found
            if (
                self._persistence
                and NAME.fullmatch(session)
                and self._persistence.has(caller.principal, session)
            ):
                return await self.create(caller, name=session)
            if (ended := self._tombstones.find(caller.principal, session)) is not None:
                raise SessionGone(
                    f"Session {session!r} {self._end_in_words(ended)} Open another with "
                    "create_session, or leave `session` empty for the default session.",
                    handle=ended.handle,
                    lost=ended.loss.names,
                    more=ended.loss.more,
                )
            raise SessionNotFound(
                f"There is no session {session[:64]!r}: it was never yours, was closed, or has "
                "expired. Open one with create_session, or leave `session` empty for the "
                "default session; variables of an expired session are gone."
            )
        key = (caller.principal, caller.default)
        default = self._sessions.get(self._defaults.get(key, ""))
        if default is None or caller.principal in self._default_locks:  # one is being opened
            async with self._lock_of(caller.principal):
                default = self._sessions.get(self._defaults.get(key, ""))
                if default is None:
                    default = await self.create(caller, default=True)
                    if not caller.known:
                        caller.response.preamble = PREAMBLE.format(default.handle)
        self._note_client(caller, default)
        return default

    def _lock_of(self, principal: str) -> anyio.Lock:
        """Return the lock that is held while a default session of a principal is opened."""
        return self._default_locks.setdefault(principal, anyio.Lock())

    def _note_client(self, caller: Caller, session: Session) -> None:
        """Add a remark to a client's first answer if another client has used the session."""
        if not caller.client:
            return
        now, known = self._clock(), self._clients.setdefault(session.handle, OrderedDict())
        if caller.client not in known and known:
            last = now - next(reversed(known.values()))
            caller.response.remarks.append(SHARED.format(ago(last)))
        known[caller.client] = now
        known.move_to_end(caller.client)
        if len(known) > MOST_CLIENTS:
            known.popitem(last=False)

    def welcome(self, principal: str) -> None:
        """Accept new sessions of a principal that was dismissed."""
        self._dismissed.discard(principal)

    def dismiss(self, principal: str) -> None:
        """Close the sessions of a principal whose grants have changed; persisted state stays.

        Sessions that are being opened are closed too.
        """
        self._dismissed.add(principal)
        for session in [each for each in self.sessions if each.owner == principal]:
            self._remember(session, "was ended when the access of its principal was changed")
            session.close()

    def forget_default(self, principal: str, default: str) -> None:
        """Remove a session from the default ones; it stays open and is found by its handle."""
        self._defaults.pop((principal, default), None)

    def find(self, caller: Caller, session: str) -> Session | None:
        """Return the open session that `resolve` would return; None without one."""
        if not session or self._is_default(caller, session):
            session = self._defaults.get((caller.principal, caller.default), "")
        return self._own(caller, session) if session else None

    async def retire(self, session: Session) -> None:
        """Hibernate an idle session, or close it if hibernation is off."""
        if self._settings.hibernate_sessions:
            await self.quota.hibernate(session)
        else:
            await self._drop(session)

    def end_delivered(self, handle: str) -> None:
        """Record a delivered answer about the end of a session."""
        self._tombstones.mark_delivered(handle)

    def end_revoked(self, handle: str) -> None:
        """Record that the answer about the end of a session was revoked."""
        self._tombstones.mark_undelivered(handle)

    def _end_in_words(self, ended: Tombstone) -> str:
        if ended.loss.kept:
            return f"{ended.why}; the kernel that it had joined goes on with its variables."
        files = "" if self._folders.keep else " and files"
        return f"{ended.why}: its variables{files} are gone.{lost_names(ended.loss)}"

    async def cells_of(self, caller: Caller, handle: str) -> tuple[str, History]:
        """Return the handle and cells of a session, or of a closed one whose record still exists.

        Raises SessionNotFound.
        """
        persisted = self._records.find(caller.principal, handle)
        if persisted is not None:
            return handle, persisted
        session = await self.resolve(caller, handle)
        return session.handle, session.cells

    async def close(
        self, session: Session, why: str = "was closed", *, keep_record: bool = False
    ) -> None:
        """End a session and its kernel; remove its persisted state, and its files unless kept.

        `why` is reported to its owner. With `keep_record` its cells stay readable for
        `history.KEPT_S` seconds. Waits for the end for at most `CLOSE_TIMEOUT_S` seconds.
        """
        session.keep_record = session.keep_record or keep_record
        session.forgotten = True
        self._remember(session, why)
        session.close()
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await session.ended.wait()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(work)

    async def _drop(self, session: Session) -> None:
        """Close a session to make room for others; the owner's next call reports the reason."""
        why = "had been idle for long, has expired and was ended: this server keeps only so many"
        if session.state == "hibernated":
            why = "had been hibernated, has expired and was dropped: this server keeps only so many"
        await self.close(session, why)

    def _remember(self, session: Session, why: str) -> None:
        """Record the end of a session and its losses, for the owner's next call."""
        if session.handle in self._sessions:
            loss = session.lost_state(f"it {why}")
            self._tombstones.add(Tombstone(session.owner, session.handle, session.name, why, loss))

    async def _serve(self, session: Session, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            with Barrier("serving a session", session.handle):
                await session.serve(task_status=task_status)
        finally:
            self._remember(session, "was ended by a failure of the server")
            self._saver.forget(session)
            with anyio.CancelScope(shield=True):
                async with session.installing:
                    if session.origin is not None:
                        await self._remove_folder(session, session.origin.folder)
                    left = session.family.leave(session)
                    await self._tell_of_branches(session.family)
                    for each in left:
                        await self._release_files(each)
                        if (held := self._held.pop(each.handle, None)) is not None:
                            held.close()
            del self._sessions[session.handle]
            self.ended_ran = max(self.ended_ran, session.last_ran)
            self._clients.pop(session.handle, None)
            session.journal.closed(cells=len(session.cells))
            session.ended.set()

    async def _release_files(self, session: Session) -> None:
        """Remove the files of a session that has ended, or release its persisted entry.

        With `keep_record` its cells stay readable for `history.KEPT_S` seconds.
        """
        if (persisted := session.persisted) is not None:
            with Barrier("putting a kept session away", session.handle):
                await session.stop_saving()
                if session.forgotten or session.blank:
                    await run_in_thread(persisted.entry.remove)
                elif persisted.unlogged:
                    await persisted.save_cells()
            persisted.close()
            return
        with Barrier("keeping a session's record", session.handle) as barrier:
            if session.keep_record:
                await self._records.keep(session.owner, session.handle, session.cells)
        recorded = session.keep_record and barrier.failure is None
        await self._folders.remove(session.handle, script=session.name == SCRIPT, recorded=recorded)
