"""The MCP tools: thin, typed, documented for a model.

Tool names and arguments are the public contract of the server; what they do is in `desk`.
"""

from __future__ import annotations

from typing import Annotated

from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp.config.settings import Settings
from kernel_mcp.tools.desk import Desk
from kernel_mcp.tools.models import (
    Closed,
    FileList,
    ServerInfo,
    SessionList,
    SyntaxReport,
    VariableList,
    Written,
)
from kernel_mcp.tools.toolkit import (
    ALWAYS_LOADED,
    CHANGES,
    DESTROYS,
    READS,
    AnyContext,
    CodeArg,
    PathArg,
    SessionArg,
    Toolbox,
    WaitArg,
    reporter,
)


def register(box: Toolbox, desk: Desk, settings: Settings) -> None:
    """Add every tool to `box`."""
    tool, caller = box.tool, box.caller

    @tool(annotations=CHANGES, meta=ALWAYS_LOADED, structured_output=False)
    async def execute(
        code: CodeArg,
        ctx: AnyContext,
        session: SessionArg = "",
        timeout: Annotated[
            float, Field(description="Hard limit of the cell in seconds; it is interrupted then")
        ] = settings.timeout_s,
        wait: WaitArg = settings.wait_s,
    ) -> CallToolResult:
        """Run Python code in a persistent notebook session and return its output.

        Variables, imports and functions stay for the next call. The value of the last expression
        is shown, plots come back as pictures. If the cell takes longer than `wait` seconds the
        answer has status `running` and the cell goes on: call `wait` to follow it, `interrupt` to
        stop it. Every answer says so when variables were lost.
        """
        return await desk.execute(
            caller(ctx), session, code, timeout_s=timeout, wait_s=wait, report=reporter(ctx)
        )

    @tool(annotations=READS, meta=ALWAYS_LOADED, structured_output=False)
    async def wait(
        ctx: AnyContext, session: SessionArg = "", wait: WaitArg = settings.wait_s
    ) -> CallToolResult:
        """Follow a running or queued cell: return the output since the last answer.

        Answers as soon as the cell ends, at the latest after `wait` seconds. Giving up on this
        call does not stop the cell.
        """
        return await desk.wait(caller(ctx), session, wait_s=wait, report=reporter(ctx))

    @tool(annotations=CHANGES, structured_output=False)
    async def interrupt(ctx: AnyContext, session: SessionArg = "") -> CallToolResult:
        """Stop the running cell (KeyboardInterrupt) and return what it had printed.

        Variables are kept. Code that does not react is killed with its kernel after a short
        grace; the answer then says that variables are lost.
        """
        return await desk.interrupt(caller(ctx), session)

    @tool(annotations=READS)
    async def check_syntax(
        code: CodeArg, ctx: AnyContext, session: SessionArg = ""
    ) -> SyntaxReport:
        """Check code without running it: syntax errors, imports the policy refuses, unknown names.

        Every finding has its position and source line.
        """
        return await desk.check_syntax(caller(ctx), session, code)

    @tool(annotations=DESTROYS, structured_output=False)
    async def reset(
        ctx: AnyContext,
        session: SessionArg = "",
        packages: Annotated[bool, Field(description="Also drop the installed packages")] = False,
        files: Annotated[bool, Field(description="Also empty the workspace")] = False,
    ) -> CallToolResult:
        """Replace the session's kernel by a fresh one; all variables are lost."""
        return await desk.reset(caller(ctx), session, packages=packages, files=files)

    @tool(annotations=READS)
    async def list_sessions(ctx: AnyContext) -> SessionList:
        """List your sessions: state, what runs and for how long, idle time, memory."""
        return desk.list_sessions(caller(ctx))

    @tool(annotations=DESTROYS)
    async def close_session(ctx: AnyContext, session: SessionArg = "") -> Closed:
        """End a session: its kernel, its variables and its files."""
        return await desk.close_session(caller(ctx), session)

    @tool(annotations=READS)
    async def list_variables(ctx: AnyContext, session: SessionArg = "") -> VariableList:
        """List the session's variables with type, shape or length, size and a short preview.

        Works while a cell is running.
        """
        return await desk.list_variables(caller(ctx), session)

    @tool(annotations=READS)
    async def list_files(
        ctx: AnyContext, session: SessionArg = "", path: PathArg = "."
    ) -> FileList:
        """List a folder of the session's workspace."""
        return await desk.list_files(caller(ctx), session, path)

    @tool(annotations=READS, structured_output=False)
    async def read_file(
        path: PathArg,
        ctx: AnyContext,
        session: SessionArg = "",
        offset: Annotated[int, Field(description="First line to return, from 0")] = 0,
        limit: Annotated[int, Field(description="Number of lines; 0 for as many as fit")] = 0,
    ) -> CallToolResult:
        """Read a file from the workspace: text by lines, images as images, other files as base64.

        `kernel://SESSION/cells/N` reads the whole output of cell N in the same way.
        """
        return await desk.read_file(caller(ctx), session, path, offset=offset, limit=limit)

    @tool(annotations=CHANGES)
    async def write_file(
        path: PathArg,
        content: Annotated[str, Field(description="The content, in the given encoding")],
        ctx: AnyContext,
        session: SessionArg = "",
        encoding: Annotated[str, Field(description="utf-8 or base64")] = "utf-8",
    ) -> Written:
        """Write a file into the workspace, where code finds it under the same path."""
        return await desk.write_file(caller(ctx), session, path, content, encoding)

    @tool(annotations=CHANGES, structured_output=False)
    async def export_notebook(
        ctx: AnyContext, session: SessionArg = "", path: PathArg = "notebook.ipynb"
    ) -> CallToolResult:
        """Save all cells with their outputs as a Jupyter notebook in the workspace."""
        return await desk.export_notebook(caller(ctx), session, path)

    @tool(annotations=READS)
    async def info(ctx: AnyContext, session: SessionArg = "") -> ServerInfo:
        """Describe the environment: Python, packages, allowed imports, sandbox and limits."""
        return await desk.info(caller(ctx), session)
