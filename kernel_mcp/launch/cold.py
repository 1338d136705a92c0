"""Cold start: a new interpreter for each kernel on this machine, in a sandbox of its own."""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier, explained, surely
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import START_TIMEOUT_S, ConnectionInfo, LaunchRequest
from kernel_mcp.launch.doors import ALL, Doors, as_folder
from kernel_mcp.launch.network import Network
from kernel_mcp.launch.process import ConfinedProcess, KernelProcess, OutputRing
from kernel_mcp.launch.readiness import Inspector, ReadinessChannel
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.spawn import Spawned
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.safe_tree import give_tree, remove_tree
from kernel_mcp.sandbox.base import Sandbox, SandboxRequest
from kernel_mcp.sandbox.mounts import Folders


class LocalLauncher:
    """Starts one process per kernel, which has to be ready within `start_timeout_s` seconds."""

    def __init__(
        self,
        sandbox: Sandbox,
        runs: RunDirectory,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        resources: ResourceManager | None = None,
        inspector: Inspector | None = None,
        doors: Doors | None = None,
        network: Network | None = None,
    ) -> None:
        """Without `resources` kernels have rlimits only, and those of their sandbox."""
        self._network = network or Network()
        self._resources = resources or ResourceManager()
        self._inspector = inspector or Inspector(sandbox)
        self._sandbox = sandbox
        self._doors = Doors() if doors is None else doors
        self._runs = runs
        self._start_timeout_s = start_timeout_s

    async def launch(
        self, request: LaunchRequest, *, connection: ConnectionInfo | None = None
    ) -> KernelProcess:
        """Start a kernel and return it once its sockets listen.

        `connection` is what it listens on, in a new folder of this launcher's run directory.
        A failed or cancelled start leaves nothing. Raises LaunchError, SandboxUnavailable.
        """
        try:
            return await self._launch(request, connection)
        except OSError as reason:
            raise LaunchError(str(explained(reason, "preparing a kernel's files"))) from reason

    async def _launch(
        self, request: LaunchRequest, connection: ConnectionInfo | None
    ) -> KernelProcess:
        async with AsyncExitStack() as undo:
            identity = self._sandbox.identity(request.workspace)
            undo.callback(self._sandbox.release, identity)
            folder = self._runs.fresh(Path(connection.ip).parent.name if connection else "")
            undo.push_async_callback(remove_folder, folder)
            wanted = connection or ConnectionInfo(ip=f"{folder}/k", key=secrets.token_hex(32))
            if identity is not None:
                await hand_over(request.workspace, identity)
            limits = self._resources.open(
                request.limits, request.workspace, folder, request.session
            )
            undo.push_async_callback(limits.aclose)
            await limits.ready()
            folders = await self._folders(request, identity)
            channel = ReadinessChannel()
            undo.callback(channel.close)
            ring = OutputRing()
            undo.callback(ring.close)
            inherited = (channel.guest_fd, ring.guest_fd())
            if self._doors.strict:
                channel.give([await self._doors.rules()])
            if folders.shown:
                channel.give(rundir.listening(wanted))
            process = self._start(request, folder, wanted, identity, inherited, limits, folders)
            undo.push_async_callback(process.aclose)
            limits.kill = process.kill
            await process.ready(channel, self._start_timeout_s)
            paths = self._sandbox.guest_paths(request.workspace, folder)
            inspected = self._inspector.inspect(
                process.pid,
                process.pidfd,
                identity,
                ceilings=rundir.ceilings(request, paths),
                opened=self._doors.opens,
            )
            undo.callback(inspected.forget)
            if folders.shown and self._doors.enters:
                # bubblewrap follows links, which a session that may write there could have swapped
                await self._doors.hold(process.pid, ALL)
            limits.admit(process.pids)
            way = self._network.way()
            undo.callback(way.close)
            await way.enter(process.pid, process.pidfd)
            await limits.settled()
            channel.close()
            rundir.forget_variables(request, folder)
            if identity is not None:
                seal(folder, identity)
            return KernelProcess(
                connection=wanted,
                boundary=("started cold", *inspected.words),
                process=process,
                limits=limits,
                ring=ring,
                way=way,
                resources=undo.pop_all(),
            )

    async def aclose(self) -> None:
        """Release nothing: no process or file outlives its kernel."""

    async def _folders(self, request: LaunchRequest, identity: Identity | None) -> Folders:
        """Return the mounted folders for one start. Raises LaunchError, OSError."""
        doors = self._doors
        if not doors:
            return Folders()
        await doors.look(request.environment)
        if doors.by_rules:
            return Folders(rules=await doors.rules())
        trees = () if identity is None else tuple(await doors.trees(identity))
        shown = tuple(
            as_folder(each, doors.stage / str(number) if trees else each.mount.host)
            for number, each in enumerate(doors.shown)
        )
        return Folders(shown, doors.blank, doors.stage, trees)

    def _start(
        self,
        request: LaunchRequest,
        folder: Path,
        connection: ConnectionInfo,
        identity: Identity | None,
        inherited: tuple[int, int],
        limits: KernelLimits,
        folders: Folders,
    ) -> ConfinedProcess:
        paths = self._sandbox.guest_paths(request.workspace, folder)
        layers = request.layers if paths.layers else ()
        unmoved = () if paths.layers else request.layers
        try:
            contents = {
                rundir.CONNECTION_FILE: rundir.connection_content(connection, paths),
                rundir.BOOT_FILE: rundir.boot_content(
                    request,
                    paths,
                    *inherited,
                    sealed=bool(folders.shown),
                    strict=self._doors.strict,
                ),
            }
            write_boot_files(folder, contents, identity)
            command = self._sandbox.command(
                SandboxRequest(
                    argv=rundir.argv(request, paths),
                    env=rundir.environment(request, paths),
                    workspace=request.workspace,
                    sockets=folder,
                    readonly=(*request.environment.readonly, *unmoved),
                    limits=request.limits,
                    inherit=inherited,
                    layers=layers,
                    folders=folders,
                    hosts=self._network.hosts,
                    replaced=request.environment.replaced,
                    devices=self._doors.devices,
                ),
                identity,
            )
        except BaseException:
            for fd in (*inherited, *folders.handed):
                os.close(fd)
            raise
        if folders.rules >= 0:
            os.close(folders.rules)
        return ConfinedProcess(Spawned(limits.command(command)), limits.explain)


def write_boot_files(
    folder: Path, contents: dict[str, dict[str, Any]], identity: Identity | None
) -> None:
    """Write the files that a kernel boots from, and make its user the owner of the folder."""
    rundir.write_files(folder, contents, identity)
    if identity is not None:
        os.chown(folder, identity.uid, identity.gid)


def seal(folder: Path, identity: Identity) -> None:
    """Take the socket folder back from the kernel's user, mode 0710: no quota counts its files."""
    os.chown(folder, os.geteuid(), identity.gid, follow_symlinks=False)
    folder.chmod(0o710)


async def hand_over(workspace: Path, identity: Identity) -> None:
    """Make the kernel's user the owner of its workspace."""
    if workspace.lstat().st_uid == identity.uid:
        return
    give = partial(give_tree, workspace, uid=identity.uid, gid=identity.gid)
    if any(workspace.iterdir()):
        await anyio.to_thread.run_sync(give)
    else:
        give()


async def remove_folder(folder: Path) -> None:
    with Barrier("removing the folder of a kernel's sockets"):
        await surely(remove_tree, folder)
