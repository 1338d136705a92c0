"""Long code is checked in a process of its own: with the same findings, whatever becomes of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.errors import ServerFailure
from kernel_mcp.linux.commands import CompletedCommand, output_of
from kernel_mcp.policy import Policy
from kernel_mcp.policy.check import check
from kernel_mcp.policy.source import MAX_CODE
from kernel_mcp.policy.worker import MOST_BYTES, MOST_CPU_S
from kernel_mcp.sessions import checking
from kernel_mcp.sessions.cell import Status
from kernel_mcp.sessions.checking import LONG_CODE_CHARS, MOST_PROCESSES, Checks
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from tests.integration.processes import children
from tests.sampled import sampled
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


def steps(module: str, *, once: bool) -> str:
    return f"Ask for {module}{' once' if once else ''}." if module != "os" else ""


POLICY = Policy.for_allow(["numpy"], "guarded", steps).with_installed(["numpy", "km_other"])
STRICT = Policy.for_allow([], "strict", steps)
EVERYTHING = Policy.for_allow(["*"])
FILLING = "value = [n * 2 for n in range(10)]\nprint(value)\n" * 400
DENSE = "x\n" * 40_000
CODES = {
    "plain": FILLING,
    "refused": FILLING + "import os, pickle, km_gone\n__import__('shutil')\n",
    "caught": FILLING + "try:\n    import os\nexcept ImportError:\n    pass\n",
    "many": FILLING + "".join(f"import km_{n}\n" for n in range(200)),
    "broken": FILLING + "x = (1\nimport os\n",
    "warned": FILLING + "1 is 1\n",
    "magic": FILLING + "!ls\n%pip install polars\n",
    "compiler": FILLING + "return 1\n",
    "names": FILLING + "valeu\nknown\n",
    "own": FILLING + "import helper\n",
    "nested": FILLING + "x = " + "-" * 20_000 + "1\n",
    "surrogate": FILLING + "x = '\ud800'\n",
    "null": FILLING + "x = '\0'\n",
    "unicode": FILLING + "straße = '🎉'; import os\n",
    "metadata": "# /// script\n# dependencies = ['???']\n# ///\n" + FILLING,
    "very long": FILLING * 5 + "import os\n",
}


class Processes:
    """Stands for `output_of`: counts processes, and lets them start once `gate` is open."""

    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.running = self.most = self.started = 0

    async def __call__(self, argv: list[str], **how: Any) -> CompletedCommand:
        self.started += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            return await output_of(argv, **how)
        finally:
            self.running -= 1


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(checking, "output_of", made)
    return made


def replaced(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Start another program for each check; a check in this process fails."""
    monkeypatch.setattr(checking, "bare_program", lambda _, *words, **__: [*argv, *words])
    monkeypatch.setattr(checking, "check", None)


@pytest.mark.parametrize(
    "name", sampled(CODES, "plain", "refused", "broken", "nested", "surrogate", "metadata")
)
async def test_it_finds_what_is_found_here(name: str, processes: Processes) -> None:
    code = CODES[name]
    processes.gate.set()
    wishes: dict[str, Any] = {
        "known_names": frozenset({"known", "value"}),
        "own_modules": frozenset({"helper"}),
        "python": "3.9.1",
    }
    assert await Checks().check(code, POLICY, **wishes) == check(code, POLICY, **wishes)
    assert processes.started == 1


@pytest.mark.parametrize("policy", [STRICT, EVERYTHING, replace(POLICY, once=True)])
async def test_it_judges_by_the_policy_of_the_session(policy: Policy) -> None:
    code = CODES["refused"]
    found = await Checks().check(code, policy, compiled=False)
    assert found == check(code, policy, compiled=False)


async def test_short_code_and_what_is_too_long_to_be_read_take_no_process(
    processes: Processes,
) -> None:
    for code in ("1", "import os", "#" * LONG_CODE_CHARS, "#" * (MAX_CODE + 1)):
        assert await Checks().check(code, POLICY) == check(code, POLICY)
    assert processes.started == 0


async def test_other_tasks_have_their_turns_meanwhile() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await Checks().check(DENSE, POLICY, compiled=False)
        assert turns > 100
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("signal", ["SEGV", "XCPU"])
async def test_code_that_crashes_the_parser_or_computes_for_ever_is_refused(
    signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, "bash", "-c", f"kill -{signal} $$")
    report = await Checks().check(FILLING, POLICY)
    assert [(each.kind, each.line) for each in report.refusals] == [("depth", 1)]


