"""Try the imports of new packages in a short-lived process, then in the session's live kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.config.settings import Limits
from kernel_mcp.environments.layer import Generation, versions
from kernel_mcp.errors import InstallError, KernelMcpError, LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.rundir import support_of
from kernel_mcp.launch.spawn import Spawned
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.proc import tree
from kernel_mcp.output.terminal import clean
from kernel_mcp.packages.result import InstallOutcome, Present, Verdicts, judge, principal
from kernel_mcp.sandbox.base import GuestPaths, Sandbox, SandboxRequest
from kernel_mcp.sessions.session import Session

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from kernel_mcp.kernels.kernel import Kernel


TRIAL_S = 60.0


async def try_imports(
    sandbox: Sandbox,
    environment: KernelEnvironment,
    *,
    paths: Sequence[Path],
    modules: Sequence[str],
    limits: Limits,
    scratch: Path,
) -> dict[str, str]:
    """Import modules in a separate sandbox; return those that fail, with the reason.

    `paths` come before the environment on sys.path. `scratch` is a temporary folder of the server.
    Raises InstallError when the process takes longer than `TRIAL_S`.
    """
    workspace, sockets = scratch / "workspace", scratch / "sockets"
    identity = sandbox.identity()
    try:
        for folder in (workspace, sockets):
            _make(folder, identity)
        guest = sandbox.guest_paths(workspace, sockets)
        request = {
            "paths": [str(path) for path in paths],
            "modules": list(modules),
            "support": support_of(environment),
            "limits": _limits(limits, guest),
            "tmp": guest.tmp,
        }
        python, program = str(environment.python), f"{guest.boot}/restricted/try_import.py"
        command = sandbox.command(
            SandboxRequest(
                argv=[python, "-I", "-B", program, json.dumps(request)],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": guest.workspace},
                workspace=workspace,
                sockets=sockets,
                readonly=[*environment.readonly, *paths],
                limits=limits,
            ),
            identity,
        )
        process = ConfinedProcess(Spawned(command))
        try:
            (first, *_) = process.pids
            await silence.await_patiently(process.ended, lambda: tree(first), TRIAL_S)
            if process.exit is None:
                raise InstallError(
                    f"Importing {', '.join(modules)} did not end within {TRIAL_S:g} s: nothing "
                    "was installed, the session is as it was."
                )
            ended = process.exit
        finally:
            await process.aclose()
        return _failures(process.output, modules, ended.story("the Python process that tried it"))
    finally:
        sandbox.release(identity)


def _failures(output: str, modules: Sequence[str], ended: str) -> dict[str, str]:
    """Return the failures that the last line of output reports.

    Without such a line all modules failed, with `ended` as the reason.
    """
    last = output.strip().rpartition("\n")[2]
    try:
        report = json.loads(last)
        found = {name: report[name] for name in modules}
    except (ValueError, KeyError, TypeError):
        return dict.fromkeys(modules, f"{ended}\n{last[-300:]}" if last else ended)
    return {name: clean(str(reason)) for name, reason in found.items() if reason is not None}


def _make(folder: Path, identity: Identity | None) -> None:
    folder.mkdir(mode=0o700)
    if identity is not None:
        os.chown(folder, identity.uid, identity.gid)


def _limits(limits: Limits, guest: GuestPaths) -> dict[str, int]:
    return {
        "memory_bytes": limits.memory_bytes,
        "pids": guest.process_limit(limits.pids),
        "open_files": limits.open_files,
        "file_bytes": limits.disk_bytes,
    }


VERIFY_S = 60.0
DEATH_S = 1.0
DETAIL_CHARS = 500


async def verify_live(
    session: Session,
    asked: Sequence[Requirement],
    *,
    present: Present,
    generation: Generation,
    confined: bool,
) -> InstallOutcome:
    """Allow the packages' modules in the session, import them in its kernel; return the outcome.

    `confined` is True if the installer ran in a sandbox.
    """
    names = {each.name for each in asked}
    brought = versions(generation.packages)
    modules = {**present.modules, **(generation.modules or {})}
    found = {**present.versions, **brought}
    listed = [*sorted(names & found.keys()), *sorted(brought.keys() - names)]
    principals = {name: principal(name, modules.get(name, ())) for name in listed}
    wanted = [module for name in listed for module in principals[name]]
    verdicts, trouble = await _import(session, generation, wanted)
    packages = tuple(
        judge(
            name,
            found[name],
            previous=present.versions.get(name, ""),
            asked=name in names,
            modules=principals[name],
            verdicts=verdicts,
        )
        for name in listed
    )
    return InstallOutcome(
        packages,
        unfit=tuple(sorted(names - found.keys())),
        permitted=generation.permitted,
        confined=confined,
        trouble=trouble,
    )


async def _import(
    session: Session, generation: Generation, modules: Sequence[str]
) -> tuple[Verdicts, str]:
    """Return the verdict on each module; if there is none, also the reason."""
    try:
        kernel = await session.ensure_kernel()
    except KernelMcpError as error:
        return {}, f"No kernel could be started: {error}"
    before = kernel.policy.modules
    present = chain.from_iterable((generation.modules or {}).values())
    kernel.policy = kernel.policy.with_modules(generation.permitted).with_installed(present)
    request = {"allow": sorted(kernel.policy.modules - before), "modules": list(modules)}
    try:
        reply = await kernel.ask("kernel_mcp_packages_request", request, timeout=VERIFY_S)
    except LaunchError:
        return {}, await _why_silent(session, kernel)
    return _verdicts(reply), ""


async def _why_silent(session: Session, kernel: Kernel) -> str:
    with anyio.move_on_after(DEATH_S):
        await kernel.dead.wait()
    if kernel.exit is not None:
        return (
            f"{kernel.exit.story('The kernel')} during the imports: all variables are lost, "
            "the packages are installed. The next cell gets a fresh kernel."
        )
    if session.queue.current is None:
        kernel.interrupt()
    return (
        f"The imports did not end within {VERIFY_S:g} s. The packages are installed; import them "
        "in a cell to see what happens."
    )


def _verdicts(reply: Mapping[str, Any]) -> Verdicts:
    """Return the well-formed entries of a reply."""
    modules = reply.get("modules")
    if not isinstance(modules, dict):
        return {}
    return {
        str(name): (
            str(verdict.get("state", "")),
            clean(str(verdict.get("detail", ""))[:DETAIL_CHARS]),
        )
        for name, verdict in modules.items()
        if isinstance(verdict, dict)
    }
