"""The self-test of a template: a fork is inspected before sessions get kernels from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, cast

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch.assembly import KernelAssembly, remove_folder
from kernel_mcp.launch.base import START_TIMEOUT_S, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.readiness import ReadinessChannel
from kernel_mcp.launch.template.forked import Forked
from kernel_mcp.launch.template.process import SelfTestResult, TemplateProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.self_test import Check, SelfTest, prepared_self_test

READY_S = START_TIMEOUT_S
"""Seconds until a cold start is tried instead.

A forked kernel is ready after some 20 ms. On a machine too busy for that, a cold start is no
faster.
"""


class ForkFromTemplate(Protocol):
    """Forks a process from a template into a sandbox of its own."""

    async def __call__(
        self,
        template: TemplateProcess,
        request: LaunchRequest,
        folder: Path,
        identity: Identity | None,
        inherited: tuple[int, int],
        task: Mapping[str, Any] | None = None,
    ) -> ConfinedProcess:
        """Return the process: a kernel, or with `task` a process that runs the self-test.

        Raises TemplateError, OSError.
        """


class TemplateSelfTest:
    """Runs the self-tests of templates; kernels must not see `folders`, which templates see."""

    def __init__(
        self,
        assembly: KernelAssembly,
        fork: ForkFromTemplate,
        folders: Sequence[str],
        mounted: Sequence[Path] = (),
    ) -> None:
        """`mounted` are the mounts of the host that kernels see."""
        self._assembly = assembly
        self._fork = fork
        self._folders = folders
        self._mounted = mounted

    async def passed(
        self, template: TemplateProcess, environment: KernelEnvironment
    ) -> SelfTestResult:
        """Run the self-test in a fork of `template`, once per stage; return the result.

        It takes some 50 ms.

        Raises BoundaryBroken for a violation, LaunchError, OSError.
        """
        result = template.self_test
        while result.stage != template.stage and template.usable:
            async with result.lock:
                if result.stage != template.stage:
                    await self._run(template, environment)
        return result

    async def _run(self, template: TemplateProcess, environment: KernelEnvironment) -> None:
        limits, sandbox = Limits(), self._assembly.sandbox
        async with AsyncExitStack() as undo:
            visible = (*environment.readonly, *self._mounted)
            probe = undo.enter_context(prepared_self_test(visible, calls=True, limits=limits))
            identity = sandbox.identity()
            undo.callback(sandbox.release, identity)
            folder = self._assembly.runs.fresh()
            undo.push_async_callback(remove_folder, folder)
            workspace = folder / "w"
            workspace.mkdir(mode=0o700)
            if identity is not None:
                for path in (workspace, folder):
                    os.chown(path, identity.uid, identity.gid)
            channel = ReadinessChannel()
            undo.callback(channel.close)
            shown = sandbox.guest_paths(workspace, folder)
            hidden = [*probe.task["hidden"], *self._folders]
            process = await self._fork(
                template,
                LaunchRequest("", environment, Policy.for_allow(()), limits, workspace),
                folder,
                identity,
                (channel.pass_guest(), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)),
                task={**probe.task, "hidden": hidden, "workspace": shown.workspace},
            )
            undo.push_async_callback(process.aclose)
            await process.ready(channel, READY_S)
            namespaces = self._assembly.inspector.lineage(process.pid)
            self._assembly.inspector.inspect(
                process.pid,
                process.pidfd,
                identity,
                forked=True,
                others=namespaces,
                opened=self._assembly.mounts.writable,
            ).forget()
            checks = _required(probe, channel.message, sandbox.report().unpromised)
            template.self_test.note(cast(Forked, process.start).stage, checks, namespaces)


def _required(
    probe: SelfTest, message: Mapping[str, Any], excused: frozenset[str]
) -> Sequence[Check]:
    """Return the checks of a self-test.

    Raises BoundaryBroken if one fails that is not `excused`.
    """
    try:
        checks = probe.checks(message["facts"])
    except (KeyError, TypeError, ValueError) as malformed:
        raise BoundaryBroken(
            f"the trial of a template told nonsense instead of facts: {malformed!r}"
        ) from None
    failed = [check for check in checks if not check.passed and check.name not in excused]
    if failed:
        found = "; ".join(f"{check.name}: {check.found}" for check in failed)
        raise BoundaryBroken(f"what it forks is not confined: {found}")
    return checks
