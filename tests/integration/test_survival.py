"""Trouble of one session, or of the machine, is told and ends neither the server nor the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import anyio
import pytest

from kernel_mcp.linux.proc import processor_seconds
from kernel_mcp.sessions.capacity import KERNEL_DESCRIPTORS, KERNEL_TASKS
from tests.integration.agent import agent
from tests.integration.bombs import RECURSIVE_FORK_BOMB
from tests.integration.processes import named
from tests.integration.rawclient import raw_client
from tests.integration.unprivileged import as_lone_user

pytestmark = [pytest.mark.anyio]


@pytest.mark.ways
async def test_folders_removed_under_a_server_cost_files_and_are_told(tmp_path: Path) -> None:
    shared, state = tmp_path / "w", tmp_path / "s"
    flags = ("--warm", "1", "--workspace", str(shared), "--state-dir", str(state))
    async with agent(*flags) as notebook:
        await notebook.run("x = 1; open('f', 'w').write('data')")
        fresh = (await notebook.call("create_session")).data["session"]
        third = (await notebook.call("create_session")).data["session"]
        remove(shared)
        told = await notebook.run("x + 1")
        assert "2" in told.text
        assert "removed from outside" in told.text
        assert (await notebook.run("x + 1")).text == "2"
        assert "reset" in await notebook.refused("write_file", path="g", content="g")
        began = await notebook.run("open('g', 'w').write('g')", session=fresh)
        assert began.status == "ok"
        for folder in state.glob("s-*/[wrpk]"):
            remove(folder)
        await notebook.call("reset", files=True)
        again = await notebook.run("import pathlib; list(pathlib.Path().iterdir())")
        assert again.text.startswith("[]")
        for name in ("list_files", "list_variables", "list_sessions", "info"):
            assert not (await notebook.call(name)).failed
        assert (await notebook.run("open('g').read()", session=fresh)).text == "'g'"
        assert (await notebook.run("y = 1; y", session=third)).text.startswith("1")
        made = (await notebook.call("create_session")).data["session"]
        assert (await notebook.run("1", session=made)).text == "1"
        for session in (fresh, third, made):
            assert not (await notebook.call("close_session", session=session)).failed
        assert (await notebook.run("1")).text == "1"


@pytest.mark.parametrize(
    ("limits", "ordinary"),
    [
        ("ulimit -n 64", False),
        pytest.param("ulimit -n 96", False, marks=pytest.mark.ways),
        pytest.param("ulimit -u 40", True, marks=pytest.mark.ways),
    ],
)
async def test_sessions_are_refused_before_the_server_runs_out(
    limits: str, ordinary: bool, tmp_path: Path
) -> None:
    def through(argv: list[str]) -> list[str]:
        limited = ["bash", "-c", f'{limits} && exec "$@"', "limited", *argv]
        return as_lone_user(limited) if ordinary else limited

    log = tmp_path / "log"
    async with raw_client("--warm", "2", through=through, log=log) as client:
        assert await client.call("execute", code="x = 41; x", wait=100) == "41"
        assert "instead of 16 (--max-sessions)" in log.read_text()
        opened: list[str] = []
        while len(opened) < 16:
            said = await client.call("create_session")
            if client.failed:
                break
            opened.append(json.loads(said)["session"])
            busy = "import time; time.sleep(600)"
            await client.call("execute", session=opened[-1], code=busy, wait=0)
            assert not client.failed
        assert 1 <= len(opened) < 16
        assert "has no room" in said
        assert limits.partition(" -")[0] in said
        assert "close_session" in said
        for handle in opened:
            await client.call("close_session", session=handle)
        assert "42" in await client.call("execute", code="x + 1")
        said = await client.call("create_session")
        assert not client.failed
    assert "Traceback" not in log.read_text()


@pytest.mark.ways
async def test_what_sleeps_where_descriptors_are_few_wakes_with_its_variables(
    tmp_path: Path,
) -> None:
    def through(argv: list[str]) -> list[str]:
        return ["bash", "-c", 'ulimit -n 64 && exec "$@"', "limited", *argv]

    log = tmp_path / "log"
    flags = ("--warm", "0", "--idle-timeout", "1s", "--allow", "*")
    async with raw_client(*flags, through=through, log=log) as client:
        handles: list[str] = []
        for number in range(4):
            said = await client.call("create_session")
            if client.failed:
                assert "has no room" in said
                break
            handles.append(json.loads(said)["session"])
            await client.call("execute", session=handles[-1], code=f"x = {number}", wait=100)
            assert not client.failed
        assert handles
        woken = 0
        for _ in range(2):
            await anyio.sleep(3)  # idle sessions are put to sleep meanwhile, where they can wake
            for number, handle in enumerate(handles):
                said = await client.call("execute", session=handle, code="x", wait=100)
                assert (client.failed, said.splitlines()[0]) == (False, str(number))
                assert "Lost" not in said
                woken += "Back: x (1)" in said
        assert woken
    assert "Traceback" not in log.read_text()


@pytest.mark.ways
async def test_after_a_recursive_fork_bomb_the_next_call_costs_the_server_little() -> None:
    async with raw_client("--pids", "100") as client:
        await client.call("execute", code="1", wait=100)
        before = processor_seconds(client.process.pid)
        said = await client.call("execute", code=RECURSIVE_FORK_BOMB, timeout=2, wait=100)
        assert "time limit" in said
        said = await client.call("execute", code="6 * 7", wait=100)
        assert "42" in said.splitlines(), said  # children that end late may say so before
        assert processor_seconds(client.process.pid) - before < 2.0  # 0.4 s, and looks add up


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.ways), signal.SIGKILL]
)
async def test_a_silent_or_dead_template_costs_no_session_and_is_told_and_replaced(
    number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with raw_client("--warm", "0", log=log) as client:
        await client.call("execute", code="x = 41", wait=100)
        before = named("kernel-template", below=client.process.pid)
        for pid in before:
            os.kill(pid, number)
        told = [await client.call("create_session", name="other")]
        for session, code, value in (("other", "6 * 7", "42"), ("", "x", "41")):
            told.append(await client.call("execute", session=session, code=code, wait=100))
            assert told[-1].startswith(value)
        (said, *_) = [each for each in told if "[kernel-mcp]" in each]
        assert "The template that kernels are forked from is replaced (" in said
        assert "start cold until the next one runs" in said
        assert "kernels start cold until then: " in log.read_text()
        with anyio.fail_after(60):
            while not set(named("kernel-template", below=client.process.pid)) - set(before):
                await anyio.sleep(0.05)
    assert all(not Path(f"/proc/{pid}").exists() for pid in before)


@pytest.mark.ways
async def test_a_kernel_takes_no_more_than_is_reckoned_with() -> None:
    async with raw_client("--no-template") as client:
        await client.call("execute", code="1", wait=100)
        descriptors, tasks = client.descriptors, client.tasks
        for number in (1, 2):
            handle = json.loads(await client.call("create_session"))["session"]
            await client.call("execute", session=handle, code="print('x' * 500_000)", wait=100)
            assert client.descriptors - descriptors <= number * KERNEL_DESCRIPTORS
            assert client.tasks - tasks <= number * KERNEL_TASKS
        assert client.descriptors - descriptors > KERNEL_DESCRIPTORS
        assert client.tasks - tasks > KERNEL_TASKS / 2


async def test_a_server_without_room_for_one_session_says_so_and_ends() -> None:
    argv = [
        "bash",
        "-c",
        'ulimit -n 32 && exec "$@"',
        "limited",
        sys.executable,
        "-m",
        "kernel_mcp",
    ]
    ran = await anyio.run_process(argv, check=False)
    assert ran.returncode == 1
    assert b"no room for a single session" in ran.stderr
    assert b"ulimit -n 1024" in ran.stderr
    assert b"Traceback" not in ran.stderr


def remove(folder: Path) -> None:
    """Remove a folder although the server makes others in it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}-removed")))
