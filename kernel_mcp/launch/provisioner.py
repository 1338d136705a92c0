"""Sandboxed kernels for anything that speaks jupyter_client: `kernel-mcp-sandbox`."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Int, List, Unicode

from kernel_mcp.config.settings import Limits
from kernel_mcp.config.values import MIB
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import LaunchedKernel
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.select import proven_sandbox

_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class SandboxProvisioner(KernelProvisionerBase):
    """Starts the kernel of a Jupyter kernel spec inside the sandbox.

    The traits can be set in the kernel spec, below `metadata.kernel_provisioner.config`. A restart
    keeps the connection, so that clients find the new kernel where the old one was.
    """

    sandbox = Unicode("auto", help="Backend: auto, bwrap or none").tag(config=True)
    allow = List(Unicode(), help="Modules that code may import; ['*'] for all").tag(config=True)
    profile = Unicode("default", help="Import profile to begin from").tag(config=True)
    memory_mb = Int(0, help="Memory in MiB; 0 for the default").tag(config=True)
    workspace = Unicode(
        "",
        help="Folder that the kernel works in and owns: a root server hands it over to the "
        "kernel's user. Empty for a private one that ends with the kernel",
    ).tag(config=True)
    readonly = List(Unicode(), help="More paths that the kernel may read").tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._resources = ExitStack()
        self._run: RunDirectory | None = None
        self._launcher: LocalLauncher | None = None
        self._kernel: LaunchedKernel | None = None

    @property
    def has_process(self) -> bool:
        """Whether a kernel has been started and not been waited for."""
        return self._kernel is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Move the manager to ipc and write its connection file."""
        if self._run is None:
            sandbox = await anyio.to_thread.run_sync(proven_sandbox, self.sandbox)
            self._run = self._resources.enter_context(RunDirectory.create())
            resources = ResourceManager.create(self._run.path, sandbox.report())
            self._resources.callback(resources.close)
            self._launcher = LocalLauncher(sandbox, self._run, resources=resources)
        manager: Any = self.parent
        manager.transport = "ipc"
        if Path(manager.ip).parent.parent != self._run.kernels:
            manager.ip = str(self._run.kernels / secrets.token_hex(4) / "k")
        for port, channel in enumerate(_CHANNELS, start=1):
            setattr(manager, f"{channel}_port", port)
        manager.write_connection_file()
        self.connection_info = manager.get_connection_info()
        kwargs.pop("transport_encryption", None)
        command = manager.format_kernel_cmd(extra_arguments=kwargs.pop("extra_arguments", []))
        ready: dict[str, Any] = await super().pre_launch(cmd=command, **kwargs)
        return ready

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the interpreter that `cmd` names; the launcher makes the rest of the command."""
        try:
            self._kernel = await self._launch(Path(cmd[0]))
        except BaseException:
            await self.cleanup()
            raise
        return self.connection_info

    async def _launch(self, python: Path) -> LaunchedKernel:
        assert self._run is not None
        assert self._launcher is not None
        workspace = Path(self.workspace) if self.workspace else self._run.path / "w"
        workspace.mkdir(mode=0o700, exist_ok=True)
        request = LaunchRequest(
            session=self.kernel_id or "",
            environment=self._environment(python),
            policy=Policy.for_allow(self.allow, self.profile),
            limits=Limits(memory_bytes=self.memory_mb * MIB) if self.memory_mb else Limits(),
            workspace=workspace,
        )
        return await self._launcher.launch(request, connection=_connection(self.connection_info))

    async def poll(self) -> int | None:
        """None while the kernel runs, else its exit code, negative for a signal."""
        # lets a loop that runs for this call alone notice the end
        await anyio.lowlevel.checkpoint()
        return self._exit_code() if self._kernel is not None else 0

    async def wait(self) -> int | None:
        """Return the exit code once the kernel has ended."""
        if self._kernel is None:
            return 0
        await self._kernel.wait()
        code = self._exit_code()
        await self._close_kernel()
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel, SIGINT to its process group."""
        if self._kernel is None or signum == 0:
            return
        if signum == signal.SIGINT:
            self._kernel.interrupt()
        elif signum == signal.SIGKILL:
            self._kernel.kill()
        else:
            self._kernel.signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """End every process of the sandbox."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove what the kernel leaves; on a restart its workspace stays."""
        await self._close_kernel()
        if not restart:
            self._run = None
            self._resources.close()

    async def _close_kernel(self) -> None:
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            await kernel.aclose()

    def _exit_code(self) -> int | None:
        if self._kernel is None or self._kernel.exit is None:
            return None
        status = self._kernel.exit
        return -status.signal if status.signal is not None else status.code

    def _environment(self, python: Path) -> KernelEnvironment:
        paths = [Path(path) for path in self.readonly]
        if python == Path(sys.executable):
            paths += [Path(sys.prefix), Path(sys.base_prefix), Path(sys.base_exec_prefix)]
        return KernelEnvironment(python=python, readonly=tuple(dict.fromkeys(paths)))


def _connection(info: Mapping[str, Any]) -> ConnectionInfo:
    key = info["key"]
    return ConnectionInfo(
        ip=info["ip"],
        key=key.decode() if isinstance(key, bytes) else key,
        signature_scheme=info["signature_scheme"],
        **{f"{channel}_port": info[f"{channel}_port"] for channel in _CHANNELS},
    )
