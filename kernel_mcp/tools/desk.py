"""What the tools do: check arguments, find the caller's session, act, describe the result."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import anyio
from mcp_types import CallToolResult, ResourceLink

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import InputError, LaunchError
from kernel_mcp.files.contents import page_of
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.output.notebook import NOTEBOOK_MIME, notebook
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget
from kernel_mcp.packages.result import all_versions
from kernel_mcp.policy import check, own_modules
from kernel_mcp.sandbox.base import Sandbox, SandboxReport
from kernel_mcp.sessions.audit import Audit
from kernel_mcp.sessions.cell import Cell, Report
from kernel_mcp.sessions.lifecycle import lost_names
from kernel_mcp.sessions.manager import Caller, SessionManager
from kernel_mcp.sessions.session import Clock, Session
from kernel_mcp.tools import describe
from kernel_mcp.tools.answers import answer
from kernel_mcp.tools.fileanswers import file_answer, files_answer, page_answer
from kernel_mcp.tools.models import (
    Closed,
    FileList,
    ServerInfo,
    SessionList,
    SyntaxReport,
    Variable,
    VariableList,
    Written,
)
from kernel_mcp.tools.resources import cell_of, cell_uri_number
from kernel_mcp.tools.telling import LOST_KEY, lost_meta, said, say

MAX_CODE_CHARS = 1_000_000
MAX_SECONDS = 7 * 24 * 3600.0


class Desk:
    """Serves the tools of one server. Every method raises KernelMcpError for the model to read."""

    def __init__(
        self,
        *,
        settings: Settings,
        manager: SessionManager,
        factory: KernelFactory,
        sandbox: Sandbox,
        report: SandboxReport,
        clock: Clock,
        audit: Audit | None = None,
    ) -> None:
        """`report` says what is in force, resources included."""
        self._settings = settings
        self._manager = manager
        self._factory = factory
        self._sandbox = sandbox
        self._report = report
        self._budget = Budget()
        self._clock = clock
        self._audit = audit or Audit()
        self._one_notebook = anyio.CapacityLimiter(1)

    async def execute(
        self,
        caller: Caller,
        handle: str,
        code: str,
        *,
        timeout_s: float,
        wait_s: float,
        report: Report | None,
    ) -> CallToolResult:
        """Run code as the session's next cell and answer when it ends or `wait_s` is over."""
        check_code(code)
        if timeout_s != self._settings.timeout_s or timeout_s < 0:
            check_seconds("timeout", timeout_s, least=0.001)
        check_seconds("wait", wait_s, least=0)
        session = await self._manager.resolve(caller, handle)
        cell = session.submit(code, timeout_s)
        try:
            await session.follow(cell, wait_s, report)
        except anyio.get_cancelled_exc_class():
            session.abandon(cell)
            raise
        return await answer(session, cell, self._budget, caller.reply, since=Position())

    async def wait(
        self, caller: Caller, handle: str, *, wait_s: float, report: Report | None
    ) -> CallToolResult:
        """Go on watching the oldest cell whose end has not been reported."""
        check_seconds("wait", wait_s, least=0)
        session = await self._manager.resolve(caller, handle)
        cell = session.unreported
        if cell is None:
            return say(_nothing_runs(session))
        await session.follow(cell, wait_s, report)
        result = await answer(session, cell, self._budget, caller.reply, since=cell.reported)
        if cell is not session.cells[-1]:
            result.content.insert(0, said(_earlier(session, cell)))
        return result

    async def interrupt(self, caller: Caller, handle: str) -> CallToolResult:
        """Stop the running cell; the answer says whether variables survived."""
        session = await self._manager.resolve(caller, handle)
        cell = await session.interrupt()
        if cell is None:
            return say(_nothing_runs(session))
        return await answer(session, cell, self._budget, caller.reply, since=cell.reported)

    async def check_syntax(self, caller: Caller, handle: str, code: str) -> SyntaxReport:
        """Diagnose code without running it."""
        session = await self._manager.resolve(caller, handle)
        policy = self._factory.policy(session.demand)
        names = await self._known_names(session)
        found = await anyio.to_thread.run_sync(
            partial(
                check,
                code,
                policy,
                known_names=names,
                own_modules=own_modules(session.demand.workspace),
                python=session.kernel.environment.version if session.kernel else "",
            )
        )
        return describe.syntax(session, found)

    async def reset(
        self, caller: Caller, handle: str, *, packages: bool, files: bool
    ) -> CallToolResult:
        """Give the session a fresh kernel."""
        session = await self._manager.resolve(caller, handle)
        lost = await session.reset(packages=packages, files=files)
        if lost is not None:
            caller.reply.carry(session.ledger, [lost])
        dropped = " The packages that had been installed are gone too." if packages else ""
        loss = lost.loss if lost is not None else None
        names = lost_names(loss) if loss is not None else ""
        place = "is now empty" if files else "is as it was"
        return say(
            f"Session {session.handle} has a fresh kernel: all variables, imports and definitions "
            f"are gone.{names} The workspace {place}.{dropped}",
            meta={} if loss is None else {LOST_KEY: lost_meta(session.handle, [loss])},
        )

    def list_sessions(self, caller: Caller) -> SessionList:
        """Describe the caller's sessions."""
        now = self._clock()
        sessions = self._manager.owned_by(caller)
        states = [describe.state(session, now) for session in sessions]
        for session in sessions:
            caller.reply.carry(session.ledger, session.ledger.pending)
        return SessionList(sessions=states, limit=self._settings.max_sessions)

    async def close_session(self, caller: Caller, handle: str) -> Closed:
        """End a session."""
        session = await self._manager.resolve(caller, handle)
        await self._manager.close(session)
        caller.reply.receipt.then(  # which may outlive the session
            partial(self._manager.known_to_have_ended, session.handle),
            partial(self._manager.not_known_to_have_ended, session.handle),
        )
        kept = "kept" if self._settings.workspace else "removed"
        note = f"The session is closed; its variables are gone and its files were {kept}."
        return Closed(session=session.handle, note=note)

    async def list_variables(self, caller: Caller, handle: str) -> VariableList:
        """Describe the session's variables."""
        session = await self._manager.resolve(caller, handle)
        reply = await session.variables()
        variables = [Variable.model_validate(item) for item in reply["variables"]]
        note = "" if variables else "No variables have been defined in this session."
        if session.sleep is not None:
            note = session.sleep.remark()
        if (again := session.ledger.again) is not None:
            caller.reply.carry(session.ledger, [again])
            note = f"{note} Told before: {again.text}".lstrip()
        return VariableList(
            session=session.handle, variables=variables, omitted=reply["omitted"], note=note
        )

    async def export_notebook(self, caller: Caller, handle: str, path: str) -> CallToolResult:
        """Write all cells with their outputs into the workspace as a notebook."""
        session = await self._manager.resolve(caller, handle)
        if not path.endswith(".ipynb"):
            raise InputError(f"{path!r} is no name for a notebook: let it end in .ipynb.")
        export = partial(_export, session, path)
        size = await anyio.to_thread.run_sync(export, limiter=self._one_notebook)
        said = say(f"Wrote {len(session.cells)} cells with their outputs to {path!r}.")
        said.content.append(
            ResourceLink(
                uri=f"kernel://{session.handle}/notebook",
                name=path,
                mime_type=NOTEBOOK_MIME,
                size=size,
            )
        )
        return said

    async def list_files(self, caller: Caller, handle: str, path: str) -> FileList:
        """List a folder of the workspace."""
        session = await self._manager.resolve(caller, handle)
        listing = await anyio.to_thread.run_sync(session.workspace.list_files, path)
        return files_answer(session, listing)

    async def read_file(
        self, caller: Caller, handle: str, path: str, *, offset: int, limit: int
    ) -> CallToolResult:
        """Read a file of the workspace, or the whole output of a cell."""
        session = await self._manager.resolve(caller, handle)
        if offset < 0 or limit < 0:
            raise InputError("offset and limit count lines from 0 and cannot be negative.")
        match = cell_uri_number(path, session.handle)
        if match is not None:
            cell = cell_of(session, match)
            page = partial(page_of, cell.log.text(), offset=offset, limit=limit)
            return page_answer(
                await anyio.to_thread.run_sync(partial(page, characters=self._budget.characters))
            )
        read = partial(session.workspace.read_file, path, offset=offset, limit=limit)
        found = await anyio.to_thread.run_sync(partial(read, characters=self._budget.characters))
        return await anyio.to_thread.run_sync(file_answer, found)

    async def write_file(
        self, caller: Caller, handle: str, path: str, content: str, encoding: str
    ) -> Written:
        """Write a file into the workspace."""
        session = await self._manager.resolve(caller, handle)
        size = await anyio.to_thread.run_sync(_write, session, path, content, encoding)
        note = f"Written. Code opens it as {path!r}."
        return Written(session=session.handle, path=path, size=size, note=note)

    async def info(self, caller: Caller, handle: str) -> ServerInfo:
        """Describe the server and the session's environment."""
        session = await self._manager.resolve(caller, handle)
        environment, policy = await self._factory.environment(session.demand, lambda _text: None)
        packages = await anyio.to_thread.run_sync(all_versions, environment, session.demand.layer)
        return describe.server(
            session,
            replace(environment, packages=tuple(f"{k}=={v}" for k, v in packages.items())),
            policy,
            sandbox=self._sandbox,
            report=self._report,
            refusal=self._factory.refusal(environment),
            settings=self._settings,
            audit=self._audit.state,
        )

    async def _known_names(self, session: Session) -> frozenset[str] | None:
        """The names the session defines, or None while its kernel cannot tell."""
        try:
            found = await session.variables()
        except LaunchError:
            return None
        if found["omitted"]:
            return None
        return frozenset(item["name"] for item in found["variables"])


