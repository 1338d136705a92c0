"""All sessions of a server: opening, finding and closing them, and what a principal may have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.errors import InputError, SessionNotFound
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.launch.base import Replay
from kernel_mcp.launch.tool_gateway import ToolGateway
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.branches import Branches
from kernel_mcp.sessions.checkpoints import IdleCheckpoints
from kernel_mcp.sessions.directory import NAME, Caller, SessionDirectory
from kernel_mcp.sessions.factory import SessionFactory
from kernel_mcp.sessions.history import ClosedRecords, History
from kernel_mcp.sessions.kernel_admission import KernelAdmission
from kernel_mcp.sessions.persistence import Persistence, SessionRequest
from kernel_mcp.sessions.principals import Others, Overseer, Principals
from kernel_mcp.sessions.registry import LocalRegistry, SessionRegistry
from kernel_mcp.sessions.saver import Saver
from kernel_mcp.sessions.scheduler import Preparation
from kernel_mcp.sessions.session import Session, SessionContext
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.storage import SessionFolders
from kernel_mcp.sessions.tombstones import Tombstones

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CLOSE_TIMEOUT_S = 2.0
END_TIMEOUT_S = 30.0
"""Maximum seconds that a new session waits for the end of the one that had its name."""
PREAMBLE = '[session {0}: pass session="{0}" to keep using these variables]'
_REPLACED = "was closed, as you asked for what was kept under its name"


class SessionManager:
    """Creates, finds and closes sessions, while `running`."""

    def __init__(
        self,
        settings: Settings,
        source: KernelSource,
        folders: SessionFolders,
        shared: SharedContext[Session],
        preparation: Preparation[Session] | None = None,
        persistence: Persistence | None = None,
        registry: SessionRegistry | None = None,
        others: Others | None = None,
    ) -> None:
        """Without `persistence` no session outlives the server.

        `registry` creates handles. `others` are the servers that share the quotas of principals
        with this one.
        """
        self._registry = registry or LocalRegistry()
        self._settings = settings
        self._shared, self.checks, clock = shared, shared.checks, shared.clock
        self._persistence = persistence
        self._saver = Saver(clock, lambda: persistence.store.make_room() if persistence else None)
        self.tombstones = Tombstones()
        self.directory = SessionDirectory(
            clock, persistence, self.tombstones, keeps_files=folders.keep
        )
        self._records = ClosedRecords(folders.records, clock, self.spawn)
        self._dismissed: set[str] = set()
        """Principals whose sessions now belong to another manager."""
        self._default_locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._idle_checkpoints: WeakValueDictionary[str, IdleCheckpoints] = WeakValueDictionary()
        """Idle sessions that have checkpoints, by principal."""
        self.principals = Principals(settings, others)
        self.admission = KernelAdmission(
            settings,
            self.directory,
            shared,
            self.principals,
            drop=self._drop,
            spawn=self.spawn,
        )
        self._tools = ToolGateway.of(settings)
        context = SessionContext(
            settings=settings,
            source=source,
            shared=shared,
            preparation=preparation,
            masks=Masks(settings.masked_values),
            admit=self.admission.admit,
            saver=self._saver,
            idle_checkpoints=self._idle_checkpoints_of,
            tools=self._tools,
        )
        self._factory = SessionFactory(
            context, folders, persistence, self.directory, self.principals, self._records
        )
        self.branches = Branches(self, self._factory, self._registry, self.admission)
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run sessions inside this block; leaving it closes all of them."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._shared.pools.append(self.directory)
            if self._persistence is not None:
                tasks.start_soon(self._collect, self._persistence)
                tasks.start_soon(self._saver.run)
            if self.principals.several or self._settings.quotas != Quotas():
                tasks.start_soon(Overseer(self.principals, lambda: self.sessions).run)
            try:
                yield
            finally:
                for session in self.sessions:
                    if (entry := session.persistence.entry) is not None:
                        with Barrier("saying that a session ends", session.handle):
                            entry.mark_closing()
                for session in self.sessions:
                    if session.state == "busy":
                        session.persistence.touch()
                await self._saver.finish()
                for session in self.sessions:
                    with Barrier("closing a session", session.handle):
                        session.close()
                longest_s = CLOSE_TIMEOUT_S * self._settings.patience
                with anyio.CancelScope(shield=True), anyio.move_on_after(longest_s):
                    for session in self.sessions:
                        await session.ended.wait()
                await self._tools.aclose()
                self._shared.pools.remove(self.directory)
                tasks.cancel_scope.cancel()

    async def _collect(self, persistence: Persistence) -> None:
        with Barrier("removing what is left of closed sessions"):
            await anyio.to_thread.run_sync(persistence.store.collect)

    @property
    def sessions(self) -> list[Session]:
        """Every open session, oldest first."""
        return self.directory.sessions

    def _idle_checkpoints_of(self, principal: str) -> IdleCheckpoints:
        made = IdleCheckpoints(busy=self.directory.busy)
        return self._idle_checkpoints.setdefault(principal, made)

    def check_cells(self, caller: Caller) -> None:
        """Raise SessionLimitReached if the caller may run no further cell now."""
        self.principals.seen(caller.who)
        own = self.directory.owned_by(caller.principal)
        self.principals.check_cells(caller.principal, own)

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
        tools: tuple[str, ...] | None = None,
        default: bool = False,
        fresh: bool = False,
        resume: bool = False,
        interpreter: Interpreter = PYTHON,
        handle: str = "",
        replay: Replay | None = None,
    ) -> Session:
        """Open a session; the longest idle one may be hibernated to make room.

        `handle` is passed for a session that had it before. Empty or None `limits`, `timeout_s`,
        `network` and `tools` stand for those of the settings. Persisted state is restored unless
        `fresh`. With `resume` it is restored even if more is granted now, and the session that
        began in its place is closed. The default session is one of `PYTHON`. With `replay` its
        kernel repeats cells.

        Raises SessionLimitReached, and InputError for a `name` that is in use or malformed.
        """
        wanted = SessionRequest(name, default=default, fresh=fresh, resume=resume)
        self.principals.seen(caller.who)
        if interpreter.name and self.directory.is_default(caller, name):
            raise InputError(
                f"{name!r} is your default session, which runs Python: choose another name, or "
                "none, for one with another kernel."
            )
        limits = self.principals.limits(caller.principal, limits, self._settings.limits)
        async with (
            self.directory.opening(),
            self._replacing(caller, wanted) as wanted,
            self._after_namesakes(caller, wanted),
            self.admission.reserve(caller.principal),
        ):
            self.directory.check_name(caller, wanted.name)  # again: the reservation may have waited
            if not interpreter.saves:
                handle = self._registry.new_handle()
            async with self._entered(caller, wanted, handle) as handle:
                request = KernelRequest(
                    handle,
                    Path(),
                    python,
                    packages,
                    limits=limits,
                    network=network,
                    tools=tools,
                    interpreter=interpreter,
                    replay=replay,
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
        """Open the requested session, and register it as the default one or by its name."""
        session = await self._factory.create(caller, wanted, request, timeout_s)
        await self.start(session)
        self.directory.register(caller, session, default=wanted.default)
        if caller.principal in self._dismissed:
            session.close()
            raise SessionNotFound(
                "The session was not opened: your access was changed meanwhile. Call again."
            )
        return session

    async def start(self, session: Session) -> None:
        """Start the task that runs the cells of a session."""
        assert self._tasks is not None
        try:
            await self._tasks.start(self._serve, session)
        except BaseException:
            session.locks.close()
            raise

    @asynccontextmanager
    async def _replacing(
        self, caller: Caller, wanted: SessionRequest
    ) -> AsyncIterator[SessionRequest]:
        """Close the session that began in place of the requested one, and yield the request.

        The name of the default session stands for the default session. Raises InputError if the
        session exists and its persisted state was not held back.
        """
        wanted.check()
        if wanted.default or not self.directory.is_default(caller, wanted.name):
            self.directory.check_name(caller, wanted.name, but_held_back=wanted.decides)
            if (there := self.directory.named(caller, wanted.name)) is not None:
                await self.close(there, _REPLACED)
            yield wanted
            return
        async with self._lock_of(caller.principal):
            if (there := self.directory.default(caller)) is not None:
                if not (wanted.decides and there.held_back):
                    raise InputError(
                        f"{wanted.name!r} is your default session, which is there: leave `session` "
                        "empty. reset empties it, close_session ends it."
                    )
                await self.close(there, _REPLACED)
            yield replace(wanted, name="", default=True)

    @asynccontextmanager
    async def _after_namesakes(self, caller: Caller, wanted: SessionRequest) -> AsyncIterator[None]:
        """Enter once the sessions of the same name that are being closed have ended.

        They hold the persisted state of the name. Waits for at most `END_TIMEOUT_S` seconds.
        """
        ending = self.directory.closing(caller, wanted.name, default=wanted.default)
        with anyio.move_on_after(END_TIMEOUT_S * self._settings.patience):
            for each in ending:
                await each.ended.wait()
        yield

    async def resolve(self, caller: Caller, session: str) -> Session:
        """Return the caller's session with this handle or name; `""` is the default one.

        The default session, and a persisted one of this name, are opened if missing. Raises
        SessionGone for an ended session whose end was not reported yet. Raises SessionNotFound,
        with the same text for unknown, foreign and expired sessions.
        """
        directory = self.directory
        if session and not directory.is_default(caller, session):
            found = directory.own(caller, session)
            if found is not None and not found.closing.is_set():
                return found
            if (
                self._persistence
                and NAME.fullmatch(session)
                and self._persistence.has(caller.principal, session)
            ):
                return await self.create(caller, name=session)
            raise directory.missing(caller, session)
        default = directory.default(caller)
        if default is None or caller.principal in self._default_locks:  # one is being opened
            async with self._lock_of(caller.principal):
                default = directory.default(caller)
                if default is None:
                    default = await self.create(caller, default=True)
                    if not caller.known:
                        caller.response.preamble = PREAMBLE.format(default.handle)
        directory.note_client(caller, default)
        return default

    def _lock_of(self, principal: str) -> anyio.Lock:
        """Return the lock that is held while a default session of a principal is opened."""
        return self._default_locks.setdefault(principal, anyio.Lock())

    def welcome(self, principal: str) -> None:
        """Accept new sessions of a principal that was dismissed."""
        self._dismissed.discard(principal)

    def dismiss(self, principal: str) -> None:
        """Close the sessions of a principal whose grants have changed; persisted state stays.

        Sessions that are being opened are closed too.
        """
        self._dismissed.add(principal)
        why = "was ended when the access of its principal was changed"
        for session in self.directory.owned_by(principal):
            self.directory.note_end(session, why)
            session.close()

    async def expel(self, principal: str) -> None:
        """Stop and save the sessions of a principal that may no longer call, as `dismiss` does."""
        self._dismissed.add(principal)
        async with anyio.create_task_group() as tasks:
            for session in self.directory.owned_by(principal):
                tasks.start_soon(
                    self.stop, session, "was ended as its principal's token was revoked"
                )

    async def stop(self, session: Session, why: str) -> str:
        """Interrupt what runs in a session, save it and end it; its persisted state stays.

        Return why it was not saved, empty if it was. `why` is reported to its owner.
        """
        unsaved = "only named and default sessions of a server with --persist are"
        if session.persistence.entry is not None:
            unsaved = await self._saver.save_last(session.persistence)
        self.directory.note_end(session, why, saved=not unsaved)
        session.close()
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await session.ended.wait()
        session.events.note("stop", why=why, unsaved=unsaved)
        return unsaved

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
        self.directory.note_end(session, why)
        session.close()
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await session.ended.wait()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work`, which raises nothing, until its end or that of the server."""
        assert self._tasks is not None
        self._tasks.start_soon(work)

    async def _drop(self, session: Session) -> None:
        """Close a session to make room for others; the owner's next call reports the reason."""
        why = "had been idle for long, has expired and was ended: this server keeps only so many"
        if session.state == "hibernated":
            why = "had been hibernated, has expired and was dropped: this server keeps only so many"
        await self.close(session, why)

    async def _serve(self, session: Session, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            with Barrier("serving a session", session.handle):
                await session.serve(task_status=task_status)
        finally:
            self.directory.note_end(session, "was ended by a failure of the server")
            self._saver.forget(session.persistence)
            with anyio.CancelScope(shield=True):
                async with session.installing:
                    await self.branches.leave(session)
            self.directory.remove(session)
            session.events.note("session_end", cells=len(session.cells))
            session.ended.set()