@pytest.mark.skipif(sys.version_info[:2] > (3, 10), reason="only Python 3.10 crashes")
async def test_an_expression_that_crashes_the_parser_is_refused() -> None:
    for expression in ("a" + ".b" * 120_000, "f" + "()" * 120_000, "+".join(["1"] * 120_000)):
        report = await Checks().check(expression, POLICY)
        assert [each.kind for each in report.refusals] == ["depth"]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (["sh", "-c", "echo oops >&2; exit 3"], "ended with code 3"),
        (["sh", "-c", "kill -KILL $$"], "ended with code -9"),
        (["echo", "no report"], "Expecting value"),
        (["/nowhere/at/all"], "has been removed"),
    ],
)
async def test_code_whose_check_fails_is_not_run(
    program: list[str], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replaced(monkeypatch, *program)
    with pytest.raises(ServerFailure, match=rf"nothing of it was run: .*({why}).*smaller"):
        await Checks().check(FILLING, POLICY)
    assert ("oops" in caplog.text) == ("oops" in program[-1])
    assert "a check has failed" in caplog.text


async def test_many_at_once_get_their_own_answers(processes: Processes) -> None:
    wrong = []

    async def ask(made: Checks, number: int) -> None:
        code, policy = f"{FILLING}import km_{number}\n", (POLICY, STRICT)[number % 2]
        if await made.check(code, policy, compiled=False) != check(code, policy, compiled=False):
            wrong.append(number)

    processes.gate.set()
    made = Checks()
    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(ask, made, number)
    assert wrong == []
    assert (processes.started, processes.most) == (6, MOST_PROCESSES)


FACTS = """
import json, os, resource, sys
from kernel_mcp.policy import Report, worker
def check(*_, **__):
    limits = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
    descriptors = os.listdir("/proc/self/fd")
    return Report(True, note=json.dumps([limits, files, descriptors, [*os.environ]]))
worker.check = check
sys.exit(worker.main(sys.argv[1:]))
"""


async def test_the_process_is_bounded_and_has_nothing_of_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()  # such as the protocol
    os.set_inheritable(write, True)
    try:
        replaced(monkeypatch, sys.executable, "-c", FACTS)
        report = await Checks().check(FILLING, POLICY)
    finally:
        os.close(read)
        os.close(write)
    limits, files, descriptors, names = json.loads(report.note)
    assert limits == [MOST_BYTES, MOST_CPU_S]
    assert [each.partition(":")[0] for each in files] == ["/dev/null", "pipe", "pipe"]
    assert len(descriptors) == 4  # those, and the folder that is listed
    assert set(names) <= {"LANG", "LC_CTYPE"}


@asynccontextmanager
async def guarded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SessionManager, FakeSource]]:
    """Sessions whose code is checked."""
    monkeypatch.setattr(FakeKernel, "policy", POLICY)
    source = FakeSource()
    manager = new_manager(folder, source, FakeClock())
    with anyio.fail_after(120):
        async with manager.running():
            yield manager, source


LONG_CELL = f"long = {'[' + '1, ' * 6000 + ']'}"


async def test_cells_keep_their_order_while_one_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source):
        session, other = await manager.create(Caller()), await manager.create(Caller())
        first, second = session.submit(LONG_CELL, 0.0), session.submit("long = 2", 0.0)
        elsewhere = other.submit("a = 1", 0.0)
        await elsewhere.finished.wait()  # another session's goes on
        assert (first.status, second.status) == (Status.RUNNING, Status.QUEUED)
        processes.gate.set()
        await second.finished.wait()
        assert (first.status, second.status) == (Status.OK, Status.OK)
        assert {"long": "2"} in [kernel.variables for kernel in source.kernels]


async def test_a_cell_is_stopped_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, "sh", "-c", "exec sleep 1000")
    monkeypatch.setattr(checking, "check", check)
    before = children(os.getpid())
    async with guarded(tmp_path, monkeypatch) as (manager, source):
        session = await manager.create(Caller())
        cell, after = session.submit(LONG_CELL, 0.0), session.submit("a = 1", 0.0)
        while children(os.getpid()) == before:
            await anyio.lowlevel.checkpoint()
        assert await session.scheduler.interrupt() is cell
        assert cell.outcome is not None
        assert cell.status is Status.INTERRUPTED
        assert "being checked" in (cell.outcome.cause or "")
        assert not cell.numbered
        assert children(os.getpid()) == before
        await after.finished.wait()
        assert after.status is Status.OK
        assert source.kernels[0].variables == {"a": "1"}


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_session_ends_while_a_cell_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes, end: str
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source):
        session = await manager.create(Caller())
        cell = session.submit(LONG_CELL, 0.0)
        while not processes.running:
            await anyio.lowlevel.checkpoint()
        if end == "reset":
            await session.reset(packages=False, files=False)
        else:
            await manager.close(session)
        assert cell.finished.is_set()
        assert processes.running == 0
        assert all(kernel.variables == {} for kernel in source.kernels)


async def test_a_cell_that_cannot_be_checked_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source):
        session = await manager.create(Caller())
        monkeypatch.setattr(checking, "bare_program", lambda *_, **__: ["false"])
        cell, after = session.submit(LONG_CELL, 0.0), session.submit("a = 1", 0.0)
        await after.finished.wait()
        assert (cell.status, after.status) == (Status.ERROR, Status.OK)
        assert isinstance(cell.error, ServerFailure)
        assert source.kernels[0].variables == {"a": "1"}


async def test_a_long_cell_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source):
        session = await manager.create(Caller())
        (session.workspace.root / "helper.py").write_text("")
        cell = session.submit(FILLING + "import helper, km_gone, km_other", 0.0)
        await cell.finished.wait()
        told = json.dumps("".join(cell.log.text()))
        assert "Ask for km_gone." in told
        assert "helper" not in told.replace("import helper", "")
        assert source.kernels[0].variables == {}
