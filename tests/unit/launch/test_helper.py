"""A process of the server's own, with programs that work, end, stop, compute and forge."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import helper, silence
from kernel_mcp.launch.helper import HelperProcess

pytestmark = [pytest.mark.anyio]

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[2])
from kernel_specs.template import packets
server = socket.socket(fileno=int(sys.argv[1]))
packets.send(server, {"pid": os.getpid()})
while (received := packets.receive(server)) is not None:
    message = received[0]
    if "ping" in message:
        packets.send(server, {"pong": message["ping"]})
    elif message["do"] == "answer":
        packets.send(server, {"id": message["id"], "said": message["word"]})
    elif message["do"] == "end":
        sys.exit(3)
    elif message["do"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif message["do"] == "compute":
        while True: pass
    elif message["do"] == "forge":
        server.send(b"no JSON")
    elif message["do"] == "mislead":
        packets.send(server, {"unknown": 1})
    elif message["do"] == "meet a defect":
        packets.send(server, {"unknown": 2})
"""


class Kept:
    """A `HelperProcess` and what is heard of it."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.ends: list[str] = []
        self.news = anyio.Event()
        self.process = HelperProcess(
            "the helper of a test",
            lambda fd: [sys.executable, "-c", PROGRAM, str(fd), str(ROOT)],
            on_start=lambda: None,
            on_message=self._on_message,
            on_end=self.ends.append,
        )

    def _on_message(self, message: dict[str, Any], _fds: list[int]) -> None:
        if message.get("unknown") == 2:
            raise AttributeError("a defect of the server")
        self.pids.append(message["pid"])
        self.news.set()
        self.news = anyio.Event()

    async def count(self, number: int) -> None:
        """Wait until so many processes have begun."""
        with anyio.fail_after(60):
            while len(self.pids) < number:
                await self.news.wait()

    async def ask(self, do: str, **facts: Any) -> dict[str, Any]:
        with anyio.fail_after(60):
            return (await self.process.ask({"do": do, **facts}))[0]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "PING_LOOKS", 2)
    monkeypatch.setattr(helper, "PAUSE_S", 0.01)
    monkeypatch.setattr(silence, "LOOK_S", 0.05)
    monkeypatch.setattr(silence, "BUSY_CPU_S", 1.0)


@asynccontextmanager
async def kept() -> AsyncIterator[Kept]:
    made = Kept()
    made.process.start()
    try:
        await made.count(1)
        yield made
    finally:
        await made.process.aclose()
    assert all(not Path(f"/proc/{pid}").exists() for pid in made.pids)


async def test_it_answers_in_any_order_and_stays_while_it_is_pinged() -> None:
    async with kept() as made:
        said = []
        for word in ("one", "two"):
            said.append((await made.ask("answer", word=word))["said"])
            await anyio.sleep(0.2)
        assert said == ["one", "two"]
        assert (len(made.pids), made.ends) == (1, [])


@pytest.mark.parametrize("what", ["end", "stop", "compute", "forge", "mislead", "meet a defect"])
async def test_a_dead_a_silent_and_a_forging_process_are_one_case_for_who_asks(what: str) -> None:
    async with kept() as made:
        with pytest.raises(LaunchError, match="the helper of a test is being replaced"):
            await made.ask(what)
        assert len(made.ends) == 1
        await made.count(2)
        assert (await made.ask("answer", word="again"))["said"] == "again"


async def test_a_stopped_process_that_is_asked_nothing_is_noticed_by_a_ping() -> None:
    async with kept() as made:
        os.kill(made.pids[0], signal.SIGSTOP)
        await made.count(2)
        (why,) = made.ends
        assert "did not answer" in why


async def test_one_that_cannot_be_started_is_tried_again() -> None:
    ends: list[str] = []
    process = HelperProcess(
        "the helper of a test",
        lambda _fd: ["/nowhere/at/all"],
        on_start=lambda: None,
        on_message=lambda _message, _fds: None,
        on_end=ends.append,
    )
    process.start()
    with anyio.fail_after(60):
        while len(ends) < 3:
            await anyio.sleep(0.01)
    assert "cannot be started" in ends[0]
    with pytest.raises(LaunchError):
        await process.ask({"do": "answer"})
    await process.aclose()
