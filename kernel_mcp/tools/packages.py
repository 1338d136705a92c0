"""The tools for a session's packages: install, list_packages."""

from __future__ import annotations

import time
from typing import Annotated

import anyio
from mcp_types import CallToolResult, TextContent
from pydantic import Field

from kernel_mcp.environments.layer import versions
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import InputError
from kernel_mcp.identity import INSTALL
from kernel_mcp.packages.result import InstallOutcome, all_versions
from kernel_mcp.sessions.own_kernel import require_own
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, PackagesArg, SessionArg, Toolbox, progress_of
from kernel_mcp.tools.hints import INSTALLS, READS
from kernel_mcp.tools.models import Installed, PackageEntry, PackageList, PackageState
from kernel_mcp.tools.tables import FirstArg, MatchArg, fitting, matches, more, table_answer


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
        require_own(found.request, "install")
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
        require_own(found.request, "list_packages")
        request = found.request
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
            if matches(name, match)
        ][offset:]
        shown = fitting(entries, _row_of, services.settings.max_output)
        omitted = len(entries) - len(shown)
        listed = PackageList(
            session=found.handle,
            python=environment.version,
            packages=shown,
            omitted=omitted,
            note=more(omitted, offset, len(shown)),
            installable=installer.rules.describe() or "nothing",
        )
        head = f"Python {listed.python}. install may add: {listed.installable}."
        return table_answer([head, *map(_row_of, shown)], listed, listed.note)


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
