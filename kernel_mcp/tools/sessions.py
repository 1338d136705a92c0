"""The tools for sessions as a whole: create_session, list, close, list_variables, info."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import anyio
from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp import __version__
from kernel_mcp.attached.process import OUTSIDE
from kernel_mcp.attached.targets import target_of
from kernel_mcp.config.settings import Limits
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import EnvironmentBuildError, InputError
from kernel_mcp.host_folders import NO_EFFECT
from kernel_mcp.identity import INSTALL
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.linux.gpu_load import gpu_load
from kernel_mcp.output.text import one_line
from kernel_mcp.packages.requirements import Needs
from kernel_mcp.packages.result import all_versions
from kernel_mcp.policy import profile_in_words
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.introspection import variables_of
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.words import duration
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
    progress_of,
)
from kernel_mcp.tools.hints import ENDS, OPENS, READS
from kernel_mcp.tools.models import (
    Closed,
    LimitsModel,
    ServerInfo,
    SessionHandle,
    SessionList,
    SessionState,
    Variable,
    VariableList,
)
from kernel_mcp.tools.own_limits import own_limits, own_network, own_timeout, own_words
from kernel_mcp.tools.results import late_output, names_of, notice_text, with_pending
from kernel_mcp.tools.tables import FirstArg, MatchArg, fitting, matches, more, table_answer
from kernel_mcp.units import MIB

FIRST_LINE_CHARS = 80
NO_VARIABLES = "No variables have been defined in this session."
UNLIMITED = "no sandbox limits it: whatever the server's user may reach"
ATTACHED = (
    "It runs in an external kernel, outside the sandbox, with the rights of that kernel's user, "
    "and shares its variables. Of this server's limits only the time of a cell holds: the cell is "
    "interrupted, the kernel never killed. Checkpoints, undo, branch, reset, install and "
    "write_file are not available, its files are those of that kernel's folder, and the next "
    "server does not know it. close_session leaves the kernel and its variables as they are."
)
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
        fresh: Annotated[bool, Field(description="Forget its kept state")] = False,
        resume: Annotated[bool, Field(description="Bring that back all the same")] = False,
        attach: Annotated[str, Field(description="A person's kernel: connection file or URL")] = "",
    ) -> Annotated[CallToolResult, SessionHandle]:
        """Open a further session with its own kernel and files; ordinary work needs none.

        Packages and limits as for run_script.
        """
        report, scripts = progress_of(ctx) or silence, services.scripts
        if attach:
            no_use = (packages, python, memory, cpu, network, fresh, resume)
            return await _attached(services, box.caller(ctx), name, attach, timeout, no_use, report)
        limits, limit_s = own_limits(services, memory, cpu), own_timeout(settings, timeout)
        reached = own_network(services, network)
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
        if found.request.attach:
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
        reply = await variables_of(found, match, offset)
        saved = found.kernel_state.pending_restore
        known = [Variable.model_validate(item) for item in reply["variables"]]
        known = [each for each in known if matches(each.name, match)]
        if saved is not None or found.request.attach:
            known = known[offset:]
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
        return await _info(services, found, progress_of(ctx) or silence)


def _row_of(variable: Variable) -> str:
    """Return a line about a variable: name, type, shape or length, size, preview."""
    shape = f"({', '.join(map(str, variable.shape))})" if variable.shape else ""
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


async def _attached(
    services: ToolContext,
    caller: Caller,
    name: str,
    attach: str,
    timeout: float | None,
    no_use: Sequence[object],
    report: ProgressCallback,
) -> CallToolResult:
    """Open a session attached to an external kernel, and return the answer.

    Raises InputError if one of `no_use` is given: they do not go with `attach`.
    """
    settings, manager = services.settings, services.manager
    if any(no_use):
        raise InputError(
            "attach: a kernel that is there already has its packages, its Python and its limits. "
            "Pass nothing but `name` and `timeout` with it."
        )
    limit_s = own_timeout(settings, timeout)
    target_of(attach, settings.attach)
    opened = await manager.create(caller, name=name, timeout_s=limit_s, attach=attach)
    try:
        await opened.attach(report)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await manager.close(opened)
            manager.tombstones.mark_delivered(opened.handle)
        raise
    which = "handle or the name" if opened.name else "handle"
    note = f"Pass the {which} as `session`. {ATTACHED}{own_words(None, limit_s)}"
    return with_pending(
        SessionHandle(session=opened.handle, name=opened.name, note=note), opened, ()
    )


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
    current, kernel = session.queue.current, session.kernel
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
        python=kernel.environment.version if kernel is not None else "",
        cells=len(session.cells),
        queued=len(session.queue),
        branch_of=session.origin.handle if session.origin is not None else "",
        running_cell=current.number if current is not None else None,
        running_s=running_s,
        last_cell=_last_cell(session),
        notices=[notice_text(each.text) for each in session.notifications.pending],
        lost=names_of(each.loss for each in session.notifications.pending if each.loss is not None),
    )


def _last_cell(session: Session) -> str:
    if not session.cells:
        return ""
    cell = session.cells[-1]
    line = cell.code.strip().splitlines()[0]
    shown = line if len(line) <= FIRST_LINE_CHARS else line[: FIRST_LINE_CHARS - 1] + "…"
    return f"{cell.number} [{cell.status.value}] {shown}"


async def _info(services: ToolContext, session: Session, progress: ProgressCallback) -> ServerInfo:
    factory, assembly, settings = services.factory, services.assembly, services.settings
    request, limits = session.request, session.request.limits or settings.limits
    report, mounts = assembly.report(limits), assembly.mounts
    found = list(session.kernel.handle.report.boundary) if session.kernel is not None else []
    python, interpreter, problem = factory.spec(request).python or platform.python_version(), "", ""
    packages: dict[str, str] = {}
    own: list[str] = []
    policy = factory.policy(request)
    try:
        environment, policy = await factory.environment(request, progress)
    except EnvironmentBuildError as error:
        problem = str(error)
    else:
        python, interpreter = environment.version, str(environment.python)
        packages = await anyio.to_thread.run_sync(all_versions, environment, request.layer)
        own = factory.about(environment)
        if refusal := factory.refusal(environment):
            found.append(f"kernels are not forked, as their template was refused: {refusal}")
    listed = bool(own or factory.origins)
    asked = list(packages) if listed else _asked_for(services, request, packages)
    refused = [str(each) for each in (settings.ignored_keys, settings.unmounted) if each]
    described = ServerInfo(
        session=session.handle,
        server_version=__version__,
        python=python,
        interpreter=interpreter,
        uv_version=await factory.uv_version(),
        platform=f"{platform.system()} {platform.machine()}",
        environment=own,
        packages=[f"{name}=={packages[name]}" for name in asked],
        packages_more=len(packages) - len(asked),
        listed_by=list(factory.origins),
        policy=profile_in_words(settings, report.backend),
        allowed_imports=["*"] if policy.allow_all else sorted(policy.modules),
        sandbox=report.backend,
        sandbox_enforces=list(report.enforced),
        mounts=mounts.words or ([NO_EFFECT] if settings.mounts else []),
        network=assembly.network.words(request.network) if settings.confined else UNLIMITED,
        devices=list(map(str, mounts.devices)),
        gpus=await gpu_load() if any(each.names_threads for each in mounts.devices) else [],
        variables=[str(each) for each in settings.variables],
        sandbox_gaps=list(report.gaps),
        sandbox_found=found,
        checkpoints=session.kernel_state.checkpoints.words(session.kernel),
        audit_log=services.shared.events.audit_state,
        kept=services.persistence_summary + _saving(session),
        limits=LimitsModel(
            memory_mb=limits.memory_bytes // MIB,
            cpu_s=limits.cpu_seconds,
            cpus=limits.cpus,
            processes=limits.pids,
            disk_mb=limits.disk_bytes // MIB,
            cell_timeout_s=session.timeout_s,
            max_cell_timeout_s=settings.max_timeout_s,
            output_chars=settings.max_output,
            max_sessions=services.manager.admission.most_sessions(session.owner),
            idle_timeout_s=settings.idle_timeout_s,
        ),
        workspace=assembly.sandbox.guest_paths(request.workspace, request.workspace).workspace,
        attach=[str(each) for each in settings.attach],
        ignored_settings="\n".join([*refused, *factory.remarks]),
        problem=problem,
    )
    return _of_attached(described, session) if request.attach else described


def _asked_for(
    services: ToolContext, request: KernelRequest, packages: Mapping[str, str]
) -> list[str]:
    """Return the packages that somebody asked for: the operator, the session, or `install`."""
    spec = services.factory.spec(request)
    wanted = {_folded(each.name) for each in spec.packages}
    if request.layer is not None:
        wanted |= set(map(_folded, Layer(request.layer).packages()))
    return [name for name in packages if _folded(name) in wanted]


def _folded(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


def _saving(session: Session) -> str:
    """Return what `info` adds on the persistence of one session; empty when all is well."""
    if session.persistence.trouble:
        return f"; not saved now: {session.persistence.trouble}"
    if every := session.persistence.saved_every_s:
        return f"; for its size, this one every {duration(every)} at most while cells run"
    return ""


def _of_attached(info: ServerInfo, session: Session) -> ServerInfo:
    """Return `info` for a session that is attached to an external kernel.

    Fields that would describe this server's own kernels are replaced or emptied.
    """
    kernel = session.kernel
    unlimited = {"memory_mb": 0, "cpu_s": 0.0, "cpus": 0.0, "processes": 0, "disk_mb": 0}
    return info.model_copy(
        update={
            "python": kernel.environment.version if kernel is not None else "",
            "interpreter": "",
            "environment": [f"{session.request.attach}: a kernel that this server did not start"],
            "packages": [],
            "listed_by": [],
            "policy": "nothing is refused",
            "allowed_imports": ["*"],
            "sandbox": "none",
            "sandbox_enforces": [],
            "sandbox_gaps": [OUTSIDE],
            "sandbox_found": [],
            "kept": "nothing: the kernel and its variables are not this server's",
            "checkpoints": "none: the kernel is not this server's",
            "limits": info.limits.model_copy(update=unlimited),
            "workspace": "the folder of that kernel",
            "mounts": [],
            "network": UNLIMITED,
            "devices": [],
            "gpus": [],
            "variables": [],
            "problem": "",
        }
    )
