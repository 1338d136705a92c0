"""Fork kernels from a template that has everything imported, onto detached mounts; else cold."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import hand_over, remove_folder, seal, write_boot_files
from kernel_mcp.launch.doors import ALL, Doors, as_folder
from kernel_mcp.launch.network import Network, Way
from kernel_mcp.launch.process import ConfinedProcess, KernelProcess, Launcher, OutputRing
from kernel_mcp.launch.readiness import Inspector, ReadinessChannel, StderrTail
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import outer
from kernel_mcp.launch.template.enclosure import ForkedEnclosure, connected
from kernel_mcp.launch.template.kernel import READY_S, Forked, Prover
from kernel_mcp.launch.template.outer import TemplateSupervisor
from kernel_mcp.launch.template.process import StageOver, TemplateError, TemplateProcess
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.probe import Check
from kernel_specs import linux


def detached(folder: Path) -> int:
    """Return a detached bind mount, close-on-exec. Requires CAP_SYS_ADMIN, Linux 5.2.

    Raises OSError, also for a symlink.
    """
    # through a handle, so that a symlink in the folder's place is refused
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
    """Forbid set-user-id programs, devices and propagation on a detached mount.

    Before Linux 5.12 that is left to no_new_privs and to the process that attaches the mount.
    """
    try:
        linux.set_attributes(tree, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
    except OSError as reason:
        if reason.errno != errno.ENOSYS:
            raise


logger = logging.getLogger(__name__)

STOCK_S = 0.3
"""Longest wait of a kernel for the first modules of its template: it would import them itself."""
FORKS_PER_PROCESSOR = 2
"""Kernels forked at a time: more would only delay all of them."""
READY_FD, RING_FD = 3, 4
"""Descriptor numbers of the ready socket and the output ring in a forked kernel."""


class TemplateLauncher:
    """Forks kernels from templates, one for each prepared environment; `cold` starts the rest."""

    def __init__(
        self,
        sandbox: Sandbox,
        runs: RunDirectory,
        *,
        cold: Launcher,
        shared: Sequence[Path],
        templates: int = 4,
        resources: ResourceManager | None = None,
        inspector: Inspector | None = None,
        doors: Doors | None = None,
        network: Network | None = None,
        variables: tuple[tuple[str, str], ...] = (),
        checkpoints: bool = True,
    ) -> None:
        """Keep the `templates` that were used last; `checkpoints`: their kernels support those.

        `shared` folders hold all workspaces and package layers. Without `resources`: rlimits only.
        Packages may read `variables` while they are imported.
        """
        self._checkpoints = checkpoints
        self._resources = resources or ResourceManager()
        self._inspector = inspector or Inspector(sandbox)
        self._sandbox = sandbox
        self._runs = runs
        self._cold = cold
        self._doors = Doors() if doors is None else doors
        self._network = network or Network()
        mounts = tuple(each.mount for each in self._doors.shown)
        self._shared = outer.Shared(
            (runs.kernels, *shared),
            mounts,
            self._doors.blank,
            self._doors.marks,
            self._network.hosts,
            variables,
            self._doors.devices,
        )
        self._prover = Prover(
            sandbox,
            runs,
            self._inspector,
            self._start,
            self._shared.places,
            self._doors.opens,
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

        Does nothing if there is one; another `preload` than before replaces it. Requires the event
        loop's thread.
        """
        found = self._supervisors.get(environment)
        if found is not None and found.preload == tuple(preload):
            return
        if found is not None:
            self._retire(environment)
        for known in [each for each in self._supervisors if each.python == environment.python]:
            self._retire(known)  # as it was before packages came or went
        while len(self._supervisors) >= self._most:
            self._retire(next(iter(self._supervisors)))
        self._supervisors[environment] = TemplateSupervisor(
            self._sandbox, self._shared, environment, preload, lambda text: self.remark(text)
        )

    def template(self, environment: KernelEnvironment) -> TemplateProcess | None:
        """Return the template that can fork kernels of `environment` now, or None."""
        supervisor = self._supervisors.get(environment)
        return None if supervisor is None else supervisor.template

    async def ready(self, environment: KernelEnvironment) -> bool:
        """Wait until the template has imported everything and passed its self-test, or has failed.

        Return True if it can fork. It also forks before that, with what it has imported.
        """
        supervisor = self._supervisors.get(environment)
        if supervisor is None or not await supervisor.ready():
            return False
        template = supervisor.template
        if template is not None:
            with Barrier("trying what a template forks") as barrier:
                await self._prover.proven(template, environment)
            if isinstance(barrier.failure, BoundaryBroken):
                supervisor.refuse(str(barrier.failure))
        return supervisor.template is not None

    def checks(self, environment: KernelEnvironment) -> tuple[Check, ...]:
        """Return the results of the self-test of the template of `environment`; empty before it."""
        template = self.template(environment)
        return () if template is None else template.proof.checks

    def refusal(self, environment: KernelEnvironment) -> str:
        """Return why the template of `environment` may not be used; empty if it may."""
        supervisor = self._supervisors.get(environment)
        return "" if supervisor is None else supervisor.refusal

    async def launch(self, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel; cold without a template. Raises LaunchError, SandboxUnavailable."""
        supervisor = self._supervisors.pop(request.environment, None)
        if supervisor is not None:
            self._supervisors[request.environment] = supervisor  # now the last to lose its template
            supervisor.renew()
            await supervisor.can_fork()  # a cold kernel would never have a checkpoint
            with anyio.move_on_after(STOCK_S):  # most first cells import what it is importing
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
        return await self._cold.launch(request)

    @property
    def states(self) -> list[str]:
        """State of each environment's template: ready, loading or failed."""
        return [
            "ready" if each.template is not None else "loading" if each.loading else "failed"
            for each in self._supervisors.values()
        ]

    async def aclose(self) -> None:
        """End all templates with the kernels they still have, then close the cold launcher."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for supervisor in (*self._supervisors.values(), *self._retired):
                    tasks.start_soon(supervisor.aclose)
        await self._cold.aclose()

    def _retire(self, environment: KernelEnvironment) -> None:
        supervisor = self._supervisors.pop(environment)
        supervisor.retire()
        self._retired = [kept for kept in self._retired if kept.busy]
        self._retired.append(supervisor)

    async def _fork_now(self, template: TemplateProcess, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel of the stage that the template has reached. Raises as `_fork`."""
        while True:
            with suppress(StageOver):
                return await self._fork(template, request)

    async def _fork(self, template: TemplateProcess, request: LaunchRequest) -> KernelProcess:
        """Fork a kernel, connected from the beginning; a failure leaves nothing.

        Raises StageOver, LaunchError, OSError.
        """
        proof = await self._prover.proven(template, request.environment)
        if self._doors:
            await self._doors.look(request.environment)
        # covers that do not fit into a message are left to the keeper
        since = self._doors.version if self._doors.brief else ALL
        async with AsyncExitStack() as undo, AsyncExitStack() as own:
            identity = self._sandbox.identity(request.workspace)
            undo.callback(self._sandbox.release, identity)
            folder = self._runs.fresh()
            undo.push_async_callback(remove_folder, folder)
            # its group is made in a thread meanwhile
            limits = self._resources.open(
                request.limits, request.workspace, folder, request.session
            )
            undo.push_async_callback(limits.aclose)
            connection = ConnectionInfo(ip=f"{folder}/k", key=secrets.token_hex(32))
            paths = self._sandbox.guest_paths(request.workspace, folder)
            if identity is not None:
                await hand_over(request.workspace, identity)
            boot = rundir.boot_content(
                request,
                paths,
                READY_FD,
                RING_FD,
                sealed=bool(self._doors),
                connected=True,
                strict=self._doors.strict,
                lifeline=self._checkpoints,
            )
            contents = {
                rundir.CONNECTION_FILE: rundir.connection_content(connection, paths),
                rundir.BOOT_FILE: boot,
            }
            write_boot_files(folder, contents, identity)
            channel = ReadinessChannel()
            undo.callback(channel.close)
            ring = OutputRing()
            own.callback(ring.close)
            if self._doors.strict:
                channel.give([await self._doors.rules()])
            channels, theirs = connected(own)
            channel.give(theirs)
            way = self._network.way()
            undo.callback(way.close)
            with ExitStack() as sent:
                gates = await limits.gates()
                sent.callback(linux.close_all, gates)
                process = await self._start(
                    template,
                    request,
                    folder,
                    identity,
                    (channel.guest_fd, ring.guest_fd()),
                    gates=gates,
                    stage=proof.stage,
                    way=way,
                    covers=since != ALL,
                )
            own.push_async_callback(process.aclose)
            process.explain, limits.kill = limits.explain, process.kill
            if not gates:
                limits.admit(process.pids)
            await process.ready(channel, READY_S)
            if gates:  # they have entered by themselves, or are moved now
                limits.admit(process.pids)
            way.take()
            inspect = partial(
                self._inspector.inspect,
                identity=identity,
                forked=True,
                others=proof.namespaces,
                ceilings=rundir.ceilings(request, paths),
                opened=self._doors.opens,
            )
            inspected = inspect(process.pid, process.pidfd)
            own.callback(inspected.forget)
            if self._doors:
                await self._doors.hold(process.pids[0], since)
            await limits.settled()
            lifeline = channel.lifeline() if self._checkpoints else None
            if lifeline is not None:
                own.callback(lifeline.close)
            channel.close()
            rundir.forget_variables(request, folder)
            if identity is not None:
                seal(folder, identity)
            enclosure = ForkedEnclosure(
                cast(Forked, process.start),
                limits=limits,
                inspect=inspect,
                connection=connection,
                way=way,
                resources=undo.pop_all(),
            )
            kernel = KernelProcess(
                connection=connection,
                boundary=("forked from a template that was tried", *inspected.words),
                process=process,
                limits=limits,
                ring=ring,
                way=way,
                resources=AsyncExitStack(),
                channels=channels,
                lifeline=lifeline,
                kind="forked",
                enclosure=enclosure if self._checkpoints else None,
            )
            enclosure.join(kernel, own.pop_all())
            return kernel

    async def _start(
        self,
        template: TemplateProcess,
        request: LaunchRequest,
        folder: Path,
        identity: Identity | None,
        inherited: tuple[int, int],
        trial: Mapping[str, Any] | None = None,
        way: Way | None = None,
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
            if trial is None:
                await self._show(places, trees, sent, identity, covers=covers)
            message = {
                "uid": 0 if identity is None else identity.uid,
                "hostname": outer.HOSTNAME,
                "tmp_bytes": request.limits.tmp_bytes,
                "places": places,
                "trial": trial,
                "gates": len(gates),
            }
            if way is not None and way.places:
                message["listen"] = way.places
                trees.append(way.guest())
                sent.callback(os.close, trees[-1])
            fork = await template.fork(message, [*inherited, write, *gates, *trees], stage)
            undo.pop_all()
            return ConfinedProcess(Forked(fork, StderrTail(read, asyncio.get_running_loop())))

    def _places(
        self, request: LaunchRequest, folder: Path, sent: ExitStack, *, bind: bool
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the mounts of this kernel alone, and their trees: none with `bind`.

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
            inside = self._shared.inside(source) if bind else ""
            places.append({"target": target, "source": inside, "readonly": readonly})
        return places, trees

    async def _show(
        self,
        places: list[dict[str, Any]],
        trees: list[int],
        sent: ExitStack,
        identity: Identity | None,
        *,
        covers: bool,
    ) -> None:
        """Add the mounted folders to `places`, and their trees to `trees`; `sent` closes these."""
        made = await self._doors.trees(identity) if identity is not None and self._doors else []
        for tree in made:
            sent.callback(os.close, tree)
        trees += made
        for number, shown in enumerate(self._doors.shown):
            source = self._shared.shown(number) if identity is None else ""
            folder = as_folder(shown, shown.mount.host)
            places.append(
                {
                    "target": folder.guest,
                    "source": source,
                    "readonly": not folder.writable,
                    "covers": folder.covers if covers else (),
                }
            )
