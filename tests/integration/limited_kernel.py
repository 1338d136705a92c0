"""A real kernel within limits, without a server: for tests of what enforces them.

Run as a module with JSON (`Limits` by field, then cells) it prints what became of each cell, so
that tests can have it done by another user.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess, Launcher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.output.displays import DisplayIndex
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.execution import run_cell
from tests.run_folder import own_folder

ENVIRONMENT = KernelEnvironment(
    python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
)


@dataclass(frozen=True)
class Ended:
    """How a cell ended; `seconds` of wall clock."""

    status: str
    cause: str
    text: str
    notices: list[str]
    seconds: float


class LimitedKernel:
    """Runs cells one after the other."""

    def __init__(
        self, kernel: Kernel, workspace: Path, records: Path, resources: ResourceManager
    ) -> None:
        self.kernel = kernel
        self.workspace = workspace
        self.resources = resources
        self._records = records
        self._count = 0

    @property
    def handle(self) -> KernelProcess:
        return self.kernel.handle

    async def run(self, code: str, *, timeout: float = 60, grace: float = 1) -> Ended:
        """Run a cell as a session does."""
        self._count += 1
        log = OutputLog(self._records, self._count, index=DisplayIndex())
        cell = Cell(self._count, code, timeout, log)
        begin = time.monotonic()
        try:
            outcome = await run_cell(self.kernel, cell, grace_s=grace, cpu_s=0.0)
            cell.finish(outcome, time.monotonic())
        except KernelMcpError as error:
            cell.fail(error, time.monotonic())
        assert cell.outcome is not None
        took = time.monotonic() - begin
        text, cause = log.text(), cell.outcome.cause or ""
        return Ended(cell.outcome.status.value, cause, "".join(text), cell.notices, round(took, 3))


@asynccontextmanager
async def limited_kernel(
    limits: Limits | None = None,
    *,
    groups: bool = True,
    forked: bool = False,
    sandbox: Sandbox | None = None,
) -> AsyncIterator[LimitedKernel]:
    """A kernel that may import anything; without `groups` as on a system that has none."""
    async with AsyncExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=own_folder())))
        run = stack.enter_context(RunDirectory.create(base / "r"))
        workspace, records = run.path / "w" / "1", run.path / "l"
        for folder in (workspace.parent, workspace, records):
            folder.mkdir(mode=0o700)
        sandbox = sandbox or select_sandbox("bwrap")
        resources = (
            ResourceManager.create(run.path, sandbox.report())
            if groups
            else ResourceManager(refusal="a test wants none")
        )
        await stack.enter_async_context(resources.running())
        assembly = KernelAssembly(sandbox, run, resources=resources)
        launcher: Launcher = LocalLauncher(assembly)
        if forked:
            assert isinstance(sandbox, BwrapSandbox)
            launcher = template = TemplateLauncher(
                assembly, cold=launcher, shared=[workspace.parent]
            )
            template.prepare(ENVIRONMENT)
            assert await template.ready(ENVIRONMENT)
        stack.push_async_callback(launcher.aclose)
        handle = await launcher.launch(
            LaunchRequest(
                session="test",
                environment=ENVIRONMENT,
                policy=Policy.for_allow(["*"]),
                limits=limits or Limits(),
                workspace=workspace,
            )
        )
        kernel = Kernel(handle, environment=ENVIRONMENT, policy=Policy.for_allow(["*"]))
        stack.push_async_callback(kernel.aclose)
        await kernel.ready(20)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.watch)
            yield LimitedKernel(kernel, workspace, records, resources)
            tasks.cancel_scope.cancel()


async def _main(limits: Limits, cells: list[str]) -> None:
    async with limited_kernel(limits) as kernel:
        found: list[dict[str, Any]] = [asdict(await kernel.run(code)) for code in cells]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    wanted, *codes = json.loads(sys.argv[1])
    anyio.run(_main, Limits(**wanted), codes)
