"""Servers that are killed while packages are on their way, and servers that want the same ones."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from tests.integration.agent import agent
from tests.integration.processes import ends
from tests.integration.rawserver import RawServer

SILENT_S = 30


@pytest.fixture
def silent_index() -> Iterator[socket.socket]:
    """An index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def url(index: socket.socket) -> str:
    return f"http://127.0.0.1:{index.getsockname()[1]}/simple"


def call(server: RawServer, number: int, tool: str, **arguments: object) -> None:
    params = {"name": tool, "arguments": arguments}
    server.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})


def asked(index: socket.socket) -> bool:
    """Wait until somebody asks the index."""
    return bool(select.select([index], [], [], SILENT_S)[0])


@pytest.mark.ways
def test_a_server_killed_during_an_install_leaves_no_process_and_no_file(
    tmp_path: Path, silent_index: socket.socket
) -> None:
    state = tmp_path / "s"
    first = RawServer(state, "--allow-install", "*")
    first.execute(2, "1")  # the environment is there from here on
    first.close()
    server = RawServer(state, "--allow-install", "*", "--index-url", url(silent_index))
    try:
        server.execute(2, "x = 1")
        call(server, 3, "install", packages=["tabulate"])
        assert asked(silent_index)
        pids = server.descendants()
        server.process.send_signal(signal.SIGKILL)
        assert ends(pids) == []
    finally:
        server.close()
    following = RawServer(state)
    try:
        following.execute(2, "1")
        assert len([entry for entry in state.iterdir() if entry.name.startswith("s-")]) == 1
    finally:
        following.close()


@pytest.mark.ways
def test_a_server_killed_during_a_build_leaves_an_environment_that_can_be_built(
    tmp_path: Path, silent_index: socket.socket
) -> None:
    flags = ("--cache-dir", str(tmp_path / "cache"), "--allow", "tabulate")
    server = RawServer(tmp_path / "s", *flags, "--index-url", url(silent_index))
    try:
        call(server, 2, "execute", code="1")
        assert asked(silent_index)
        pids = server.descendants()
        server.process.send_signal(signal.SIGKILL)
        assert ends(pids) == []
    finally:
        server.close()
    following = RawServer(tmp_path / "s", *flags)
    try:
        call(following, 2, "execute", code="import tabulate; tabulate.__name__")
        assert "'tabulate'" in str(following.read(2))
    finally:
        following.close()


@pytest.mark.anyio
@pytest.mark.full  # `test_two_processes_build_one_environment_once` runs with every change
async def test_two_servers_that_need_the_same_environment_build_it_once(tmp_path: Path) -> None:
    flags = ("--cache-dir", str(tmp_path), "--allow", "tabulate", "--warm", "0")
    texts: list[str] = []
    steps: list[str] = []

    async def use() -> None:
        def on_progress(_value: float, _total: float | None, text: str | None) -> None:
            steps.append(text or "")

        async with agent(*flags) as notebook:
            answer = await notebook.run(
                "import tabulate; tabulate.__name__", wait=60, on_progress=on_progress
            )
            texts.append(answer.text)

    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            tasks.start_soon(use)
    assert texts == ["'tabulate'", "'tabulate'"]
    assert len(list((tmp_path / "envs").glob("python-*.json"))) == 1
    assert sum(step.startswith("Building") for step in steps) <= 1
