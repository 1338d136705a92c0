"""Steps common to every start of a kernel, cold or forked.

`KernelAssembly.prepare` makes everything that must exist before the process. The launcher starts
the process. `PreparedKernel.verify` waits for it and inspects it. `PreparedKernel.finish` removes
what was needed only for the start. A start that fails or is cancelled leaves nothing behind.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.config.settings import Limits
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import ConnectionInfo, LaunchRequest
from kernel_mcp.launch.mounts import MountGrants
from kernel_mcp.launch.network import Network, NetworkAccess
from kernel_mcp.launch.process import ConfinedProcess, OutputRingReader
from kernel_mcp.launch.readiness import Inspection, Inspector, ReadinessChannel
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.folders import Identity, private_folder
from kernel_mcp.linux.proc import threads_of_user
from kernel_mcp.linux.safe_tree import give_tree, remove_tree
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import GuestPaths, Sandbox, SandboxReport

PROGRAM_PORTS = (61001, 61002, 61003, 61004, 61005)
"""Ports of shell, iopub, stdin, control and heartbeat in the network of one kernel alone: above
those that Linux assigns by itself."""


class KernelAssembly:
    """Prepares kernels; all launchers of a server share one instance."""

    def __init__(
        self,
        sandbox: Sandbox,
        runs: RunDirectory,
        *,
        resources: ResourceManager | None = None,
        inspector: Inspector | None = None,
        mounts: MountGrants | None = None,
        network: Network | None = None,
    ) -> None:
        """Without `resources`, kernels have only rlimits and the limits of their sandbox."""
        self.sandbox = sandbox
        self.runs = runs
        self.resources = resources or ResourceManager()
        self.inspector = inspector or Inspector(sandbox)
        self.mounts = MountGrants() if mounts is None else mounts
        self.network = network or Network()

    def report(self, limits: Limits) -> SandboxReport:
        """Return the protections and limits in force for kernels with these limits."""
        grants = self.mounts.grants(network=bool(self.network))
        return self.resources.report(self.sandbox.report(grants), limits)

    @asynccontextmanager
    async def prepare(
        self, request: LaunchRequest, connection: ConnectionInfo | None = None
    ) -> AsyncIterator[PreparedKernel]:
        """Yield the parts of a new kernel; on exit, close what is still on its two stacks.

        `connection` has the addresses that the kernel listens on, in a new folder of the run
        directory. Raises LaunchError, OSError.
        """
        async with AsyncExitStack() as of_sandbox, AsyncExitStack() as of_kernel:
            identity = self.sandbox.identity(request.workspace)
            of_sandbox.callback(self.sandbox.release, identity)
            folder = self.runs.fresh(Path(connection.ip).parent.name if connection else "")
            of_sandbox.push_async_callback(remove_folder, folder)
            # creates the control group in a thread meanwhile
            limits = self.resources.open(request.limits, request.workspace, folder, request.session)
            of_sandbox.push_async_callback(limits.aclose)
            if identity is not None:
                await hand_over(request.workspace, identity)
            channel = ReadinessChannel()
            of_sandbox.callback(channel.close)
            ring = OutputRingReader()
            of_kernel.callback(ring.close)
            if self.mounts.strict:
                channel.give([await self.mounts.ruleset()])
            connection = connection or self._connection(folder, request, identity)
            if request.tools and request.program is None:
                path = private_folder(self.runs.tools) / folder.name
                of_sandbox.callback(path.unlink, missing_ok=True)
                channel.give([rundir.listening_at(str(path))])
                connection = replace(connection, tools=str(path))
            access = self.network.access()
            of_sandbox.callback(access.close)
            paths = self.sandbox.guest_paths(request.workspace, folder)
            if identity is not None and request.program is not None:
                # Linux counts those of the kernel that it replaces, too
                others = await anyio.to_thread.run_sync(threads_of_user, identity.uid)
                paths = replace(paths, other_threads=paths.other_threads + others)
            yield PreparedKernel(
                assembly=self,
                request=request,
                identity=identity,
                folder=folder,
                paths=paths,
                connection=connection,
                limits=limits,
                channel=channel,
                ring=ring,
                access=access,
                of_sandbox=of_sandbox,
                of_kernel=of_kernel,
            )

    def _connection(
        self, folder: Path, request: LaunchRequest, identity: Identity | None
    ) -> ConnectionInfo:
        """Return the addresses of a new kernel; those of a program are in its own network, if any.

        Not every program knows Unix sockets, and with mounts a kernel can make none.
        """
        key = secrets.token_hex(32)
        expected = self.sandbox.expected_confinement(identity)
        if request.program is not None and expected is not None and "net" in expected.namespaces:
            return ConnectionInfo("127.0.0.1", key, *PROGRAM_PORTS, transport="tcp")
        return ConnectionInfo(ip=f"{folder}/k", key=key)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedKernel:
    """The parts of one kernel before and while its process starts.

    identity    the kernel's user on the host; None for the server's own
    folder      its socket folder on the host
    paths       paths of its files as it sees them
    channel     where its process reports that it is ready
    ring        shared memory with its last output
    access      its network access
    of_sandbox  closed when the sandbox has ended, checkpoints included
    of_kernel   closed when this kernel has ended
    """

    assembly: KernelAssembly
    request: LaunchRequest
    identity: Identity | None
    folder: Path
    paths: GuestPaths
    connection: ConnectionInfo
    limits: KernelLimits
    channel: ReadinessChannel
    ring: OutputRingReader
    access: NetworkAccess
    of_sandbox: AsyncExitStack
    of_kernel: AsyncExitStack

    def write_boot_files(
        self, ready_fd: int, ring_fd: int, *, connected: bool = False, checkpoints: bool = False
    ) -> None:
        """Write the files that the kernel boots from, and make its user the owner of the folder.

        `ready_fd` and `ring_fd` are the kernel's descriptors of `channel` and `ring`.
        """
        mounts = self.assembly.mounts
        start = [each.mount.guest for each in mounts.shown if each.mount.start]
        contents = {
            rundir.CONNECTION_FILE: rundir.connection_content(self.connection, self.paths),
            rundir.BOOT_FILE: rundir.boot_content(
                self.request,
                self.paths,
                ready_fd,
                ring_fd,
                sealed=mounts.sealed,
                connected=connected,
                strict=mounts.strict,
                checkpoints=checkpoints,
                start="".join(start),
            ),
        }
        if self.request.program is not None:
            program = rundir.program_content(self.request.program, self.paths)
            contents[rundir.PROGRAM_FILE] = program
        rundir.write_files(self.folder, contents, self.identity)
        if self.identity is not None:
            os.chown(self.folder, self.identity.uid, self.identity.gid)

    def own(self, process: ConfinedProcess) -> None:
        """Close the process with the kernel, and connect the process and its limits.

        The limits can kill the process, and explain its end.
        """
        self.of_kernel.push_async_callback(process.aclose)
        process.explain, self.limits.kill = self.limits.explain, process.kill

    def inspection(
        self, *, forked: bool = False, others: Collection[str] = ()
    ) -> Callable[..., Inspection]:
        """Return a callable that inspects a process of this sandbox (`Inspector.inspect`).

        The processes must share no namespace with `others`.
        """
        return partial(
            self.assembly.inspector.inspect,
            identity=self.identity,
            forked=forked,
            others=others,
            ceilings=rundir.ceilings(self.request, self.paths),
            opened=self.assembly.mounts.writable,
        )

    async def verify(
        self,
        process: ConfinedProcess,
        timeout_s: float,
        inspect: Callable[..., Inspection],
        *,
        masks_since: int,
        lasting: Callable[[], int],
    ) -> Inspection:
        """Wait until the process is ready; inspect it, then complete its mounts, network and group.

        The masks found after version `masks_since` are applied. `lasting` returns the pid of the
        process whose exit ends the sandbox. Raises BoundaryBroken, LaunchError, OSError.
        """
        await process.ready(self.channel, timeout_s)
        self.limits.admit(process.pids)
        inspected = inspect(process.pid, process.pidfd)
        self.of_kernel.callback(inspected.forget)
        if self.assembly.mounts.sealed and self.assembly.mounts.enters:
            await self.assembly.mounts.apply_masks(lasting(), masks_since)
        await self.access.establish(process.pid, process.pidfd)
        await self.limits.settled()
        return inspected

    def begin(self) -> None:
        """Remove secrets and close the readiness channel, upon which a program begins.

        Programs run code of the workspace at their start, such as .Rprofile: only those that make
        their sockets in the folder keep their rights to it until `finish`.
        """
        rundir.forget_variables(self.request, self.folder)
        if self.connection.transport != "ipc":
            self._withdraw_folder()
        self.channel.close()

    def finish(self) -> None:
        """Call `begin`, then remove the kernel's rights to its folder."""
        self.begin()
        self._withdraw_folder()

    def _withdraw_folder(self) -> None:
        if self.identity is not None:
            # no quota counts the files of this folder, so the kernel's user may not keep it
            os.chown(self.folder, os.geteuid(), self.identity.gid, follow_symlinks=False)
            self.folder.chmod(0o710)


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
    """Remove the folder of a kernel's sockets; a failure is logged."""
    with Barrier("removing the folder of a kernel's sockets"):
        await run_in_thread(remove_tree, folder)
