"""The session that runs a notebook: one with a kernel of its language.

The language and the kernel that a notebook names choose among the kernels that the operator has
named, and never a program.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import anyio

from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import NotebookError, WorkspaceError
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.notebooks.document import NotebookDocument
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, Toolbox, progress_of
from kernel_mcp.tools.sessions import open_with_kernel


async def resolve(
    box: Toolbox, services: ToolContext, ctx: AnyContext, session: str, path: str
) -> tuple[Caller, Session]:
    """Return the caller, and the session that runs the notebook at `path`.

    An empty `session` stands for the default one; for a notebook in the language of another kernel
    that the operator has named, for the caller's session with that, which is opened if missing.
    Raises NotebookError if no session can run it.
    """
    caller, found = await box.resolve(ctx, session)
    document = await anyio.to_thread.run_sync(_present, found, path)
    if document is None or document.is_of(found.cells.notebook):
        return caller, found
    language = document.language
    fits = [each for each in services.interpreters.values() if document.is_of(each.notebook)]
    own = services.manager.directory.owned_by(caller.principal)
    there = [each for each in own if each.state != "closed" and document.is_of(each.cells.notebook)]
    fits.sort(key=lambda each: each.notebook["kernelspec"]["name"] != document.kernel)
    if not session and (fits or there):
        return caller, await _other(services, caller, there, fits, path, progress_of(ctx))
    if there:
        step = f"Pass session={there[0].name or there[0].handle!r}, which runs {language}"
    elif fits:
        step = f"Pass a session of create_session(language={fits[0].name!r})"
    elif document.is_of(PYTHON.notebook):
        step = "Leave `session` empty for a session of Python"
    else:
        step = f"A server started with --kernel NAME=SPEC, for a kernel of {language}, runs it"
    raise NotebookError(f"{found.notebooks.book(path).refusal(document)} {step}.")


def _present(session: Session, path: str) -> NotebookDocument | None:
    """Return the notebook at a path; None for an empty path, or if there is no such file."""
    try:
        return session.notebooks.book(path).read() if path else None
    except WorkspaceError as missing:
        if missing.code != errno.ENOENT:
            raise
        return None


async def _other(
    services: ToolContext,
    caller: Caller,
    there: Sequence[Session],
    fits: Sequence[Interpreter],
    path: str,
    report: ProgressCallback | None,
) -> Session:
    """Return the session with another kernel that runs a notebook of the default session's.

    Raises NotebookError if its file is not there, as sessions have a workspace of their own.
    """
    if there:
        found = there[0]
    else:
        name = fits[0].name
        taken = services.manager.directory.named(caller, name) is not None
        found = await open_with_kernel(
            services, caller, name * (not taken), fits[0], report or silence, 0.0
        )
    named = found.name or found.handle
    runs = f"session {named!r}, which runs {found.request.interpreter.language}"
    if await anyio.to_thread.run_sync(_present, found, path) is None:
        raise NotebookError(
            f"Nothing was run: {path!r} lies in the workspace of another session than that which "
            f"can run it, {runs}. Write it there with write_file(session={named!r}), and pass that "
            "`session`."
        )
    caller.response.remarks.append(f"This was {runs}: pass that `session` to go on with it")
    return found
