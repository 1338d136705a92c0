"""Try what a template forks, once, before any session gets a kernel of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch import local
from kernel_mcp.launch.base import KernelEnvironment, KernelRequest
from kernel_mcp.launch.inspector import Inspector
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.readiness import ReadinessChannel
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template_kernel import READY_S
from kernel_mcp.launch.template_process import Proof, TemplateProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.probe import Check, Probe, probing


class Start(Protocol):
    """Has a template fork a process into a sandbox of its own."""

    async def __call__(
        self,
        template: TemplateProcess,
        request: KernelRequest,
        folder: Path,
        identity: Identity | None,
        inherited: tuple[int, int],
        trial: Mapping[str, Any] | None = None,
    ) -> ConfinedProcess:
        """With `trial` it tries that instead of being a kernel. Raises TemplateError, OSError."""


class Prover:
    """Forks the processes that try templates."""

    def __init__(
        self,
        sandbox: Sandbox,
        runs: RunDirectory,
        inspector: Inspector,
        start: Start,
        folders: Sequence[str],
    ) -> None:
        """`folders` are where templates may see what no kernel may."""
        self._folders = folders
        self._sandbox = sandbox
        self._runs = runs
        self._inspector = inspector
        self._start = start

    async def proven(self, template: TemplateProcess, environment: KernelEnvironment) -> Proof:
        """That processes which `template` forks are confined; tried the first time, some 50 ms.

        Raises BoundaryBroken for what does not hold, LaunchError, OSError.
        """
        if not template.proof.tried:
            async with template.proof.lock:
                if not template.proof.tried:
                    await self._try(template, environment)
        return template.proof

    async def _try(self, template: TemplateProcess, environment: KernelEnvironment) -> None:
        """Fork a process that tries what kernels must not be able to do, and look at it."""
        limits = Limits()
        async with AsyncExitStack() as undo:
            probe = undo.enter_context(probing(environment.readonly, calls=True, limits=limits))
            identity = self._sandbox.identity()
            undo.callback(self._sandbox.release, identity)
            folder = self._runs.fresh()
            undo.push_async_callback(local.remove_folder, folder)
            workspace = folder / "w"
            workspace.mkdir(mode=0o700)
            if identity is not None:
                for path in (workspace, folder):
                    os.chown(path, identity.uid, identity.gid)
            channel = ReadinessChannel()
            undo.callback(channel.close)
            shown = self._sandbox.guest_paths(workspace, folder)
            hidden = [*probe.task["hidden"], *self._folders]
            process = await self._start(
                template,
                KernelRequest("", environment, Policy.for_allow(()), limits, workspace),
                folder,
                identity,
                (channel.guest_fd, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)),
                trial={**probe.task, "hidden": hidden, "workspace": shown.workspace},
            )
            undo.push_async_callback(process.aclose)
            await process.ready(channel, READY_S)
            namespaces = self._inspector.lineage(process.pid)
            self._inspector.inspect(
                process.pid, process.pidfd, identity, forked=True, others=namespaces
            ).forget()
            checks = _required(probe, channel.said, self._sandbox.report().unpromised)
            template.proof.take(checks, namespaces)


def _required(probe: Probe, said: Mapping[str, Any], excused: frozenset[str]) -> Sequence[Check]:
    """The checks of a process that has tried everything and said what came of it.

    Raises BoundaryBroken for what does not hold.
    """
    try:
        checks = probe.checks(said["facts"])
    except (KeyError, TypeError, ValueError) as nonsense:
        raise BoundaryBroken(
            f"the trial of a template told nonsense instead of facts: {nonsense!r}"
        ) from None
    failed = [check for check in checks if not check.passed and check.name not in excused]
    if failed:
        told = "; ".join(f"{check.name}: {check.found}" for check in failed)
        raise BoundaryBroken(f"what it forks is not confined: {told}")
    return checks
