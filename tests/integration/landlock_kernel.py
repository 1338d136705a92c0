"""A real kernel under Landlock for tests; `python -m tests.integration.landlock_kernel CODE`.

As a program it is a small server: it runs CODE in its kernel, prints what the cell printed and then
stays until it is killed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from kernel_mcp.config.settings import Limits
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess, Launcher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.output.items import Event, Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.landlock import LandlockSandbox

ENVIRONMENT = KernelEnvironment(
    python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
)
POLICY = Policy.for_allow(("*",))
CELL_TIMEOUT_S = 60


@dataclass
class Cell:
    """The outcome of a cell: its status (None when the kernel died), error and printed text."""

    status: str | None = None
    error: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Stream))


class Notebook:
    """A kernel and the workspace it runs in."""

    def __init__(self, handle: KernelProcess, kernel: Kernel, workspace: Path) -> None:
        self.handle = handle
        self.kernel = kernel
        self.workspace = workspace

    async def run(self, code: str) -> Cell:
        """Run one cell to its end."""
        cell = Cell()
        run = self.kernel.submit(code, cell.events.append)
        with anyio.fail_after(CELL_TIMEOUT_S):
            await run.finished.wait()
        cell.status = run.status
        cell.error = f"{run.failure.name}: {run.failure.value}" if run.failure else ""
        return cell


@asynccontextmanager
async def notebook(
    runs: RunDirectory,
    *,
    sandbox: Sandbox | None = None,
    limits: Limits | None = None,
    launcher: Launcher | None = None,
    folder: Path | None = None,
    tools: bool = False,
) -> AsyncIterator[Notebook]:
    """Start a kernel in an empty workspace, below `folder` if given, and end it."""
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-", dir=folder) as made:
        assembly = KernelAssembly(sandbox or LandlockSandbox.detect(), runs)
        launcher = launcher or LocalLauncher(assembly)
        request = LaunchRequest(
            session="test",
            environment=ENVIRONMENT,
            policy=POLICY,
            limits=limits or Limits(),
            workspace=Path(made),
            tools=tools,
        )
        handle = await launcher.launch(request)
        kernel = Kernel(handle, environment=ENVIRONMENT, policy=POLICY)
        try:
            await kernel.ready(CELL_TIMEOUT_S)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kernel.watch)
                yield Notebook(handle, kernel, Path(made))
                handle.kill()
        finally:
            await kernel.aclose()


async def serve(code: str) -> None:
    """Run one cell, print its text and wait to be killed."""
    with RunDirectory.create() as runs:
        async with notebook(runs) as started:
            cell = await started.run(code)
            print(os.getpid(), started.handle.pid, cell.text, cell.error, flush=True)
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1])
