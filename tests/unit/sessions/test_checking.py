"""Long code is checked in a process of its own: with the same findings, whatever becomes of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.errors import LaunchError, ServerFailure
from kernel_mcp.launch import helper, silence
from kernel_mcp.policy import Policy, Report
from kernel_mcp.policy.check import check
from kernel_mcp.policy.source import MAX_CODE
from kernel_mcp.policy.worker import MOST_MESSAGE_BYTES, content_of, written
from kernel_mcp.sessions import checking
from kernel_mcp.sessions.cell import Status
from kernel_mcp.sessions.checking import LONG_CODE_CHARS, Checks
from kernel_mcp.sessions.manager import Caller, SessionManager
from tests.integration.processes import children, running
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


def steps(module: str, *, once: bool) -> str:
    return f"Ask for {module}{' once' if once else ''}." if module != "os" else ""


POLICY = Policy.for_allow(["numpy"], "guarded", steps).with_installed(["numpy", "km_other"])
STRICT = Policy.for_allow([], "strict", steps)
EVERYTHING = Policy.for_allow(["*"])
FILLING = "value = [n * 2 for n in range(10)]\nprint(value)\n" * 50
DENSE = "x\n" * 60_000
FORBIDDEN = "import os\n" * 60 + FILLING
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
    "deep": FILLING + "x = " + "a." * 20_000 + "a\n",
    "surrogate": FILLING + "x = '\ud800'\n",
    "null": FILLING + "x = '\0'\n",
    "unicode": FILLING + "straße = '🎉'; import os\n",
    "metadata": "# /// script\n# dependencies = ['???']\n# ///\n" + FILLING,
    "very long": FILLING * 20 + "import os\n",
}


@asynccontextmanager
async def checks() -> AsyncIterator[Checks]:
    """Those of a server."""
    made = Checks()
    with anyio.fail_after(120):
        try:
            yield made
        finally:
            await made.aclose()
    assert workers() == []


def workers() -> list[int]:
    """Processes that check code, dead ones too."""
    names = {pid: Path(f"/proc/{pid}/comm") for pid in children(os.getpid())}
    return [pid for pid, name in names.items() if name.read_text() == "kernel-check\n"]


async def begun(made: Checks, code: str = FILLING) -> int:
    """Have a process that has answered; its id."""
    before = workers()
    await made.check(code, POLICY)
    (pid,) = set(workers()) - set(before)
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def others_wait() -> None:
    """Let other tasks go on until they wait for what is outside this process."""
    for _ in range(100):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("policy", [POLICY, STRICT, EVERYTHING])
async def test_it_finds_what_is_found_here(code: str, policy: Policy) -> None:
    wishes: tuple[dict[str, Any], ...] = (
        {"compiled": False},
        {"known_names": frozenset({"known", "value"}), "own_modules": frozenset({"helper"})},
        {"python": "3.9.1"},
    )
    async with checks() as made:
        for each in wishes:
            assert await made.check(code, policy, **each) == check(code, policy, **each)
        assert len(workers()) == 1


async def test_short_code_and_what_is_too_long_to_be_read_take_no_process() -> None:
    async with checks() as made:
        for code in ("1", "import os", "#" * LONG_CODE_CHARS, "#" * (MAX_CODE + 1)):
            assert await made.check(code, POLICY, compiled=False) == check(
                code, POLICY, compiled=False
            )
        assert workers() == []


async def test_other_tasks_have_their_turns_meanwhile() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with checks() as made, anyio.create_task_group() as tasks:
        await begun(made, DENSE)
        tasks.start_soon(count)
        turns = 0
        await made.check(DENSE, POLICY, compiled=False, imports=False)
        assert turns > 100
        tasks.cancel_scope.cancel()


async def test_a_process_that_ends_during_a_check_is_replaced() -> None:
    reports: list[Report] = []
    async with checks() as made:
        pid = await begun(made)

        async def ask() -> None:
            reports.append(await made.check(FORBIDDEN, POLICY))

        with stopped(pid):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await others_wait()
                assert reports == []
                os.kill(pid, signal.SIGKILL)
        assert reports == [check(FORBIDDEN, POLICY)]
        assert len(workers()) == 1
        assert pid not in workers()


async def test_a_process_that_ended_between_two_checks_is_replaced() -> None:
    async with checks() as made:
        for _ in range(3):
            pid = await begun(made)
            os.kill(pid, signal.SIGKILL)
            while pid in workers():  # and is reaped at once
                await anyio.lowlevel.checkpoint()


async def test_code_that_ends_every_process_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "bare_program", lambda *_, **__: ["sh", "-c", "echo oops; exit"])
    here: list[object] = []  # where it could end the server, too
    monkeypatch.setattr(checking, "check", lambda *args, **_: here.append(args))
    async with checks() as made:
        with pytest.raises(ServerFailure, match=r"2 times, and nothing .* has ended.*smaller"):
            await made.check(FILLING, POLICY)
    assert here == []


async def test_a_process_that_answers_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with checks() as made:
        pid = await begun(made)
        with stopped(pid), monkeypatch.context() as patch:
            patch.setattr(silence, "LOOK_S", 0.01)
            patch.setattr(checking, "bare_program", lambda *_, **__: ["sleep", "1000"])
            with pytest.raises(ServerFailure, match=r"it did not answer, and did nothing, for "):
                await made.check(FILLING, POLICY)
        assert caplog.text.count("is replaced") == 2
        assert await made.check(FILLING, POLICY) == check(FILLING, POLICY)


async def test_code_is_checked_by_another_process_where_one_is_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.1)
    async with checks() as made:
        pid = await begun(made)
        os.kill(pid, signal.SIGSTOP)
        report = await made.check(FORBIDDEN, POLICY)
        assert report.diagnostics == check(FORBIDDEN, POLICY).diagnostics
        assert "the process that checks code is replaced: it did not answer" in caplog.text
        assert pid not in workers()


async def test_a_check_that_computes_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.001)
    async with checks() as made:
        assert await made.check(DENSE, POLICY) == check(DENSE, POLICY)
    assert caplog.text == ""


async def test_where_no_process_can_be_started_the_server_checks_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> None:
        raise LaunchError("no process today")

    async with checks() as made:
        with monkeypatch.context() as patch:
            patch.setattr(helper, "spawn", refused)
            assert await made.check(FORBIDDEN, POLICY) == check(FORBIDDEN, POLICY)
        assert "no process today" in caplog.text
        await begun(made)


async def test_an_answer_that_nobody_waits_for_any_more_goes_to_nobody_else() -> None:
    async with checks() as made:
        pid = await begun(made)
        with stopped(pid):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.check, FORBIDDEN, POLICY)
                await others_wait()
                tasks.cancel_scope.cancel()
        assert await made.check(FILLING, POLICY) == check(FILLING, POLICY)


async def test_many_at_once_get_their_own_answers() -> None:
    wrong = []

    async def ask(made: Checks, number: int) -> None:
        code = f"{FILLING}import km_{number}\n" * (1 + number % 2 * 20)
        policy = (POLICY, STRICT)[number % 3 % 2]
        if await made.check(code, policy, compiled=False) != check(code, policy, compiled=False):
            wrong.append(number)

    async with checks() as made:
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(ask, made, number)
        assert wrong == []
        assert len(workers()) == 1


async def test_a_process_that_is_not_needed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "IDLE_S", 0.0)
    async with checks() as made:
        await made.check(FILLING, POLICY)
        while workers():
            await anyio.lowlevel.checkpoint()
        assert await made.check(FILLING, POLICY) == check(FILLING, POLICY)


async def test_it_has_nothing_of_the_servers_but_its_way_there() -> None:
    read, write = os.pipe()  # such as the protocol
    os.set_inheritable(write, True)
    try:
        async with checks() as made:
            pid = await begun(made)
            assert not children(pid)
            links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
            links = [each for each in links if "memfd:code" not in each]  # of its last answer
            kinds = sorted(each.partition(":")[0] for each in links)
            assert kinds == ["/dev/null", "pipe", "pipe", "socket"]
            assert str(Path(f"/proc/self/fd/{write}").readlink()) not in links
            names = {name.partition(b"=")[0] for name in environ_of(pid)}
            assert names == {b"LANG"}
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert f"Max address space         {1 << 30}" in limits
    finally:
        os.close(read)
        os.close(write)


def environ_of(pid: int) -> list[bytes]:
    return [each for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if each]


async def test_an_answer_that_is_no_memory_or_too_long_is_not_read() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ValueError, match="no memory"):
        content_of([read])
    too_long = written(b"")
    os.truncate(too_long, MOST_MESSAGE_BYTES + 1)
    with pytest.raises(ValueError, match="no memory"):
        content_of([too_long])
    with pytest.raises(ValueError, match="unpack"):
        content_of([])
    assert content_of([written(b"said")]) == b"said"


SERVER = """
import os, sys, anyio
from kernel_mcp.policy import Policy
from kernel_mcp.sessions.checking import Checks
async def main():
    await Checks().check(sys.argv[1], Policy.for_allow([]))
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""


