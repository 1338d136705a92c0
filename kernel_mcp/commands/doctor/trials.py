"""Trials that run code in a kernel and return checks; a trial in which the server is killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import anyio

from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest, Support
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.mounts import MountGrants
from kernel_mcp.launch.network import Network
from kernel_mcp.launch.rundir import RunDirectory, support_of
from kernel_mcp.linux.process import own_module
from kernel_mcp.network.secrets import PREFIX
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.policy import Policy
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.remedies import for_cgroups
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.sandbox.self_test import Check, prepared_self_test, self_test_source
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.sessions.execution import run_cell
from kernel_mcp.units import MIB

LIMITS = Limits(memory_bytes=256 * MIB, pids=64, disk_bytes=64 * MIB, tmp_bytes=32 * MIB)
CELL_TIMEOUT_S = 30.0
UNTRIED = "put right what hindered the trial, then run this again: of the sandbox it shows nothing"
PROMPT_S = 2.0
"""Seconds within which an interrupt has to work."""
_RUN = "import json\ndef tell(**facts): print(json.dumps(facts))\n"
_SELF_TEST = """
import os, types
test = types.ModuleType('selftest')
exec({source!r}, vars(test))
opened = tuple(map(int, os.listdir('/proc/self/fd')))
tell(**test.gather({{**{task!r}, 'workspace': os.getcwd()}}, inherited=opened))
"""
_OWN = "no descriptors leaked"
"""A check that means nothing in a kernel, which has descriptors of its own."""
_ASK_PROXY = """
import socket
try:
    with socket.create_connection(('127.0.0.1', {port}), 15) as proxy:
        proxy.sendall(b'CONNECT 169.254.169.254:443 HTTP/1.1\\r\\n\\r\\n')
        tell(said=proxy.recv(200).partition(b'\\r')[0].decode())
except OSError as error: tell(said=str(error))
"""
_USE_GRANTS = """
import errno, importlib.metadata, os, stat
def problem(path, writable):
    try:
        folder = os.path.isdir(path)
        os.listdir(path) if folder else os.close(os.open(path, os.O_RDONLY))
    except OSError as error: return f'a cell cannot read it: {{error.strerror}}'
    try: os.close(os.open(path, os.O_WRONLY | (os.O_TMPFILE if folder else 0)))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP and os.access(path, os.W_OK): return ''
        return f'a cell cannot write there: {{error.strerror}}' * writable
    return 'a cell can write there' * (not writable)
def usable(path):
    try: return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError: return False
def there(name):
    try: return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError: return False
tell(folders=[problem(*each) for each in {folders!r}],
     devices=[usable(each) for each in {devices!r}],
     variables=[bool(os.environ.get(each)) for each in {variables!r}],
     secrets=[os.environ.get(each, '').startswith({prefix!r}) for each in {secrets!r}],
     packages=[each for each in {packages!r} if not there(each)])
"""
_ONE_PROCESS = """
held = []
try:
    for _ in range(40): held.append(b'x' * (32 << 20))
    tell(mib=32 * len(held))
except MemoryError:
    mib = 32 * len(held)
    held.clear()
    tell(refused=mib)
"""
_SEVERAL = """
import select, subprocess, sys, time
code = "import sys; data = b'x' * (128 << 20); print(flush=True); sys.stdin.read()"
pipe = subprocess.PIPE
made = []
try:
    for _ in range(5):
        made.append(subprocess.Popen([sys.executable, '-I', '-S', '-c', code], stdin=pipe,
                                     stdout=pipe, stderr=subprocess.DEVNULL))
        made[-1].stdout.readline()
    alive, end = list(made), time.monotonic() + 1.5
    while len(alive) >= 4 and (left := end - time.monotonic()) > 0:
        ended, _, _ = select.select([each.stdout for each in alive], [], [], left)
        alive = [each for each in alive if each.stdout not in ended]
    tell(alive=len(alive))
except OSError as error:
    tell(alive=0, error=str(error))
finally:
    for process in made: process.kill()
"""
_THREADS = """
import threading
threading.stack_size(256 << 10)
done = threading.Event()
started = []
try:
    for _ in range(400):
        thread = threading.Thread(target=done.wait)
        thread.start()
        started.append(thread)
    tell(started=len(started))
