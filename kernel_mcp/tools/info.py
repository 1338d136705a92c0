"""The answer of the tool `info`."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import anyio

from kernel_mcp import __version__
from kernel_mcp.attached.process import OUTSIDE
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.host_folders import NO_EFFECT
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.linux.gpu_load import gpu_load
from kernel_mcp.packages.result import all_versions
from kernel_mcp.policy import profile_in_words
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.words import duration
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools.models import LimitsModel, ServerInfo
from kernel_mcp.units import MIB

UNLIMITED = "no sandbox limits it: whatever the server's user may reach"


async def describe(
    services: ToolContext, session: Session, progress: ProgressCallback
) -> ServerInfo:
    """Return what `info` tells: the server and the session's kernel environment."""
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
        tools=session.tools.about,
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
        languages=[_words_of(each) for each in services.interpreters.values()],
        ignored_settings="\n".join([*refused, *factory.remarks]),
        problem=problem,
    )
    return _of_interpreter(described, session) if request.interpreter.name else described


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


def _words_of(interpreter: Interpreter) -> str:
    """Return the name of an interpreter, its language, and where it runs if outside the sandbox."""
    where = f", outside the sandbox at {interpreter.place}" if interpreter.place else ""
    return f"{interpreter.name}: {interpreter.language}{where}"


def _of_interpreter(info: ServerInfo, session: Session) -> ServerInfo:
    """Return `info` for a session whose kernel is not this server's own Python.

    Fields that would describe this server's own kernels are replaced or emptied.
    """
    kernel, interpreter = session.kernel, session.request.interpreter
    version = kernel.environment.version if kernel is not None else ""
    update = {
        "python": "",
        "interpreter": "",
        "uv_version": "",
        "environment": [
            f"{interpreter.language} {version}".rstrip() + ", a kernel that the operator has named"
        ],
        "packages": [],
        "packages_more": 0,
        "listed_by": [],
        "policy": "nothing is refused",
        "allowed_imports": ["*"],
        "problem": "",
    }
    if not interpreter.saves:
        update["kept"] = f"nothing: variables of {interpreter.language} are not saved"
    if interpreter.place:
        unlimited = {"memory_mb": 0, "cpu_s": 0.0, "cpus": 0.0, "processes": 0, "disk_mb": 0}
        update |= {
            "python": version,
            "environment": [f"{interpreter.place}: a kernel outside this server's sandbox"],
            "sandbox": "none",
            "sandbox_enforces": [],
            "sandbox_gaps": [OUTSIDE],
            "sandbox_found": [],
            "checkpoints": "none: the kernel is not this server's",
            "limits": info.limits.model_copy(update=unlimited),
            "workspace": "the folder of that kernel",
            "mounts": [],
            "network": UNLIMITED,
            "devices": [],
            "gpus": [],
            "variables": [],
        }
    return info.model_copy(update=update)