async def test_it_ends_with_a_server_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, FILLING], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        handle = os.pidfd_open(pid)
        try:
            server.kill()
            assert select.select([handle], [], [], 60)[0]
        finally:
            os.close(handle)
        assert not running(pid)


@asynccontextmanager
async def guarded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SessionManager, FakeSource, int]]:
    """Sessions whose code is checked, and the process that does it."""
    monkeypatch.setattr(FakeKernel, "policy", POLICY)
    source = FakeSource()
    manager = new_manager(folder, source, FakeClock())
    with anyio.fail_after(120):
        async with manager.running():
            pid = await begun(manager.checks)
            yield manager, source, pid
        await manager.checks.aclose()


LONG_CELL = f"long = {'[' + '1, ' * 1000 + ']'}"


async def test_cells_keep_their_order_while_one_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source, pid):
        session, other = await manager.create(Caller()), await manager.create(Caller())
        with stopped(pid):
            first, second = session.submit(LONG_CELL, 0.0), session.submit("long = 2", 0.0)
            elsewhere = other.submit("a = 1", 0.0)
            await elsewhere.finished.wait()  # another session's goes on
            await others_wait()
            assert (first.status, second.status) == (Status.RUNNING, Status.QUEUED)
        await second.finished.wait()
        assert (first.status, second.status) == (Status.OK, Status.OK)
        assert {"long": "2"} in [kernel.variables for kernel in source.kernels]


