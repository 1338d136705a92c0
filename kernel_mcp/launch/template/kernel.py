"""Fork kernels from a template; the first one is examined before a session gets any."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import BoundaryBroken, LaunchError
from kernel_mcp.launch import cold
from kernel_mcp.launch.base import START_TIMEOUT_S, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.process import ConfinedProcess, OnEnd
from kernel_mcp.launch.readiness import (
    NOTHING,
    Inspector,
    Opens,
    ReadinessChannel,
    StderrTail,
)
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template.process import Fork, Proof, TemplateProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.proc import WatchedProcess, pid_of
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.probe import Check, Probe, probing

READY_S = START_TIMEOUT_S
"""Seconds until a cold start is tried instead. A forked kernel is ready after some 20 ms; on a
machine too busy for that, a cold start is no faster."""
STATUS_S = 1.0
"""Seconds after a kernel's end that its exit status may take."""


class Forked:
    """A kernel and its sandbox's init, process 1, with whose end all others end."""

    wrapped = False

    def __init__(self, fork: Fork, tail: StderrTail) -> None:
        self._loop = asyncio.get_running_loop()
        self._fork = fork
        self.stage = fork.stage
        self.tail = tail
        self._late: asyncio.TimerHandle | None = None
        self._over = False
        self._on_end: OnEnd = lambda _code: None
        self.needed: Callable[[], bool] | None = None
        """Returns True if the sandbox outlives this kernel; None: it ends with the kernel."""
        with ExitStack() as undo:
            self.init = WatchedProcess(pid_of(fork.init), self._loop, None, pidfd=fork.init)
            undo.callback(self.init.close)
            self.kernel = WatchedProcess(
                pid_of(fork.kernel), self._loop, self._on_kernel_end, pidfd=fork.kernel
            )
            undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """The init and the kernel."""
        return [self.init.pid, self.kernel.pid]

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` once the template has reported the kernel's end, or cannot any more."""
        self._on_end = on_end
        self._fork.on_end = self._finish
        if self._fork.over:
            self._finish()

    def adopt(self, pid: int) -> None:
        """Raise LaunchError if `pid` is not the kernel."""
        if pid != self.kernel.pid:
            raise LaunchError(f"its readiness came from process {pid} instead of {self.kernel.pid}")

    def kill(self) -> None:
        """Send SIGKILL to the init, and so to all; continue the parents, which report the end.

        To the kernel alone where the sandbox is needed.
        """
        if self.needed is not None and self.needed():
            self.kernel.signal(signal.SIGKILL)
            self.kernel.continue_parent()
        elif not self._over or not self.init.gone.is_set():
            self.init.signal(signal.SIGKILL)
            self.init.continue_parent()
            self.kernel.continue_parent()

    async def settled(self) -> None:
        """Return at once: all processes are known from the beginning."""

    async def gone(self) -> None:
        """Return when both are gone; the kernel alone where an enclosure owns the sandbox."""
        if self.needed is None:
            await self.init.gone.wait()
        await self.kernel.gone.wait()

    def close(self) -> None:
        """Close every descriptor."""
        self._fork.on_end = _nothing
        if self._late is not None:
            self._late.cancel()
        self.kernel.close()
        if self.needed is None:
            self.init.close()
            self.tail.close()
            self.release()

    def release(self) -> None:
        """Report to the template that all of the sandbox has ended."""
        self._fork.on_release()

    def _on_kernel_end(self) -> None:
        if not self._over:
            self._late = self._loop.call_later(STATUS_S, self._finish)
            self.kernel.continue_parent()
            self.init.continue_parent()

    def _finish(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if not self._over:
            self._over = True
            status = self._fork.status
            self._on_end(None if status is None else os.waitstatus_to_exitcode(status))


def _nothing() -> None:
    """Ignore the end of a closed kernel."""


class Start(Protocol):
    """Forks a process from a template into a sandbox of its own."""

    async def __call__(
        self,
        template: TemplateProcess,
        request: LaunchRequest,
        folder: Path,
        identity: Identity | None,
        inherited: tuple[int, int],
        trial: Mapping[str, Any] | None = None,
    ) -> ConfinedProcess:
        """Return the process, which is a kernel, or with `trial` runs that self-test instead.

        Raises TemplateError, OSError.
        """


class Prover:
    """Runs the self-tests of templates; `folders` are visible to templates, never to kernels."""

    def __init__(
        self,
        sandbox: Sandbox,
        runs: RunDirectory,
        inspector: Inspector,
        start: Start,
        folders: Sequence[str],
        opens: Opens = NOTHING,
        mounted: Sequence[Path] = (),
    ) -> None:
        """Every template shows the mounts `mounted`; kernels may write to the paths `opens`."""
        self._mounted = mounted
        self._folders = folders
        self._opens = opens
        self._sandbox = sandbox
        self._runs = runs
        self._inspector = inspector
        self._start = start

    async def proven(self, template: TemplateProcess, environment: KernelEnvironment) -> Proof:
        """Run the self-test in a fork of `template`, once per stage: some 50 ms. Return the result.

        Raises BoundaryBroken for a violation, LaunchError, OSError.
        """
        proof = template.proof
        while proof.stage != template.stage and template.usable:
            async with proof.lock:
                if proof.stage != template.stage:
                    await self._try(template, environment)
        return proof

    async def _try(self, template: TemplateProcess, environment: KernelEnvironment) -> None:
        limits = Limits()
        async with AsyncExitStack() as undo:
            visible = (*environment.readonly, *self._mounted)
            probe = undo.enter_context(probing(visible, calls=True, limits=limits))
            identity = self._sandbox.identity()
            undo.callback(self._sandbox.release, identity)
            folder = self._runs.fresh()
            undo.push_async_callback(cold.remove_folder, folder)
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
                LaunchRequest("", environment, Policy.for_allow(()), limits, workspace),
                folder,
                identity,
                (channel.guest_fd, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)),
                trial={**probe.task, "hidden": hidden, "workspace": shown.workspace},
            )
            undo.push_async_callback(process.aclose)
            await process.ready(channel, READY_S)
            namespaces = self._inspector.lineage(process.pid)
            self._inspector.inspect(
                process.pid,
                process.pidfd,
                identity,
                forked=True,
                others=namespaces,
                opened=self._opens,
            ).forget()
            checks = _required(probe, channel.said, self._sandbox.report().unpromised)
            template.proof.take(cast(Forked, process.start).stage, checks, namespaces)


def _required(probe: Probe, said: Mapping[str, Any], excused: frozenset[str]) -> Sequence[Check]:
    """Return the checks of a self-test.

    Raises BoundaryBroken if one fails that is not `excused`.
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
