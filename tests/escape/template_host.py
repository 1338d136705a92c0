"""The host's half of the attacks from kernels that a template has forked.

`python -m tests.escape.template_host [unconfined | package]` prints the outcomes as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import anyio

from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import Launcher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.launch.template.forked import Forked
from kernel_mcp.output.items import Event, Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import GuestPaths
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.select import NoSandbox
from tests.escape.host import FOLDER, LIMITS, prepared
from tests.escape.inside import ATTACKS
from tests.escape.neighbours import CLEANUP, VICTIM, Neighbour
from tests.integration.template.bench import clone_environment

ENVIRONMENT = KernelEnvironment(
    python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
)
OPEN = Policy.for_allow(("*",))


async def forked_outcomes() -> dict[str, str]:
    """Return the outcomes of the corpus and of attacks on neighbours in kernels of one template."""
    sandbox = BwrapSandbox.detect()
    with RunDirectory.create() as runs:
        assembly = KernelAssembly(sandbox, runs)
        launcher = TemplateLauncher(
            assembly, cold=LocalLauncher(assembly), shared=(runs.path / "w",)
        )
        (runs.path / "w").mkdir(mode=0o700)
        try:
            launcher.prepare(ENVIRONMENT)
            assert await launcher.ready(ENVIRONMENT)
            async with kernels(launcher, runs, 3) as (attacker, victim, witness):
                found = await against_the_host(attacker)
                found |= await against(attacker, victim, confined=True)
                # the others live and answer
                assert await run(victim, "print('alive')") == "alive\n"
                assert await run(witness, "print('alive')") == "alive\n"
                return found
        finally:
            with anyio.CancelScope(shield=True):
                await launcher.aclose()


async def outcomes_of_a_package() -> dict[str, str]:
    """Return the outcomes of a package that attacks the template in which it is imported."""
    sandbox = BwrapSandbox.detect()
    with RunDirectory.create() as runs:
        library = runs.path / "library"
        library.mkdir()
        shutil.copy(FOLDER / "hostile_package.py", library)
        environment = clone_environment(runs.path, library)
        (runs.path / "w" / "neighbour").mkdir(parents=True)
        assembly = KernelAssembly(sandbox, runs)
        launcher = TemplateLauncher(
            assembly, cold=LocalLauncher(assembly), shared=(runs.path / "w",)
        )
        try:
            launcher.prepare(environment, ("hostile_package",))
            assert await launcher.ready(environment)
            template = launcher.template(environment)
            assert template is not None
            while "FOUND" not in template.output:
                await anyio.sleep(0.01)
            found: dict[str, str] = json.loads(template.output.split("FOUND")[1])
            return found
        finally:
            with anyio.CancelScope(shield=True):
                await launcher.aclose()


async def unconfined_outcomes() -> dict[str, str]:
    """Harmless ones of the same attacks where nothing confines anybody: do they work at all?

    Never as root: a mistake here would hit the machine.
    """
    if os.geteuid() == 0:
        raise PermissionError("attacks without a sandbox are not run as root")
    with RunDirectory.create() as runs:
        (runs.path / "w").mkdir(mode=0o700)
        launcher = LocalLauncher(KernelAssembly(_Unconfined(), runs))
        async with kernels(launcher, runs, 2) as (attacker, victim):
            found = await against(attacker, victim, confined=False)
            await run(victim, CLEANUP)
            return found


class _Unconfined(NoSandbox):
    """Kernels that keep out of each other's and of other users' way in /tmp."""

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        return replace(super().guest_paths(workspace, sockets), tmp=str(workspace))


@asynccontextmanager
async def kernels(
    launcher: Launcher, runs: RunDirectory, count: int
) -> AsyncIterator[list[Kernel]]:
    """Kernels with clients, their workspaces below `w` of the run directory."""
    made: list[Kernel] = []
    try:
        for number in range(count):
            workspace = runs.path / "w" / f"session-{number}"
            workspace.mkdir(mode=0o700)
            copied = workspace / "tests" / "escape"
            shutil.copytree(FOLDER, copied, ignore=shutil.ignore_patterns("__pycache__"))
            handle = await launcher.launch(
                LaunchRequest(
                    session=workspace.name,
                    environment=ENVIRONMENT,
                    policy=OPEN,
                    limits=LIMITS,
                    workspace=workspace,
                )
            )
            kernel = Kernel(handle, environment=ENVIRONMENT, policy=OPEN)
            made.append(kernel)
            await kernel.ready(20)
            await run(kernel, f"folder = {workspace.name!r}; import os; print(os.getcwd())")
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            for kernel in made:
                await kernel.aclose()


async def against_the_host(attacker: Kernel) -> dict[str, str]:
    """Run the corpus in a child of the kernel, as a bare interpreter."""
    with prepared() as target:
        task = {
            "target": asdict(target),
            "names": [attack.name for attack in ATTACKS],
            "workspace": "/workspace",
        }
        code = (
            "import subprocess, sys\n"
            "argv = [sys.executable, '-I', '-S', '-B', 'tests/escape/inside.py']\n"
            f"done = subprocess.run(argv, input={json.dumps(task)!r}, text=True,\n"
            "    capture_output=True)\n"
            "print(done.stdout or done.stderr)"
        )
        found: dict[str, str] = json.loads(await run(attacker, code, timeout=100))
        return found


async def against(attacker: Kernel, victim: Kernel, *, confined: bool) -> dict[str, str]:
    """Run the attacks on a neighbour in children of the attacker's kernel."""
    marker, name = f"secret-{secrets.token_hex(8)}", f"kernel-mcp-{secrets.token_hex(4)}"
    key = secrets.randbelow(2**30) + 1
    told = json.loads(await run(victim, VICTIM.format(marker=marker, name=name, key=key)))
    place = (await run(victim, "print(os.getcwd())")).strip()
    handle = victim.handle
    process = handle.process
    sockets = Path(handle.sockets.connection.ip).parent
    neighbour = Neighbour(
        marker=marker,
        name=name,
        key=key,
        pid=handle.pid,
        init=process.start.init.pid if isinstance(process.start, Forked) else _parent(handle.pid),
        templates=_ancestors(handle.pid),
        workspace=(place if place != "/workspace" else str(sockets.parents[1] / "w" / "session-1")),
        sockets=str(sockets),
        key_digest=hashlib.sha256(handle.sockets.connection.key.encode()).hexdigest(),
        **told,
    )
    code = (
        "import json, os, sys\n"
        "sys.path.insert(0, os.getcwd())\n"
        "from tests.escape import neighbours\n"
        f"task = json.loads({json.dumps(asdict(neighbour))!r})\n"
        f"print(json.dumps(neighbours.run(task, confined={confined})))"
    )
    found: dict[str, str] = json.loads(await run(attacker, code, timeout=200))
    return found


async def run(kernel: Kernel, code: str, *, timeout: float = 20) -> str:
    """Return the standard output of a cell."""
    events: list[Event] = []
    cell = kernel.submit(code, events.append)
    with anyio.fail_after(timeout):
        await cell.finished.wait()
    if cell.status != "ok":
        raise RuntimeError(f"the cell ended as {cell.status}: {cell.failure} {events}")
    return "".join(
        event.text for event in events if isinstance(event, Stream) and event.name == "stdout"
    )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ancestors(pid: int) -> list[int]:
    """The processes between the kernel and this one."""
    found = []
    while (pid := _parent(pid)) not in (os.getpid(), 0, 1):
        found.append(pid)
    return found


if __name__ == "__main__":
    forms = {"unconfined": unconfined_outcomes, "package": outcomes_of_a_package}
    form = forms[sys.argv[1]] if sys.argv[1:] else forked_outcomes
    json.dump(anyio.run(form), sys.stdout)
