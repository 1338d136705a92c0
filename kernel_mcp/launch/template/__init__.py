"""Fork kernels from a template that has imported everything; start them cold otherwise."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch import rundir
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.mounts import ALL, as_folder
from kernel_mcp.launch.network import NetworkAccess
from kernel_mcp.launch.process import (
    ConfinedProcess,
    KernelProcess,
    KernelSockets,
    Launcher,
    StartReport,
)
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.template import outer
from kernel_mcp.launch.template.forked import Forked
from kernel_mcp.launch.template.outer import TemplateSupervisor
from kernel_mcp.launch.template.process import StageOver, TemplateError, TemplateProcess
from kernel_mcp.launch.template.sandbox_group import ForkedSandboxGroup, connected
from kernel_mcp.launch.template.self_test import READY_S, TemplateSelfTest
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.self_test import Check
from kernel_specs import linux


def detached(folder: Path) -> int:
    """Return a detached bind mount, close-on-exec. Requires CAP_SYS_ADMIN, Linux 5.2.

    Raises OSError, also for a symlink.
    """
    # O_NOFOLLOW refuses a symlink in the folder's place
    handle = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tree = linux.open_tree(handle)
    finally:
        os.close(handle)
    try:
        _restrict(tree)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _restrict(tree: int) -> None:
    """Forbid set-user-id programs and devices on a detached mount.

    Linux before 5.12 cannot; there no_new_privs and the process that attaches the mount do so.
    """
    try:
        linux.set_attributes(tree, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    except OSError as reason:
        if reason.errno != errno.ENOSYS:
            raise


logger = logging.getLogger(__name__)

STOCK_S = 0.3
"""Maximum wait in seconds for a template's first imports, which a kernel would repeat itself."""
FORKS_PER_PROCESSOR = 2
"""Maximum number of concurrent forks per processor: more would only delay all of them."""
READY_FD, RING_FD = 3, 4
"""Descriptor numbers of the readiness channel and the output ring in a forked kernel."""


LATE = (
    "its template was not ready, or had failed, when it was started; reset gives the session a "
    "kernel that has checkpoints, if the template is ready then"
)
ELSEWHERE = (
    "this session has a Python or packages of its own, and only the server's environment has a "
    "template; packages that `install` adds to a session keep its checkpoints"
)
"""Why a kernel was started cold although others are forked."""


