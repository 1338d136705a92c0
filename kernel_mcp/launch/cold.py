"""Cold start: a new interpreter for each kernel on this machine, in a sandbox of its own."""

from __future__ import annotations

import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

from kernel_mcp.barriers import explained
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import rundir
from kernel_mcp.launch.assembly import KernelAssembly, PreparedKernel
from kernel_mcp.launch.base import START_TIMEOUT_S, ConnectionInfo, LaunchRequest
from kernel_mcp.launch.mounts import ALL, as_folder
from kernel_mcp.launch.process import ConfinedProcess, KernelProcess, KernelSockets, StartReport
from kernel_mcp.launch.program import connections
from kernel_mcp.launch.spawn import Spawned
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import SandboxRequest
from kernel_mcp.sandbox.mounts import Folders

READ_ONLY = (
    "The sandbox landlock cannot make mounts read-only for a replay alone: open them with "
    "`--open mounts`, or start the server with --sandbox bwrap."
)


class LocalLauncher:
    """Starts one process per kernel, which must be ready within `start_timeout_s` seconds."""

    def __init__(
        self, assembly: KernelAssembly, *, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._assembly = assembly
        self._sandbox = assembly.sandbox
        self._mounts = assembly.mounts
        self._start_timeout_s = start_timeout_s

    async def launch(
        self, request: LaunchRequest, *, connection: ConnectionInfo | None = None
    ) -> KernelProcess:
        """Start a kernel and return it once its sockets listen.

        `connection` has the addresses that it listens on, in a new folder of this launcher's run
        directory. A failed or cancelled start leaves nothing behind. Raises LaunchError,
        SandboxUnavailable.
        """
        try:
            return await self._launch(request, connection)
        except OSError as reason:
            raise LaunchError(str(explained(reason, "preparing a kernel's files"))) from reason

    async def _launch(
        self, request: LaunchRequest, connection: ConnectionInfo | None
    ) -> KernelProcess:
        async with self._assembly.prepare(request, connection) as kernel:
            await kernel.limits.ready()
            if self._mounts.sealed and request.program is None:
                kernel.channel.give(rundir.listening(kernel.connection))
            process = self._start(kernel, await self._folders(request, kernel.identity))
            kernel.own(process)
            inspected = await kernel.verify(
                process,
                self._start_timeout_s,
                kernel.inspection(),
                # all: bubblewrap follows symlinks, which a session may have replaced
                masks_since=ALL,
                lasting=lambda: process.pid,
            )
            ends: tuple[socket.socket, ...] = ()
            if request.program is not None:
                kernel.begin()
                ends = await connections(process, kernel.connection, self._start_timeout_s)
            kernel.finish()
            resources = AsyncExitStack()
            resources.push_async_callback(kernel.of_sandbox.pop_all().aclose)
            resources.push_async_callback(kernel.of_kernel.pop_all().aclose)
            return KernelProcess(
                sockets=KernelSockets(kernel.connection, ends),
                report=StartReport(("started cold", *inspected.words)),
                process=process,
                limits=kernel.limits,
                ring=kernel.ring,
                egress=kernel.access,
                resources=resources,
            )

    async def aclose(self) -> None:
        """Release nothing: no process or file outlives its kernel."""

    async def _folders(self, request: LaunchRequest, identity: Identity | None) -> Folders:
        """Return the mounted folders for one start. Raises LaunchError, OSError."""
        mounts = self._mounts
        if not mounts:
            return Folders()
        await mounts.refresh(request.environment)
        if mounts.by_rules and not request.writable and mounts.writable.folders:
            raise LaunchError(READ_ONLY)
        if mounts.by_rules:
            return Folders(rules=await mounts.ruleset())
        trees = tuple(await mounts.trees.make(identity))
        shown = tuple(
            as_folder(each, mounts.stage / str(number) if trees else each.mount.host)
            for number, each in enumerate(mounts.shown)
        )
        if not request.writable:
            shown = tuple(replace(each, writable=False) for each in shown)
        return Folders(shown, mounts.blank, mounts.stage, trees)

    def _start(self, kernel: PreparedKernel, folders: Folders) -> ConfinedProcess:
        request, paths = kernel.request, kernel.paths
        layers = request.layers if paths.layers else ()
        unmoved = () if paths.layers else request.layers
        inherited: tuple[int, ...] = ()
        try:
            ring = kernel.ring.guest_fd()
            inherited = (kernel.channel.pass_guest(), ring)
            kernel.write_boot_files(*inherited)
            command = self._sandbox.command(
                SandboxRequest(
                    argv=rundir.argv(request, paths),
                    env=rundir.environment(request, paths),
                    workspace=request.workspace,
                    sockets=kernel.folder,
                    readonly=(*request.environment.readonly, *unmoved),
                    limits=request.limits,
                    inherit=inherited,
                    layers=layers,
                    folders=folders,
                    hosts=self._assembly.network.hosts,
                    replaced=request.environment.replaced,
                    devices=self._mounts.devices if request.has_devices else (),
                ),
                kernel.identity,
            )
        except BaseException:
            for fd in (*inherited, *folders.handed):
                os.close(fd)
            raise
        if folders.rules >= 0:
            os.close(folders.rules)
        return ConfinedProcess(Spawned(kernel.limits.command(command)))
