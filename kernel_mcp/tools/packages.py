"""The tools for a session's packages: install, list_packages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import anyio
from mcp_types import CallToolResult, TextContent
from pydantic import Field

from kernel_mcp.environments.layer import versions
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import InputError
from kernel_mcp.identity import INSTALL
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.packages.result import InstallOutcome, all_versions
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, PackagesArg, SessionArg, Toolbox, progress_of
from kernel_mcp.tools.hints import INSTALLS, READS
from kernel_mcp.tools.models import Installed, PackageEntry, PackageList, PackageState
from kernel_mcp.tools.tables import FirstArg, MatchArg, fitting, matches, more, table_answer

PACKAGES_TIMEOUT_S = 10.0


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool, installer = box.tool, services.installer

    @tool(INSTALLS, "Install packages")
    async def install(
        packages: Annotated[
            PackagesArg,
            Field(description="Such as 'pandas>=2'"),
        ],
        ctx: AnyContext,
        session: SessionArg = "",
    ) -> Annotated[CallToolResult, Installed]:
        """Add packages to the live session, all or none; variables stay."""
        caller, found = await box.resolve(ctx, session)
        found.request.interpreter.require("install")
        caller.who.require(INSTALL, "Adding packages")
        started = time.monotonic()
        outcome = await installer.install(found, packages, progress_of(ctx) or silence)
        result = _installed(found, outcome, time.monotonic() - started)
        return CallToolResult(
            content=[TextContent(text=result.summary)],
            structured_content=result.model_dump(exclude_none=True),
            is_error=outcome.failed,
        )

    @tool(READS, "List packages", computes=True)
    async def list_packages(
        ctx: AnyContext, session: SessionArg = "", match: MatchArg = "", offset: FirstArg = 0
    ) -> Annotated[CallToolResult, PackageList]:
        """List packages with versions, and what install may add."""
        if offset < 0:
            raise InputError(f"offset={offset} is not usable: packages count from 0.")
        _, found = await box.resolve(ctx, session)
        request = found.request
        request.interpreter.require("list_packages")
        if request.interpreter is not PYTHON:
            return await _of_kernel(found, match, offset, services.settings.max_output)
        environment, _ = await services.factory.environment(request, progress_of(ctx) or silence)
        there = await anyio.to_thread.run_sync(all_versions, environment, request.layer)
        base = versions(environment.packages)
        entries = [
            PackageEntry(
                name=name,
                version=version,
                source="environment" if base.get(name) == version else "installed",
            )
            for name, version in there.items()
        ]
        rules = installer.rules.describe() or "nothing"
        head = f"Python {environment.version}. install may add: {rules}."
        found_list = PackageList(
            session=found.handle, python=environment.version, packages=[], installable=rules
        )
        return _listed(found_list, entries, head, match, offset, services.settings.max_output)


async def _of_kernel(session: Session, match: str, offset: int, characters: int) -> CallToolResult:
    """Return the packages that a kernel of another language has itself listed."""
    kernel = await session.ensure_kernel()
    there = await kernel.list_packages(PACKAGES_TIMEOUT_S)
    entries = [
        PackageEntry(name=name, version=version, source="installed" if own else "environment")
        for name, (version, own) in sorted(there.items())
    ]
    interpreter = session.request.interpreter
    listed = PackageList(session=session.handle, python="", packages=[], installable="nothing")
    head = f"{interpreter.language} {kernel.environment.version}. {interpreter.lacking['install']}"
    return _listed(listed, entries, head, match, offset, characters)


def _listed(
    result: PackageList,
    entries: Sequence[PackageEntry],
    head: str,
    match: str,
    offset: int,
    characters: int,
) -> CallToolResult:
    """Return the answer with those of `entries` that match and fit, from `offset` on."""
    meant = [each for each in entries if matches(each.name, match)][offset:]
    shown = fitting(meant, _row_of, characters)
    omitted = len(meant) - len(shown)
    note = more(omitted, offset, len(shown))
    listed = result.model_copy(update={"packages": shown, "omitted": omitted, "note": note})
    return table_answer([head, *map(_row_of, shown)], listed, note)


def _row_of(entry: PackageEntry) -> str:
    return f"{entry.name} {entry.version}{' (installed)' if entry.source == 'installed' else ''}"


def _installed(session: Session, outcome: InstallOutcome, duration_s: float) -> Installed:
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
