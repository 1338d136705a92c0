"""The tools for sessions as a whole: create_session, list, close, list_variables, info."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp.attached.interpreter import attached
from kernel_mcp.attached.targets import target_of
from kernel_mcp.config.settings import Limits
from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import InputError
from kernel_mcp.identity import INSTALL
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.output.text import one_line
from kernel_mcp.packages.requirements import Needs
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.introspection import variables_of
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import (
    AnyContext,
    CpuArg,
    LimitArg,
    MemoryArg,
    NetworkArg,
    PackagesArg,
    PythonArg,
    SessionArg,
    Toolbox,
    ToolsArg,
    progress_of,
)
from kernel_mcp.tools.hints import ENDS, OPENS, READS
from kernel_mcp.tools.info import describe
from kernel_mcp.tools.models import (
    Closed,
    ServerInfo,
    SessionHandle,
    SessionList,
    SessionState,
    Variable,
    VariableList,
)
from kernel_mcp.tools.own_limits import own_limits, own_network, own_timeout, own_tools, own_words
from kernel_mcp.tools.results import late_output, names_of, notice_text, with_pending
from kernel_mcp.tools.tables import FirstArg, MatchArg, fitting, matches, more, table_answer
from kernel_mcp.units import MIB

FIRST_LINE_CHARS = 80
NO_VARIABLES = "No variables have been defined in this session."
ATTACHED = (
    "It runs in an external kernel, outside the sandbox, with the rights of that kernel's user, "
    "and shares its variables. Of this server's limits only the time of a cell holds: the cell is "
    "interrupted, the kernel never killed. Checkpoints, undo, branch, reset, install and "
    "write_file are not available, its files are those of that kernel's folder, and the next "
    "server does not know it. close_session leaves the kernel and its variables as they are."
)
NOT_WITH_ATTACH = (
    "attach: a kernel that is there already has its packages, its language and its limits. Pass "
    "nothing but `name` and `timeout` with it."
)
NOT_ELSEWHERE = (
    "memory, cpu, network: this server limits nothing at {}, where the code runs; leave them out."
)
NOT_WITH_LANGUAGE = (
    "language: packages, python and tools are for sessions of Python alone; leave them out."
)
NOT_KEPT = "language: sessions of {} are not kept; leave fresh and resume out."
PYTHON_NAMES = ("", "python", "python3", "py", "ipython")
HEAD_START_S = 0.002
"""Grace period in seconds before `create_session` answers: a pooled kernel is usually ready by
then, and a fork is under way."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool, settings, manager = box.tool, services.settings, services.manager

    @tool(OPENS, "Open a session")
    async def create_session(
        ctx: AnyContext,
        name: str = "",
        packages: PackagesArg = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
        python: PythonArg = "",
        memory: MemoryArg = None,
        cpu: CpuArg = None,
        timeout: LimitArg = None,
        network: NetworkArg = None,
        tools: ToolsArg = None,
        fresh: Annotated[bool, Field(description="Forget its kept state")] = False,
        resume: Annotated[bool, Field(description="Bring that back all the same")] = False,
        attach: Annotated[str, Field(description="A person's kernel: connection file or URL")] = "",
        language: str = "",
    ) -> Annotated[CallToolResult, SessionHandle]:
        """Open a further session with its own kernel and files; ordinary work needs none.

        Packages, limits and language as for run_script.
        """
        report, scripts = progress_of(ctx) or silence, services.scripts
        if attach:
            if any((packages, python, memory, cpu, network, tools, fresh, resume, language)):
                raise InputError(NOT_WITH_ATTACH)
            target_of(attach, settings.attach)
            joined = attached(attach)
            limit_s = own_timeout(settings, timeout)
            return await _with_kernel(services, box.caller(ctx), name, joined, report, limit_s)
        limits, limit_s = own_limits(services, memory, cpu), own_timeout(settings, timeout)
        reached, called = own_network(services, network), own_tools(settings, tools)
        if (other := interpreter_named(services, language)) is not PYTHON:
            if packages or python or tools:
                raise InputError(NOT_WITH_LANGUAGE)
            if (fresh or resume) and not other.saves:
                raise InputError(NOT_KEPT.format(other.language))
            if other.place and any((memory, cpu, network)):
                raise InputError(NOT_ELSEWHERE.format(other.place))
            return await _with_kernel(
                services,
                box.caller(ctx),
                name,
                other,
                report,
                limit_s,
                limits,
                reached,
                fresh=fresh,
                resume=resume,
            )
        needs = Needs(scripts.packages(packages), await scripts.python(python, report))
        opened = await open_session(
            services,
            box.caller(ctx),
            name,
            needs,
            report,
            limits=limits,
            timeout_s=limit_s,
            network=reached,
            tools=called,
            fresh=fresh,
            resume=resume,
        )
        if services.factory.prepared(opened.request):
            opened.scheduler.begin()
            with anyio.move_on_after(HEAD_START_S):
                await opened.scheduler.begun.wait()
        if name and not opened.name:
            note = "This is your default session: leave `session` empty."
        else:
            which = "handle or the name" if opened.name else "handle"
            note = f"Pass the {which} as `session`: it has its own kernel, variables and workspace."
            if settings.workspace is not None:
                kept = f"a later session named {opened.name!r} has them again"
                note += f" Its files are kept: {kept}."
        note += own_words(limits, limit_s)
        if reached is not None:
            note += f" Network: {services.assembly.network.rules_for(reached)}."
        result = SessionHandle(session=opened.handle, name=opened.name, note=note)
        # every answer tells those of the default session; others are told with the first cell, too
        pending = opened.notifications.pending if opened.name or not name else ()
        return with_pending(result, opened, pending)

    @tool(READS, "List sessions")
    async def list_sessions(ctx: AnyContext) -> SessionList:
        """List your sessions: state, running cell, idle time, memory."""
        caller, now = box.caller(ctx), services.shared.clock()
        sessions = manager.directory.owned_by(caller.principal)
        states = [_state(session, now) for session in sessions]
        for session in sessions:
            caller.response.attach(session.notifications, session.notifications.pending)
        return SessionList(sessions=states, limit=manager.admission.most_sessions(caller.principal))

    @tool(ENDS, "Close a session")
    async def close_session(
        ctx: AnyContext, session: SessionArg = ""
    ) -> Annotated[CallToolResult, Closed]:
        """End a session: its kernel, variables and files."""
        caller, found = await box.resolve(ctx, session)
        pending = found.notifications.pending  # before the end itself is one of them
        shared = len(found.family.members) > 1
        late = await late_output(found, caller.response, settings.max_output)
        await manager.close(found)
        caller.response.receipt.then(  # which may outlive the session
            partial(manager.tombstones.mark_delivered, found.handle),
            partial(manager.tombstones.mark_undelivered, found.handle),
        )
        files, start = "its files were removed", found.workspace.start
        if settings.workspace or shared:
            files = f"its files were kept{' for the branches beside it' if shared else ''}"
        elif start:
            files = f"what was in {found.workspace.path} was removed; files in {start} stay"
        note = f"The session is closed; its variables are gone and {files}."
        if found.request.interpreter.external:
            note = (
                "The session is closed; the kernel that it had joined goes on with its variables."
            )
        closed = with_pending(Closed(session=found.handle, note=note), found, pending)
        return closed.model_copy(update={"content": [*closed.content, *late]})

    @tool(READS, "List variables")
    async def list_variables(
        ctx: AnyContext, session: SessionArg = "", match: MatchArg = "", offset: FirstArg = 0
    ) -> Annotated[CallToolResult, VariableList]:
        """List variables with type, shape, size and preview, also while a cell runs."""
        if offset < 0:
            raise InputError(f"offset={offset} is not usable: variables count from 0.")
        caller, found = await box.resolve(ctx, session)
        found.request.interpreter.require("list_variables")
        reply = await variables_of(found, match, offset)
        saved = found.kernel_state.pending_restore
        known = [Variable.model_validate(item) for item in reply["variables"]]
        known = [each for each in known if matches(each.name, match)]
        known = known[max(0, offset - reply["offset"]) :]
        variables = fitting(known, _row_of, settings.max_output)
        omitted = reply["omitted"] + len(known) - len(variables)
        note = more(omitted, offset, len(variables))
        if not variables and not offset:
            note = f"No variable is named like {match!r}." if match else NO_VARIABLES
        if saved is not None:
            note = f"{note} {saved.remark()}".lstrip()
        if (again := found.notifications.last_loss) is not None:
            caller.response.attach(found.notifications, [again])
            note = f"{note} Told before: {again.text}".lstrip()
        listed = VariableList(session=found.handle, variables=variables, omitted=omitted, note=note)
        return table_answer([_row_of(each) for each in variables], listed, note)

    @tool(READS, "Describe the environment")
    async def info(ctx: AnyContext, session: SessionArg = "") -> ServerInfo:
        """Describe Python, packages, allowed imports, sandbox and limits."""
        _, found = await box.resolve(ctx, session)
        return await describe(services, found, progress_of(ctx) or silence)