class TemplateLauncher:
    """Forks kernels from templates, one for each prepared environment; `cold` starts the others."""

    def __init__(
        self,
        assembly: KernelAssembly,
        *,
        cold: Launcher,
        shared: Sequence[Path],
        templates: int = 4,
        variables: tuple[tuple[str, str], ...] = (),
        checkpoints: bool = True,
    ) -> None:
        """Keep the `templates` most recently used; with `checkpoints`, kernels support checkpoints.

        `shared` folders hold all workspaces and package layers. Packages may read `variables` while
        they are imported.
        """
        self._assembly = assembly
        self._checkpoints = checkpoints
        self._sandbox = assembly.sandbox
        self._cold = cold
        self._mounts = assembly.mounts
        mounts = tuple(each.mount for each in self._mounts.shown)
        self._settings = outer.TemplateSettings(
            (assembly.runs.kernels, *shared),
            mounts,
            self._mounts.blank,
            self._mounts.marks,
            assembly.network.hosts,
            variables,
            self._mounts.devices,
        )
        self._self_test = TemplateSelfTest(
            assembly,
            self._start,
            self._settings.folder_paths,
            [Path(each.guest) for each in mounts],
        )
        self.remark: Callable[[str], None] = lambda _text: None
        """Called with a text that the next answer of every session includes."""
        self._most = templates
        self._fork_slots = anyio.Semaphore(FORKS_PER_PROCESSOR * (os.cpu_count() or 1))
        self._supervisors: dict[KernelEnvironment, TemplateSupervisor] = {}
        self._retired: list[TemplateSupervisor] = []

    def prepare(self, environment: KernelEnvironment, preload: Sequence[str] = ()) -> None:
        """Start a template of `environment` that imports `preload`; return at once.

        Does nothing if there is one; a different `preload` replaces it. Must be called on the event
        loop's thread.
        """
        found = self._supervisors.get(environment)
        if found is not None and found.preload == tuple(preload):
            return
        if found is not None:
            self._retire(environment)
        for known in [each for each in self._supervisors if each.python == environment.python]:
            self._retire(known)  # the same environment before its packages changed
        while len(self._supervisors) >= self._most:
            self._retire(next(iter(self._supervisors)))
        self._supervisors[environment] = TemplateSupervisor(
            self._sandbox, self._settings, environment, preload, lambda text: self.remark(text)
        )

    def template(self, environment: KernelEnvironment) -> TemplateProcess | None:
        """Return the template that can fork kernels of `environment` now, or None."""
        supervisor = self._supervisors.get(environment)
        return None if supervisor is None else supervisor.template

    async def ready(self, environment: KernelEnvironment) -> bool:
        """Wait until the template has imported everything and passed its self-test, or has failed.

        Return True if it can fork. It can also fork earlier, with the modules imported so far.
        """
        supervisor = self._supervisors.get(environment)
        if supervisor is None or not await supervisor.ready():
            return False
        template = supervisor.template
        if template is not None:
            with Barrier("trying what a template forks") as barrier:
                await self._self_test.passed(template, environment)
            if isinstance(barrier.failure, BoundaryBroken):
                supervisor.refuse(str(barrier.failure))
        return supervisor.template is not None

    def checks(self, environment: KernelEnvironment) -> tuple[Check, ...]:
        """Return the results of the self-test of the template of `environment`; empty before it."""
        template = self.template(environment)
        return () if template is None else template.self_test.checks

    def refusal(self, environment: KernelEnvironment) -> str:
        """Return why the template of `environment` must not be used; empty if it may be."""
        supervisor = self._supervisors.get(environment)
        return "" if supervisor is None else supervisor.refusal

    async def launch(self, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel, or start it cold without a template.

        Raises LaunchError, SandboxUnavailable.
        """
        if request.replay is not None and not self._forks(request):
            return await self._cold.launch(request)
        supervisor = self._supervisors.pop(request.environment, None)
        if supervisor is not None:
            self._supervisors[request.environment] = supervisor  # most recently used
            supervisor.renew()
            await supervisor.can_fork()  # a cold kernel would never support checkpoints
            with anyio.move_on_after(STOCK_S):  # most first cells need the modules being imported
                await supervisor.stocked()
            template = supervisor.template
            if template is not None:
                doing = "forking a kernel, which starts cold instead"
                with Barrier(doing, request.session) as barrier:
                    async with self._fork_slots:
                        kernel = await self._fork_now(template, request)
                    supervisor.forked()
                    return kernel
                if isinstance(barrier.failure, BoundaryBroken):
                    supervisor.refuse(str(barrier.failure))
                else:
                    supervisor.failed()
        kernel = await self._cold.launch(request)
        kernel.report.unforked = LATE if supervisor is not None else ELSEWHERE
        return kernel

    def _forks(self, request: LaunchRequest) -> bool:
        """Return True if a fork has what a replay requests.

        All forks have the server's devices, and the hash seed of their template.
        """
        assert request.replay is not None
        own = request.replay.cold or request.hash_seed
        return not own and (request.has_devices or not self._mounts.devices)

    @property
    def states(self) -> list[str]:
        """State of each environment's template: ready, loading or failed."""
        return [
            "ready" if each.template is not None else "loading" if each.loading else "failed"
            for each in self._supervisors.values()
        ]

    async def aclose(self) -> None:
        """End all templates and their remaining kernels, then close the cold launcher."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for supervisor in (*self._supervisors.values(), *self._retired):
                    tasks.start_soon(supervisor.aclose)
        await self._cold.aclose()

    def _retire(self, environment: KernelEnvironment) -> None:
        supervisor = self._supervisors.pop(environment)
        supervisor.stop_forking()
        self._retired = [kept for kept in self._retired if kept.busy]
        self._retired.append(supervisor)

    async def _fork_now(self, template: TemplateProcess, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel from the template's current stage. Raises as `_fork`, except StageOver."""
        while True:
            with suppress(StageOver):
                return await self._fork(template, request)

    async def _fork(self, template: TemplateProcess, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel whose channels are already connected; a failure leaves nothing behind.

        Raises StageOver, LaunchError, OSError.
        """
        tested = await self._self_test.passed(template, request.environment)
        if self._mounts:
            await self._mounts.refresh(request.environment)
        # the keeper applies masks that do not fit into one message
        since = self._mounts.version if self._mounts.fits_message else ALL
        async with self._assembly.prepare(request) as kernel:
            kernel.write_boot_files(
                READY_FD, RING_FD, connected=True, checkpoints=self._checkpoints
            )
            channels, theirs = connected(kernel.of_kernel)
            kernel.channel.give(theirs)
            with ExitStack() as sent:
                gates = await kernel.limits.entry_fds()
                sent.callback(linux.close_all, gates)
                ring = kernel.ring.guest_fd()
                process = await self._start(
                    template,
                    request,
                    kernel.folder,
                    kernel.identity,
                    (kernel.channel.pass_guest(), ring),
                    gates=gates,
                    stage=tested.stage,
                    access=kernel.access,
                    covers=since != ALL,
                )
            kernel.own(process)
            if not gates:  # otherwise the kernel enters its control group itself
                kernel.limits.admit(process.pids)
            inspect = kernel.inspection(forked=True, others=tested.namespaces)
            inspected = await kernel.verify(
                process,
                READY_S,
                inspect,
                masks_since=since,
                lasting=lambda: process.pids[0],
            )
            control_socket = kernel.channel.control_socket() if self._checkpoints else None
            if control_socket is not None:
                kernel.of_kernel.callback(control_socket.close)
            kernel.finish()
            group = ForkedSandboxGroup(
                cast(Forked, process.start),
                limits=kernel.limits,
                inspect=inspect,
                connection=kernel.connection,
                egress=kernel.access,
                resources=kernel.of_sandbox.pop_all(),
            )
            words = "forked from a template that was tried"
            forked = KernelProcess(
                sockets=KernelSockets(kernel.connection, channels, control_socket),
                report=StartReport((words, *inspected.words), kind="forked"),
                process=process,
                limits=kernel.limits,
                ring=kernel.ring,
                egress=kernel.access,
                resources=AsyncExitStack(),
                sandbox_group=group if self._checkpoints else None,
            )
            group.join(forked, kernel.of_kernel.pop_all())
            return forked

    async def _start(
        self,
        template: TemplateProcess,
        request: LaunchRequest,
        folder: Path,
        identity: Identity | None,
        inherited: tuple[int, int],
        task: Mapping[str, Any] | None = None,
        access: NetworkAccess | None = None,
        *,
        gates: Sequence[int] = (),
        stage: int = 0,
        covers: bool = True,
    ) -> ConfinedProcess:
        with ExitStack() as sent, ExitStack() as undo:
            sent.callback(linux.close_all, inherited)
            read, write = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, read)
            sent.callback(os.close, write)
            places, trees = self._places(request, folder, sent, bind=identity is None)
            if task is None:
                await self._show(request, places, trees, sent, identity, covers=covers)
            message = {
                "uid": 0 if identity is None else identity.uid,
                "hostname": outer.HOSTNAME,
                "tmp_bytes": request.limits.tmp_bytes,
                "places": places,
                "trial": task,
                "gates": len(gates),
            }
            if access is not None and access.addresses:
                message["listen"] = access.addresses
                trees.append(access.guest())
                sent.callback(os.close, trees[-1])
            fork = await template.fork(message, [*inherited, write, *gates, *trees], stage)
            undo.pop_all()
            return ConfinedProcess(Forked(fork, StderrTail(read, asyncio.get_running_loop())))

    def _places(
        self, request: LaunchRequest, folder: Path, sent: ExitStack, *, bind: bool
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the mounts of this kernel alone, and their detached trees: none with `bind`.

        Raises TemplateError, OSError.
        """
        if len(request.layers) > outer.MOST_LAYERS:
            raise TemplateError(f"a session has at most {outer.MOST_LAYERS} layers")
        paths = self._sandbox.guest_paths(request.workspace, folder)
        wanted = [
            (request.workspace, paths.workspace, False),
            (folder, paths.sockets, False),
            *(
                (layer, target, True)
                for layer, target in zip(
                    request.layers, rundir.layer_paths(request, paths), strict=True
                )
            ),
        ]
        places: list[dict[str, Any]] = []
        trees: list[int] = []
        for source, target, readonly in wanted:
            if not bind:
                tree = detached(source)
                sent.callback(os.close, tree)
                trees.append(tree)
            inside = self._settings.inside(source) if bind else ""
            places.append({"target": target, "source": inside, "readonly": readonly})
        return places, trees

    async def _show(
        self,
        request: LaunchRequest,
        places: list[dict[str, Any]],
        trees: list[int],
        sent: ExitStack,
        identity: Identity | None,
        *,
        covers: bool,
    ) -> None:
        """Add the mounted folders to `places`, and their trees to `trees`, closed by `sent`."""
        made = await self._mounts.trees.make(identity)
        for tree in made:
            sent.callback(os.close, tree)
        trees += made
        for number, shown in enumerate(self._mounts.shown):
            source = self._settings.mount_path(number) if identity is None else ""
            folder = as_folder(shown, shown.mount.host)
            places.append(
                {
                    "target": folder.guest,
                    "source": source,
                    "readonly": not (folder.writable and request.writable),
                    "covers": folder.covers if covers else (),
                }
            )
