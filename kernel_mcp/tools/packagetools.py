"""The MCP tools for packages, further sessions and scripts: thin, as those in `tools`."""

from __future__ import annotations

from typing import Annotated

from mcp_types import CallToolResult, ToolAnnotations
from pydantic import Field

from kernel_mcp.config.settings import Settings
from kernel_mcp.sessions.cell import silence
from kernel_mcp.tools.models import Installed, PackageList, SessionHandle
from kernel_mcp.tools.packagedesk import PackageDesk
from kernel_mcp.tools.toolkit import CHANGES, READS, AnyContext, SessionArg, Toolbox, reporter

DOWNLOADS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)


def register_packages(box: Toolbox, desk: PackageDesk, settings: Settings) -> None:
    """Add these tools to `box`."""
    tool, caller = box.tool, box.caller

    @tool(annotations=DOWNLOADS)
    async def install(
        packages: Annotated[
            list[str], Field(description="Names with optional versions: ['polars', 'pandas>=2']")
        ],
        ctx: AnyContext,
        session: SessionArg = "",
    ) -> Annotated[CallToolResult, Installed]:
        """Add packages to a session without losing its variables.

        They are imported in the live session before this answers, so that the answer says what
        works there. Either all are installed or nothing changes. Which packages may be added is
        the operator's decision; list_packages tells.
        """
        return await desk.install(caller(ctx), session, packages, reporter(ctx) or silence)

    @tool(annotations=READS)
    async def list_packages(ctx: AnyContext, session: SessionArg = "") -> PackageList:
        """List the packages of a session with their versions, and what install may add."""
        return await desk.list_packages(caller(ctx), session, reporter(ctx) or silence)

    @tool(annotations=CHANGES)
    async def create_session(
        ctx: AnyContext,
        name: Annotated[str, Field(description="A label for people")] = "",
        packages: Annotated[
            list[str], Field(description="Further packages (PEP 508) for its environment")
        ] = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
        python: Annotated[str, Field(description="Python version, such as 3.12")] = "",
    ) -> SessionHandle:
        """Open a further session with its own kernel, variables and workspace.

        Not needed for ordinary work: tools called without `session` share a default session.
        """
        return await desk.create_session(
            caller(ctx),
            name=name,
            packages=packages,
            python=python,
            report=reporter(ctx) or silence,
        )

    @tool(annotations=DOWNLOADS, structured_output=False)
    async def run_script(
        script: Annotated[
            str, Field(description="A whole Python script; may begin with a PEP 723 block")
        ],
        ctx: AnyContext,
        dependencies: Annotated[
            list[str], Field(description="Packages (PEP 508) beside those the script names")
        ] = [],  # noqa: B006 - as above
        python: Annotated[str, Field(description="Python version; empty for one that fits")] = "",
        timeout: Annotated[
            float, Field(description="Hard limit of the script in seconds")
        ] = settings.timeout_s,
    ) -> CallToolResult:
        """Run a script once, in a fresh session that is closed afterwards.

        For work that needs no state: nothing of it stays, files neither. Dependencies are taken
        from the script's `# /// script` block and from `dependencies`.
        """
        return await desk.run_script(
            caller(ctx),
            script,
            dependencies=dependencies,
            python=python,
            timeout_s=timeout,
            report=reporter(ctx) or silence,
        )