def _row_of(variable: Variable) -> str:
    """Return a line about a variable: name, type, shape or length, size, preview."""
    shape = ", ".join(map(str, variable.shape or ()))
    length = f"{variable.length:,} long" if variable.length is not None and not shape else ""
    size = f"{variable.size:,} bytes" if variable.size is not None else ""
    words = (
        variable.name,
        variable.type,
        f"({shape})" if shape else "",
        length,
        size,
        one_line(variable.preview),
    )
    return "  ".join(filter(None, words))


_NO_OTHERS = (
    " The operator adds others by --kernel NAME=SPEC. Over HTTP a principal has those of its row "
    "(kernel:NAME)."
)


def interpreter_named(services: ToolContext, language: str) -> Interpreter:
    """Return the interpreter of a language. Raises InputError for one that is not there."""
    name = language.strip().lower()
    if name in PYTHON_NAMES:
        return PYTHON
    found = services.interpreters.get(name)
    if found is None:
        known = ["python", *services.interpreters]
        more = "" if services.interpreters else _NO_OTHERS
        raise InputError(
            f"language: {one_line(language)[:40]!r} is not one of {', '.join(known)}.{more}"
        )
    return found


async def _with_kernel(
    services: ToolContext,
    caller: Caller,
    name: str,
    interpreter: Interpreter,
    report: ProgressCallback,
    limit_s: float,
    limits: Limits | None = None,
    network: tuple[str, ...] | None = None,
    *,
    fresh: bool = False,
    resume: bool = False,
) -> CallToolResult:
    """Open a session with another kernel than this server's own, and return the answer."""
    opened = await open_with_kernel(
        services,
        caller,
        name,
        interpreter,
        report,
        limit_s,
        limits,
        network,
        fresh=fresh,
        resume=resume,
    )
    which = "handle or the name" if opened.name else "handle"
    about = ATTACHED
    if not interpreter.external:
        where = f" at {interpreter.place}, outside the sandbox" if interpreter.place else ""
        lacking = ", ".join(interpreter.lacking)
        about = f"It runs {_language(opened)}{where}. Not available: {lacking}."
        if not interpreter.saves:
            about += " It is neither hibernated nor kept for the next server."
    note = f"Pass the {which} as `session`. {about}{own_words(limits, limit_s)}"
    return with_pending(
        SessionHandle(session=opened.handle, name=opened.name, note=note), opened, ()
    )


