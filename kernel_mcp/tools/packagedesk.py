"""What the tools for packages, sessions of their own kind and scripts do."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import anyio
from mcp_types import CallToolResult, ContentBlock, ResourceLink, TextContent

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.layer import versions
from kernel_mcp.errors import KernelMcpError, WorkspaceError
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.requirements import SCRIPT_FILE, Needs, ScriptReader, expect_script, plain
from kernel_mcp.packages.result import all_versions
from kernel_mcp.sessions.cell import Cell, Report, Status
from kernel_mcp.sessions.manager import Caller, SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.answers import answer
from kernel_mcp.tools.desk import check_code, check_seconds
from kernel_mcp.tools.models import (
    Installed,
    PackageEntry,
    PackageList,
    PackageState,
    SessionHandle,
)
from kernel_mcp.tools.telling import said

if TYPE_CHECKING:
    from kernel_mcp.packages.result import Outcome

SCRIPT_NAME = "script"
MOST_FILES = 10

HEAD_START_S = 0.002
"""What the answer to create_session leaves its kernel, whose start takes longer than telling of it:
a spare is there by then, a fork is on its way."""


class PackageDesk:
    """Serves the tools of one server. Every method raises KernelMcpError for the model to read."""

    def __init__(
        self,
        *,
        settings: Settings,
        manager: SessionManager,
        factory: KernelFactory,
        installer: Installer,
        reader: ScriptReader,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._factory = factory
        self._installer = installer
        self._reader = reader
        self._budget = Budget()

    async def install(
        self, caller: Caller, handle: str, packages: list[str], report: Report
    ) -> CallToolResult:
        """Add packages to a session; an error in the result when one of them does not work."""
        session = await self._manager.resolve(caller, handle)
        started = time.monotonic()
        try:
            outcome = await self._installer.install(session, packages, report)
        except KernelMcpError as error:
            session.journal.installed(packages, str(error))
            raise
        found = _installed(session, outcome, time.monotonic() - started)
        session.journal.installed(packages, found.summary)
        return CallToolResult(
            content=[TextContent(text=found.summary)],
            structured_content=found.model_dump(),
            is_error=outcome.failed,
        )

    async def list_packages(self, caller: Caller, handle: str, report: Report) -> PackageList:
        """What a session can use: its environment's packages and those added to it."""
        session = await self._manager.resolve(caller, handle)
        environment, _ = await self._factory.prepare(session.demand, report)
        found = await anyio.to_thread.run_sync(all_versions, environment, session.demand.layer)
        base = versions(environment.packages)
        entries = [
            PackageEntry(
                name=name,
                version=version,
                source="environment" if base.get(name) == version else "installed",
            )
            for name, version in found.items()
        ]
        return PackageList(
            session=session.handle,
            python=environment.version,
            packages=entries,
            installable=self._installer.rules.describe() or "nothing",
        )

    async def create_session(
        self, caller: Caller, *, name: str, packages: list[str], python: str, report: Report
    ) -> SessionHandle:
        """Open a further session, with an environment of its own where it asks for one."""
        needs = Needs(self._reader.packages(packages), await self._reader.python(python, report))
        session = await self._open(caller, name, needs, report)
        if self._factory.prepared(session.demand):
            session.begin()
            with anyio.move_on_after(HEAD_START_S):
                await session.begun.wait()
        note = "Pass the handle as `session`: it has its own kernel, variables and workspace."
        return SessionHandle(session=session.handle, name=name, note=note)

    async def run_script(
        self,
        caller: Caller,
        script: str,
        *,
        dependencies: list[str],
        python: str,
        timeout_s: float,
        report: Report,
    ) -> CallToolResult:
        """Run a script once, in a session that lives no longer than that."""
        script = plain(script)
        check_code(script)
        if timeout_s != self._settings.timeout_s or timeout_s < 0:
            check_seconds("timeout", timeout_s, least=0.001)
        needs = await self._reader.needs(script, dependencies, python, report)
        session = await self._open(caller, SCRIPT_NAME, needs, report)
        try:
            await expect_script(session)
            cell = session.submit(script, timeout_s)
            await session.follow(cell, float("inf"), report)
            closing = _closing(cell)
            result = await answer(
                session, cell, self._budget, caller.reply, since=Position(), closing=closing
            )
            files = await anyio.to_thread.run_sync(_files, session)
        finally:
            with anyio.CancelScope(shield=True):
                await self._manager.close(session)
                self._manager.known_to_have_ended(session.handle)
        return _apart(result, session, files)

    async def _open(self, caller: Caller, name: str, needs: Needs, report: Report) -> Session:
        """A session whose environment is there, or none. Raises EnvironmentBuildError."""
        session = await self._manager.create(
            caller, name=name, packages=needs.packages, python=needs.python
        )
        if not session.demand.ordinary:
            try:
                await self._factory.prepare(session.demand, report)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._manager.close(session)
                raise
        return session


def _installed(session: Session, outcome: Outcome, duration_s: float) -> Installed:
    return Installed(
        session=session.handle,
        summary=outcome.summary(),
        packages=[
            PackageState(
                name=each.name,
                version=each.version,
                previous=each.previous if each.changed else "",
                requested=each.asked,
                imports=list(each.modules),
                state=each.state.value,
                detail=each.detail,
            )
            for each in outcome.packages
        ],
        allowed_imports=list(outcome.permitted),
        reset_needed=outcome.needs_reset,
        duration_s=round(duration_s, 3),
    )


def _files(session: Session) -> list[str]:
    """The files a script has left, with their sizes."""
    try:
        listing = session.workspace.list_files()
    except WorkspaceError:
        return []
    names = [
        f"{entry.path} ({entry.size:,} bytes)"
        for entry in listing.entries
        if entry.path != SCRIPT_FILE
    ]
    more = len(names) - MOST_FILES
    return [*names[:MOST_FILES], *([f"{more} more"] if more > 0 else [])]


def _closing(cell: Cell) -> str:
    """How a script ended, when its output does not say it."""
    if cell.outcome is None or cell.status in (Status.OK, Status.ERROR):
        return ""
    return f"{cell.status.value}: {cell.outcome.cause or 'stopped'}"


def _apart(result: CallToolResult, session: Session, files: list[str]) -> CallToolResult:
    """An answer whose session is gone: nothing in it may lead there."""
    address = re.compile(rf"kernel://{re.escape(session.handle)}/[^\s\]]+")
    content: list[ContentBlock] = [
        block.model_copy(update={"text": address.sub("not kept", block.text)})
        if isinstance(block, TextContent)
        else block
        for block in result.content
        if not isinstance(block, ResourceLink)
    ]
    if files:
        content.append(
            said(
                f"the script wrote {', '.join(files)}: gone with its session. Use execute and "
                "read_file to keep files"
            )
        )
    return result.model_copy(update={"content": content})