except RuntimeError:
    tell(refused=len(started))
finally:
    done.set()
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of a kernel; `name` is shown when it cannot run."""

    name: str
    perform: Callable[[TrialKernel], Awaitable[list[Check]]]


class TrialKernel:
    """A kernel under examination."""

    def __init__(self, kernel: Kernel, records: Path) -> None:
        self.kernel = kernel
        self.records = records
        self._count = 0

    def cell(self, code: str) -> Cell:
        self._count += 1
        log = OutputLog(self.records, self._count)
        return Cell(self._count, _RUN + code, CELL_TIMEOUT_S, log)

    async def run(self, cell: Cell) -> Cell:
        """Run a cell to its end."""
        cell.started = time.monotonic()
        outcome = await run_cell(self.kernel, cell, grace_s=PROMPT_S, cpu_s=0)
        cell.finish(outcome, time.monotonic())
        return cell

    async def facts(self, code: str) -> tuple[Cell, dict[str, Any]]:
        """Run code that calls `tell`; return the cell and the facts, empty if there are none."""
        cell = await self.run(self.cell(code))
        for line in "".join(cell.log.text()).splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return cell, found
        return cell, {}


async def interrupt(target: TrialKernel) -> list[Check]:
    """Check that an interrupt ends an endless loop and keeps the variables."""
    await target.run(target.cell("kept = 42"))
    cell = target.cell("print('running', flush=True)\nwhile True: pass")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(target.run, cell)
        await cell.changed()
        began = time.monotonic()
        cell.stop(StopReason.INTERRUPT)
        await cell.finished.wait()
    took = time.monotonic() - began
    _, facts = await target.facts("tell(kept=kept)")
    worked = cell.status is Status.INTERRUPTED and facts.get("kept") == 42
    found = f"{took:.2f} s, variables {'kept' if facts.get('kept') == 42 else 'lost'}"
    return [
        Check("interrupt works", worked and took < PROMPT_S, found, "the machine is overloaded")
    ]


async def coming_back(target: TrialKernel) -> list[Check]:
    """Check that a checkpoint replaces a kernel that dies. Raises LaunchError."""
    await target.run(target.cell("kept = 42"))
    kernel, group = target.kernel, target.kernel.handle.sandbox_group
    assert group is not None
    made, _ = await kernel.checkpoint()
    await target.run(target.cell("kept = 0\nimport os\nos.kill(os.getpid(), 9)"))
    await kernel.dead.wait()
    began = time.monotonic()
    await group.clear()
    fresh = target.kernel = await kernel.wake(made)
    took = time.monotonic() - began
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fresh.watch)
            _, facts = await target.facts("tell(kept=kept)")
            fresh.kill()
    finally:
        await fresh.aclose()
    found = f"variables back in {took:.2f} s" if facts.get("kept") == 42 else "variables lost"
    return [Check(CHECKPOINTS, facts.get("kept") == 42, found, "use --checkpoints off")]


CHECKPOINTS = "a kernel that died comes back"


async def memory(target: TrialKernel) -> list[Check]:
    """Check that one process cannot allocate several times its budget."""
    cell, facts = await target.facts(_ONE_PROCESS)
    ended = cell.status is Status.KILLED
    found = (
        f"killed ({cell.outcome.cause if cell.outcome else ''})"
        if ended
        else f"refused after {facts.get('refused', '?')} MiB of {LIMITS.memory_bytes // MIB}"
    )
    if "mib" in facts:
        found = f"got {facts['mib']} MiB, the limit is {LIMITS.memory_bytes // MIB}"
    return [Check("memory limit enforced", ended or "refused" in facts, found, for_cgroups())]


async def memory_of_all(target: TrialKernel) -> list[Check]:
    """Check that five processes cannot allocate half the budget each."""
    cell, facts = await target.facts(_SEVERAL)
    ended = cell.status is Status.KILLED
    alive = facts.get("alive", 0)
    found = f"killed ({cell.outcome.cause if cell.outcome else ''})" if ended else f"{alive} of 5"
    return [
        Check(
            "memory limit holds for several processes",
            ended or ("alive" in facts and alive < 4),
            found if ended else f"{found} processes of 128 MiB lived",
            for_cgroups(),
        )
    ]


_OTHERS_ENDED = 16
"""Tolerance of RLIMIT_NPROC, which counts other processes of the user too."""


async def processes(target: TrialKernel) -> list[Check]:
    """Check that no more threads than permitted can be started."""
    cell, facts = await target.facts(_THREADS)
    refused = facts.get("refused")
    ended = cell.status is Status.KILLED
    found = f"refused after {refused} of {LIMITS.pids}" if refused is not None else "killed"
    if "started" in facts:
        found = f"{facts['started']} threads started, the limit is {LIMITS.pids}"
    held = ended or (refused is not None and refused <= LIMITS.pids + _OTHERS_ENDED)
    return [Check("pids limit enforced", held, found, for_cgroups())]


TRIALS = (
    Trial("interrupt works", interrupt),
    Trial("pids limit enforced", processes),  # while no other kernel of this user starts
    Trial("memory limit enforced", memory),
    Trial("memory limit holds for several processes", memory_of_all),
)


def through_self_test(assembly: KernelAssembly, environment: KernelEnvironment) -> Trial:
    """Return a trial of the boundary: the self-test of each start, run by a cell."""
    report, mounts = assembly.sandbox.report(), [each.mount for each in assembly.mounts.shown]
    guests = [Path(each.guest) for each in mounts]
    writable = [each.guest for each in mounts if each.writable]

    async def perform(target: TrialKernel) -> list[Check]:
        """Check from a cell what the self-test checks before there are kernels."""
        visible = (*environment.readonly, *guests, *report.listable)
        with (
            prepared_self_test(visible, calls=False, limits=LIMITS) as test,
            NamedTemporaryFile(prefix=".kernel-mcp-doctor-") as secret,
        ):
            os.fchmod(secret.fileno(), 0o644)
            secret.write(b"secret")
            secret.flush()
            hidden = [*test.task["hidden"], secret.name]
            closed = [each for each in test.task["unwritable"] if each not in writable]
            task = {**test.task, "hidden": hidden, "unwritable": closed}
            code = _SELF_TEST.format(source=self_test_source(), task=task)
            cell, facts = await target.facts(code)
            if not facts:
                said = "".join(cell.log.text())[-300:] or cell.status.value
                return [Check("a cell runs", False, said)]
            excused = (_OWN, *report.unpromised)
            checks = [each for each in test.checks(facts) if each.name not in excused]
            failed = [replace(e, name=f"in a cell: {e.name}") for e in checks if not e.passed]
            held = f"{len(checks) - len(failed)} of {len(checks)} checks of the boundary"
            return [Check("a cell is confined", not failed, held), *failed]

    return Trial("a cell is confined", perform)


def through_proxy(network: Network) -> Sequence[Trial]:
    """Return a trial of the network; none if it is closed."""
    if not network:
        return ()

    async def perform(target: TrialKernel) -> list[Check]:
        """Check that the proxy refuses an address that no rule permits: cloud metadata."""
        cell, facts = await target.facts(_ASK_PROXY.format(port=network.addresses[0].port))
        said = str(facts.get("said") or "".join(cell.log.text())[-300:])
        refused = said.startswith("HTTP/1.1 403 ")
        return [Check("the network is reached by its proxy alone", refused, said)]

    return (Trial("the network is reached by its proxy alone", perform),)


def through_grants(
    mounts: MountGrants, settings: Settings, environment: KernelEnvironment, files: Sequence[str]
) -> Sequence[Trial]:
    """Return a trial of the folders, devices, variables, secrets and packages granted to code.

    `files` are the flags whose files list packages. No trial if nothing is granted.
    """
    known = sorted(each.partition("==")[0] for each in environment.packages)
    own = [f"--python {settings.python}"] if environment.support and not files else []
    sources = [*files, *own]
    wanted: dict[str, list[Any]] = {
        "folders": [(each.mount.guest, each.mount.writable) for each in mounts.shown],
        "devices": [each.guest for each in mounts.devices],
        "variables": [each.name for each in settings.variables],
        "secrets": [each.name for each in settings.secrets],
        "packages": known if sources else [],
    }
    if not any(wanted.values()):
        return ()

    async def perform(target: TrialKernel) -> list[Check]:
        """Check access to folders, devices, variables, secrets and packages."""
        cell, facts = await target.facts(_USE_GRANTS.format(**wanted, prefix=PREFIX))
        if not facts:
            return [Check("a cell uses what is opened", False, "".join(cell.log.text())[-300:])]
        found = []
        for shown, problem in zip(mounts.shown, facts["folders"], strict=True):
            name, remedy = f"folder {shown.mount.guest}", "change its rights, or --mount"
            found.append(Check(name, not problem, problem or str(shown), remedy))
        for device, usable in zip(mounts.devices, facts["devices"], strict=True):
            said = str(device) if usable else "a cell finds no device there"
            found.append(Check(f"device {device.guest}", usable, said, "change --device"))
        for each, filled in zip(settings.variables, facts["variables"], strict=True):
            said = "a cell reads it" if filled else "a cell finds it empty"
            passed = filled == bool(each.value)
            found.append(Check(f"variable {each.name}", passed, said, "change --env"))
        for secret, passed in zip(settings.secrets, facts["secrets"], strict=True):
            said = "a cell has a placeholder" if passed else "a cell has no placeholder"
            found.append(Check(f"secret {secret}", passed, said, "change --secret"))
        if wanted["packages"]:
            missing = facts["packages"]
            said = f"a cell misses {_all(missing)}" if missing else f"{len(known)}, all there"
            name = f"packages of {', '.join(sources)}"
            found.append(Check(name, not missing, said, "report this as a defect"))
        return found

    return (Trial("a cell uses what is opened", perform),)


def _all(values: Any) -> str:
    return ", ".join(map(str, values)) or "none"


# As a program, this module is the server that is killed: JSON on stdin describes its kernel.
START_TIMEOUT_S = 60.0
GONE_S = 2.0
NAME = "orphan dies"


def killed_server(
    backend: str, environment: KernelEnvironment, runs: Path, container: ContainerOptions
) -> list[Check]:
    """Check that a kernel ends within `GONE_S` after its server is killed; blocks."""
    task = {
        "backend": backend,
        "container": asdict(container),
        "python": str(environment.python),
        "readonly": list(map(str, environment.readonly)),
        "support": support_of(environment),
        "runs": str(runs),
    }
    server = subprocess.Popen(
        own_module("kernel_mcp.commands.doctor.trials"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(task))
            server.stdin.close()
            line = _line(server)
            if not line.strip().isdigit():
                server.kill()
                assert server.stderr is not None
                said = server.stderr.read()[-300:].strip()
                told = f"no kernel could be started: {said}"
                return [Check(NAME, False, told, UNTRIED, tried=False)]
            kernel = os.pidfd_open(int(line))
        finally:
            server.kill()
        began = time.monotonic()
        try:
            gone, _, _ = select.select([kernel], [], [], GONE_S)
        finally:
            os.close(kernel)
    took = (time.monotonic() - began) * 1000
    found = f"gone {took:.0f} ms after its server" if gone else f"alive after {GONE_S:g} s"
    return [Check(NAME, bool(gone), found)]


def _line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], START_TIMEOUT_S)
    return server.stdout.readline() if ready else ""


async def _serve(task: dict[str, Any]) -> None:
    with RunDirectory.create(Path(task["runs"])) as runs:
        workspace = runs.path / "w"
        workspace.mkdir(mode=0o700)
        container = ContainerOptions(**task["container"])
        sandbox = select_sandbox(task["backend"], container=container)
        launcher = LocalLauncher(KernelAssembly(sandbox, runs))
        python, readonly = Path(task["python"]), tuple(map(Path, task["readonly"]))
        below = task["support"]
        support = Support(Path(below[0]), below[1] == "first", ()) if below else None
        environment = KernelEnvironment(python, readonly, support=support)
        handle = await launcher.launch(
            LaunchRequest(
                session="doctor",
                environment=environment,
                policy=Policy.for_allow(("*",)),
                limits=LIMITS,
                workspace=workspace,
            )
        )
        print(handle.pid, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_serve, json.load(sys.stdin))
