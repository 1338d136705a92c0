"""A first import in a process that is thrown away, so that a broken package touches no session."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import anyio

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import InstallError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.spawned import Spawned
from kernel_mcp.linux.folders import Identity
from kernel_mcp.output.terminal import clean
from kernel_mcp.sandbox.base import Sandbox, SandboxRequest

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
    """Import modules in a sandbox of their own; those that fail, with the reason.

    `paths` come before the environment on sys.path. `scratch` is a folder of the server's for the
    time being. Raises InstallError when the process takes too long.
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
            "limits": _limits(limits, own_process_count=guest.own_process_count),
            "tmp": guest.tmp,
        }
        python, program = str(environment.python), f"{guest.boot}/restricted/trial.py"
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
            with anyio.fail_after(TRIAL_S):
                ended = await process.wait()
        except TimeoutError:
            raise InstallError(
                f"Importing {', '.join(modules)} did not end within {TRIAL_S:g} s: nothing was "
                "installed, the session is as it was."
            ) from None
        finally:
            await process.aclose()
        return _failures(process.output, modules, ended.story("the Python process that tried it"))
    finally:
        sandbox.release(identity)


def _failures(output: str, modules: Sequence[str], ended: str) -> dict[str, str]:
    """From the last line that the process wrote; without one it died over the imports."""
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


def _limits(limits: Limits, *, own_process_count: bool) -> dict[str, int]:
    """As a kernel gets them at boot."""
    return {
        "memory_bytes": limits.memory_bytes,
        "pids": limits.pids if own_process_count else 0,
        "open_files": limits.open_files,
        "file_bytes": limits.disk_bytes,
    }
