"""Sandboxed kernels for any program that uses jupyter_client: `kernel-mcp-sandbox`."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import anyio
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Int, List, Unicode

from kernel_mcp.config.settings import Limits
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.policy import Policy, profile_in_force
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.units import MIB

T = TypeVar("T")

RECONNECT_S = 0.25
"""Seconds: clients of an ended kernel reconnect after 0.1 to 0.2 s.

From zmq_setsockopt(3): ZMQ_RECONNECT_IVL, 0.1 s, and a random interval of up to the same length.
"""
_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_SHELL_ASIDE = len(_CHANNELS) + 1


class KernelLoop:
    """An event loop in its own thread, as callers may run a new loop for each call."""

    def __init__(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        # a daemon thread, so that a program can exit without shutting its kernel down
        serve = partial(asyncio.run, self._serve(started))
        self._thread = Thread(target=serve, name="kernels", daemon=True)
        self._thread.start()
        self._loop = started.result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on this loop; cancelled with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Stop the loop and its thread once all its tasks, cancelled ones included, have ended."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


class SandboxProvisioner(KernelProvisionerBase):
    """Starts the kernel of a Jupyter kernel spec inside the sandbox.

    The traits can be set in the kernel spec, below `metadata.kernel_provisioner.config`. A restart
    keeps the connection, so that clients reconnect to the new kernel.
    """

    sandbox = Unicode("auto", help="Backend, as `--sandbox` names it").tag(config=True)
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
        self._loop: KernelLoop | None = None
        self._relaunched = False
        self._kernel: KernelProcess | None = None

    @property
    def has_process(self) -> bool:
        """Return True if a kernel was started and its end was not awaited yet."""
        return self._kernel is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Set the manager's transport to ipc and write its connection file."""
        self._relaunched = self._run is not None
        if self._run is None:
            sandbox = await anyio.to_thread.run_sync(proven_sandbox, self.sandbox)
            self._run = self._resources.enter_context(RunDirectory.create())
            resources = ResourceManager.create(self._run.path, sandbox.report())
            self._resources.callback(resources.close)
            self._loop = KernelLoop()
            self._resources.callback(self._loop.close)
            self._launcher = LocalLauncher(KernelAssembly(sandbox, self._run, resources=resources))
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
        """Start the interpreter that `cmd` names; the launcher builds the rest of the command."""
        try:
            await self._on_loop(self._launch(Path(cmd[0])))
        except BaseException:
            await self.cleanup()
            raise
        return self.connection_info

    async def _launch(self, python: Path) -> None:
        assert self._run is not None
        assert self._launcher is not None
        workspace = Path(self.workspace) if self.workspace else self._run.path / "w"
        workspace.mkdir(mode=0o700, exist_ok=True)
        request = LaunchRequest(
            session=self.kernel_id or "",
            environment=self._environment(python),
            policy=Policy.for_allow(
                self.allow, profile_in_force(self.profile, confined=self.sandbox != "none")
            ),
            limits=Limits(memory_bytes=self.memory_mb * MIB) if self.memory_mb else Limits(),
            workspace=workspace,
        )
        wanted = _connection(self.connection_info)
        if not self._relaunched:
            self._kernel = await self._launcher.launch(request, connection=wanted)
            return
        # publish the shell socket last: else a cell could run before clients reconnect to iopub
        aside = replace(wanted, shell_port=_SHELL_ASIDE)
        self._kernel = await self._launcher.launch(request, connection=aside)
        await anyio.sleep(RECONNECT_S)
        Path(aside.path(aside.shell_port)).rename(wanted.path(wanted.shell_port))

    async def poll(self) -> int | None:
        """Return None while the kernel runs, then its exit code, negative for a signal."""
        return self._exit_code() if self._kernel is not None else 0

    async def wait(self) -> int | None:
        """Return the exit code once the kernel has ended."""
        if self._kernel is None:
            return 0
        await self._on_loop(self._kernel.wait())
        code = self._exit_code()
        await self._close_kernel()
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel; SIGINT goes to its process group."""
        if self._kernel is not None and signum != 0:
            await self._on_loop(_signal(self._kernel, signum))

    async def kill(self, restart: bool = False) -> None:
        """Kill every process of the sandbox."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Send SIGTERM to the kernel."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Close the kernel; unless it restarts, also remove the run directory and its workspace."""
        await self._close_kernel()
        if not restart:
            self._run = None
            self._resources.close()

    async def _close_kernel(self) -> None:
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            await self._on_loop(kernel.aclose())

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return await self._loop.run(work)

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


async def _signal(kernel: KernelProcess, signum: int) -> None:
    if signum == signal.SIGINT:
        kernel.interrupt()
    elif signum == signal.SIGKILL:
        kernel.kill()
    else:
        kernel.signal(signum)


def _connection(info: Mapping[str, Any]) -> ConnectionInfo:
    key = info["key"]
    return ConnectionInfo(
        ip=info["ip"],
        key=key.decode() if isinstance(key, bytes) else key,
        signature_scheme=info["signature_scheme"],
        **{f"{channel}_port": info[f"{channel}_port"] for channel in _CHANNELS},
    )