async def open_with_kernel(
    services: ToolContext,
    caller: Caller,
    name: str,
    interpreter: Interpreter,
    report: ProgressCallback,
    timeout_s: float,
    limits: Limits | None = None,
    network: tuple[str, ...] | None = None,
    *,
    fresh: bool = False,
    resume: bool = False,
) -> Session:
    """Open a session with another kernel than this server's own.

    `fresh` and `resume` are those of `SessionManager.create`. The session is closed if that kernel
    cannot be started or joined. Raises KernelMcpError.
    """
    manager = services.manager
    opened = await manager.create(
        caller,
        name=name,
        timeout_s=timeout_s,
        limits=limits,
        network=network,
        interpreter=interpreter,
        fresh=fresh,
        resume=resume,
    )
    try:
        await opened.open_kernel(report)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await manager.close(opened)
            manager.tombstones.mark_delivered(opened.handle)
        raise
    return opened


async def open_session(
    services: ToolContext,
    caller: Caller,
    name: str,
    needs: Needs,
    report: ProgressCallback,
    *,
    limits: Limits | None,
    timeout_s: float,
    network: tuple[str, ...] | None = None,
    tools: tuple[str, ...] | None = None,
    fresh: bool = False,
    resume: bool = False,
) -> Session:
    """Open a session and build its environment; the session is closed if that fails.

    Raises EnvironmentBuildError, Forbidden, and the errors of `SessionManager.create`.
    """
    if needs.packages:
        caller.who.require(INSTALL, "A session with further packages")
    session = await services.manager.create(
        caller,
        name=name,
        packages=needs.packages,
        python=needs.python,
        limits=limits,
        timeout_s=timeout_s,
        network=network,
        tools=tools,
        fresh=fresh,
        resume=resume,
    )
    if not session.request.at_home:
        try:
            await services.factory.environment(session.request, report)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await services.manager.close(session)
            raise
    return session


def _state(session: Session, now: float) -> SessionState:
    """Return a row of `list_sessions`; `now` is the present time by the session's clock."""
    current, kernel, interpreter = (
        session.queue.current,
        session.kernel,
        session.request.interpreter,
    )
    python = interpreter.language == PYTHON.language
    usage = kernel.handle.usage() if kernel is not None else None
    running_s = None
    if current is not None and current.started is not None:
        running_s = round(now - current.started, 3)
    return SessionState(
        session=session.handle,
        name=session.name,
        state=session.state,
        age_s=round(now - session.created, 3),
        idle_s=0.0 if session.state == "busy" else round(now - session.family.last_used, 3),
        memory_mb=round(usage.memory_bytes / MIB, 1) if usage else 0.0,
        python=kernel.environment.version if kernel is not None and python else "",
        language=None if python else _language(session),
        cells=len(session.cells),
        queued=len(session.queue),
        branch_of=session.origin.handle if session.origin is not None else "",
        running_cell=current.number if current is not None else None,
        running_s=running_s,
        last_cell=_last_cell(session),
        notices=[notice_text(each.text) for each in session.notifications.pending],
        lost=names_of(each.loss for each in session.notifications.pending if each.loss is not None),
    )


def _language(session: Session) -> str:
    """Return the language of a session, with its version while the kernel runs."""
    version = session.kernel.environment.version if session.kernel is not None else ""
    return f"{session.request.interpreter.language} {version}".rstrip()


def _last_cell(session: Session) -> str:
    if not session.cells:
        return ""
    cell = session.cells[-1]
    line = cell.code.strip().splitlines()[0]
    shown = line if len(line) <= FIRST_LINE_CHARS else line[: FIRST_LINE_CHARS - 1] + "…"
    return f"{cell.number} [{cell.status.value}] {shown}"
