"""The SDK's streams over the lines of one client."""

from __future__ import annotations

import json

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, JSONRPCRequest, JSONRPCResponse

from kernel_mcp.stdio import Answers, Requests
from kernel_mcp.stdio_lines import LineReader, StdioLines

pytestmark = pytest.mark.anyio


class Pipe:
    """Where answers go: what was written, and a reader that may be slow or gone."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.free = anyio.Event()
        self.free.set()
        self.gone = False

    async def write(self, text: str) -> None:
        if self.gone:
            raise anyio.ClosedResourceError
        self.lines.append(text)
        await self.free.wait()


async def begun(pipe: Pipe, *pieces: bytes) -> StdioLines:
    """A wire that has the first line."""
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    wire = StdioLines(LineReader(read), pipe)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.read_early, lambda: None)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return wire


def request(number: int) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": "ping"}).encode() + b"\n"


def answer(number: int) -> SessionMessage:
    return SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=number, result={}))


def ids(messages: list[JSONRPCMessage]) -> list[object]:
    return [getattr(each, "id", None) for each in messages]


async def test_requests_come_in_order_and_their_end_is_told_once() -> None:
    ends: list[None] = []
    wire = await begun(Pipe(), request(1) + request(2), request(3))
    requests = Requests(wire, lambda: ends.append(None))
    found = [item async for item in requests]
    assert ends == [None]
    messages = [item.message for item in found if isinstance(item, SessionMessage)]
    assert ids(messages) == [1, 2, 3]
    assert all(isinstance(each, JSONRPCRequest) for each in messages)
    with pytest.raises(anyio.EndOfStream):
        await requests.receive()
    assert ends == [None]


async def test_a_refused_line_is_answered_and_the_next_one_taken() -> None:
    pipe = Pipe()
    requests = Requests(await begun(pipe, b'{"id": 5}\n' + request(6)))
    assert (await requests.receive()).message == JSONRPCRequest(jsonrpc="2.0", id=6, method="ping")
    (line,) = pipe.lines
    assert json.loads(line)["id"] == 5


async def test_input_ends_where_nobody_reads_the_refusals() -> None:
    pipe, ends = Pipe(), list[None]()
    pipe.gone = True
    requests = Requests(await begun(pipe, b"{}\n", request(1)), lambda: ends.append(None))
    with pytest.raises(anyio.EndOfStream):
        await requests.receive()
    assert ends == [None]


async def test_answers_are_noted_once_they_are_on_the_pipe_one_after_the_other() -> None:
    pipe, noted = Pipe(), list[JSONRPCMessage]()
    answers = Answers(await begun(pipe), noted.append)
    pipe.free = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(answers.send, answer(number))
        await anyio.wait_all_tasks_blocked()
        assert (len(pipe.lines), noted) == (1, [])  # the others are not even encoded
        pipe.free.set()
    assert [json.loads(line)["id"] for line in pipe.lines] == ids(noted) == [0, 1, 2]


async def test_an_answer_that_is_given_up_lets_the_others_through() -> None:
    pipe, noted = Pipe(), list[JSONRPCMessage]()
    answers = Answers(await begun(pipe), noted.append)
    pipe.free = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answers.send, answer(1))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    pipe.free.set()
    await answers.send(answer(2))
    assert ids(noted) == [2]


@pytest.mark.parametrize("ended", ["the reader", "the stream"])
async def test_nothing_can_be_sent_after_the_end(ended: str) -> None:
    pipe, noted = Pipe(), list[JSONRPCMessage]()
    answers = Answers(await begun(pipe), noted.append)
    if ended == "the reader":
        pipe.gone = True
    else:
        await answers.aclose()
    with pytest.raises(anyio.ClosedResourceError):
        await answers.send(answer(1))
    assert not noted
    assert not pipe.lines


async def test_a_failure_to_take_note_is_no_failure_to_answer() -> None:
    def fail(_message: JSONRPCMessage) -> None:
        raise ValueError

    pipe = Pipe()
    await Answers(await begun(pipe), fail).send(answer(1))
    assert len(pipe.lines) == 1