async def test_a_cell_is_stopped_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source, pid):
        session = await manager.create(Caller())
        with stopped(pid):
            cell, after = session.submit(LONG_CELL, 0.0), session.submit("a = 1", 0.0)
            await others_wait()
            assert await session.interrupt() is cell
            assert cell.outcome is not None
            assert cell.status is Status.INTERRUPTED
            assert "being checked" in (cell.outcome.cause or "")
            assert not cell.numbered
        await after.finished.wait()
        assert after.status is Status.OK
        assert source.kernels[0].variables == {"a": "1"}


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_session_ends_while_a_cell_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source, pid):
        session = await manager.create(Caller())
        with stopped(pid):
            cell = session.submit(LONG_CELL, 0.0)
            await others_wait()
            if end == "reset":
                await session.reset(packages=False, files=False)
            else:
                await manager.close(session)
            assert cell.finished.is_set()
        assert all(kernel.variables == {} for kernel in source.kernels)


async def test_a_cell_that_cannot_be_checked_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source, pid):
        session = await manager.create(Caller())
        monkeypatch.setattr(checking, "bare_program", lambda *_, **__: ["false"])
        os.kill(pid, signal.SIGKILL)
        cell, after = session.submit(LONG_CELL, 0.0), session.submit("a = 1", 0.0)
        await after.finished.wait()
        assert (cell.status, after.status) == (Status.ERROR, Status.OK)
        assert isinstance(cell.error, ServerFailure)
        assert source.kernels[0].variables == {"a": "1"}


async def test_a_long_cell_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path, monkeypatch) as (manager, source, _):
        session = await manager.create(Caller())
        (session.workspace.root / "helper.py").write_text("")
        cell = session.submit(FILLING + "import helper, km_gone, km_other", 0.0)
        await cell.finished.wait()
        told = json.dumps("".join(cell.log.text()))
        assert "Ask for km_gone." in told
        assert "helper" not in told.replace("import helper", "")
        assert source.kernels[0].variables == {}
