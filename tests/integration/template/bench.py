"""A launcher with a ready template, and the processes below this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.launch.template.forked import Forked
from kernel_mcp.output.items import Event, Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from tests.integration.processes import named
from tests.integration.unprivileged import as_ordinary_user

ENVIRONMENT = KernelEnvironment(
    python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
)


OPEN = Policy.for_allow(("*",))


class Bench:
    """A launcher with a ready template, and kernels with clients."""

    def __init__(self, launcher: TemplateLauncher, runs: RunDirectory, workspaces: Path) -> None:
        self.launcher = launcher
        self.runs = runs
        self.workspaces = workspaces
        self.kernels: list[Kernel] = []

    def request(self, **changes: Any) -> LaunchRequest:
        workspace = self.workspaces / f"w{len(list(self.workspaces.iterdir()))}"
        workspace.mkdir(mode=0o700)
        values: dict[str, Any] = {
            "session": workspace.name,
            "environment": ENVIRONMENT,
            "policy": OPEN,
            "limits": Limits(),
            "workspace": workspace,
        }
        return LaunchRequest(**(values | changes))

    async def kernel(self, **changes: Any) -> Kernel:
        return await self.meet(await self.launcher.launch(self.request(**changes)))

    async def forked(self, **changes: Any) -> Kernel:
        kernel = await self.kernel(**changes)
        assert is_forked(kernel)
        return kernel

    async def meet(self, handle: KernelProcess) -> Kernel:
        kernel = Kernel(handle, environment=ENVIRONMENT, policy=OPEN)
        self.kernels.append(kernel)
        await kernel.ready(10)
        return kernel

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            for kernel in self.kernels:
                await kernel.aclose()
            await self.launcher.aclose()


def is_forked(kernel: Kernel) -> bool:
    return isinstance(kernel.handle.process.start, Forked)


@asynccontextmanager
async def bench(preload: tuple[str, ...] = (), *, ready: bool = True) -> AsyncIterator[Bench]:
    sandbox = BwrapSandbox.detect()
    with RunDirectory.create(Path("/tmp", f"kmt-{os.getpid()}")) as runs:
        workspaces = runs.path / "w"
        workspaces.mkdir(mode=0o700)
        assembly = KernelAssembly(sandbox, runs)
        launcher = TemplateLauncher(assembly, cold=LocalLauncher(assembly), shared=(workspaces,))
        made = Bench(launcher, runs, workspaces)
        try:
            if ready:
                launcher.prepare(ENVIRONMENT, preload)
                with anyio.fail_after(60):
                    assert await launcher.ready(ENVIRONMENT)
                    while len(named("kernel-template", below=os.getpid())) != 1:
                        await anyio.lowlevel.checkpoint()  # one that has given its place away ends
            yield made
        finally:
            await made.aclose()
    runs.path.parent.rmdir()


async def run(kernel: Kernel, code: str, status: str | None = "ok") -> str:
    """Return the output of a cell."""
    events: list[Event] = []
    cell = kernel.submit(code, events.append)
    with anyio.fail_after(60):
        await cell.finished.wait()
    assert cell.status == status, (cell.failure, events)
    return "".join(event.text for event in events if isinstance(event, Stream))


def clone_environment(folder: Path, *paths: Path) -> KernelEnvironment:
    """An environment with what the tests run in and further folders on its path."""
    bin_folder = folder / "env" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "env" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    own = Path(sys.prefix, "lib", version, "site-packages")
    (packages / "more.pth").write_text("\n".join(map(str, (*paths, own))) + "\n")
    return KernelEnvironment(
        python=bin_folder / "python",
        readonly=(folder / "env", *paths, Path(sys.prefix), Path(sys.base_prefix)),
    )


def holds_for_an_ordinary_user(file: str) -> None:
    """Run the tests of a file without any privilege."""
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(as_ordinary_user(argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