def _export(session: Session, path: str) -> int:
    return _write(session, path, notebook(session))


def _write(session: Session, path: str, content: str | bytes, encoding: str = "utf-8") -> int:
    """Write a file into the workspace and the audit trail; its size in bytes."""
    size = session.workspace.write_file(path, content, encoding=encoding)
    session.journal.wrote(path, size, content, encoding)
    return size


def check_code(code: str) -> None:
    """Raise InputError for code that is empty or too long."""
    if not code.strip():
        raise InputError("The code is empty. Pass at least one statement or expression.")
    if len(code) > MAX_CODE_CHARS:
        raise InputError(
            f"The code has {len(code):,} characters; a cell takes at most {MAX_CODE_CHARS:,}. Put "
            "data into a file with write_file and read it from the code."
        )


def check_seconds(name: str, value: float, *, least: float) -> None:
    """Raise InputError for a time that cannot be used."""
    if not math.isfinite(value) or not least <= value <= MAX_SECONDS:
        raise InputError(
            f"{name}={value:g} is not usable: pass seconds from {least:g} to {MAX_SECONDS:,.0f}."
        )


def _earlier(session: Session, cell: Cell) -> str:
    """A heading for an answer about a cell that is not the one that was started last."""
    later = [other for other in session.cells.untold if other.number > cell.number]
    others = [f"cell {other.number}" for other in later]
    more = f". Call wait again for {', '.join(others)}" if others else ""
    return f"This is cell {cell.number}, which an earlier call had started{more}"


def _nothing_runs(session: Session) -> str:
    if not session.cells:
        return "Nothing is running: no cell has been executed in this session."
    last = session.cells[-1]
    if last.outcome is None:
        return f"Nothing is left to tell: cell {last.number} was cancelled and is being stopped."
    return (
        f"Nothing is running. Cell {last.number} was the last; it ended with {last.status.value}."
    )
