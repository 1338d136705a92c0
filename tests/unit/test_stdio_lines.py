"""Lines are cut from what arrives; one that is too long is dropped and the next one is read."""

from __future__ import annotations

import json

import anyio
import pytest

from kernel_mcp.envelopes import oversized
from kernel_mcp.stdio_lines import LineReader, OversizedLine, StdioLines

pytestmark = [pytest.mark.anyio]


async def lines_of(*pieces: bytes, most: int = 100_000) -> list[bytes | OversizedLine]:
    """Return the lines that `LineReader` reads from these pieces."""
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return [
        line if isinstance(line, OversizedLine) else bytes(line)
        async for line in LineReader(read, most)
    ]


async def test_lines_are_cut_wherever_the_pieces_are() -> None:
    whole = b"one\ntwo\n\nthree"
    expected = [b"one\n", b"two\n", b"\n", b"three"]
    assert await lines_of(whole) == expected
    for size in (1, 2, 3, 5):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert await lines_of(*pieces) == expected


@pytest.mark.parametrize("size", [1000, 7777, 50_000, 1_000_000])
async def test_a_line_that_is_too_long_costs_itself_only(size: int) -> None:
    long = b'{"params":"' + b"x" * 300_000 + b'","id":5,"method":"m"}\n'
    whole = b"before\n" + long + b"after\nlast\n"
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    before, refusal, *after = await lines_of(*pieces)
    assert before == b"before\n"
    assert after == [b"after\n", b"last\n"]
    if size < 1_000_000:
        assert isinstance(refusal, OversizedLine)
        refused = oversized(refusal.head, refusal.tail, refusal.most_bytes)
        assert [json.loads(answer)["id"] for answer in refused.answers] == [5]


async def test_a_line_that_is_too_long_and_never_ends_is_refused_at_the_end() -> None:
    (refusal,) = await lines_of(*[b"x" * 1000] * 300)
    assert isinstance(refusal, OversizedLine)


class Written:
    """The written lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def write(self, text: str) -> None:
        self.lines.append(text)


def wire_of(*pieces: bytes) -> tuple[StdioLines, Written]:
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    written = Written()
    return StdioLines(LineReader(read), written), written


async def attended(wire: StdioLines) -> list[None]:
    """Read the client's lines to their end; an item where the end was told of."""
    ends: list[None] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.read_early, lambda: ends.append(None))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return ends


INITIALIZE = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": "first",
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "a", "version": "1"},
        },
    }
).encode()


NOTIFICATION = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n'
CALL = b'{"jsonrpc": "2.0", "id": 2, "method": "tools/list"}\n'


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"", True),
        (NOTIFICATION, True),
        (INITIALIZE + b"\n" + NOTIFICATION, False),
        (CALL, False),
    ],
    ids=["nothing", "no request", "the first request", "another one"],
)
async def test_the_end_of_input_during_a_start_is_told_where_no_request_waits(
    lines: bytes, told: bool
) -> None:
    wire, _ = wire_of(*filter(None, [lines]))
    assert bool(await attended(wire)) is told
    assert b"".join([bytes(each) async for each in wire.lines()]) == lines  # type: ignore[arg-type]


async def test_the_end_during_a_start_is_told_where_nobody_reads_what_a_request_asks_for() -> None:
    lost = anyio.Event()
    pieces = [INITIALIZE + b"\n", b""]

    async def read() -> bytes:
        return pieces.pop(0)

    ends: list[None] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            StdioLines(LineReader(read), Written(), lost).read_early, lambda: ends.append(None)
        )
        await anyio.wait_all_tasks_blocked()
        assert ends == []
        lost.set()
    assert ends == [None]


async def test_lines_that_come_before_and_after_the_server_is_ready_keep_their_order() -> None:
    send, receive = anyio.create_memory_object_stream[bytes](10)

    async def read() -> bytes:
        return await receive.receive()

    wire = StdioLines(LineReader(read), Written())
    seen: list[object] = []

    async def take() -> None:
        seen.extend([line async for line in wire.lines()])

    ends: list[None] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.read_early, lambda: ends.append(None))
        await send.send(b"1\n2\n")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert seen == []  # a list is only extended at the end
        for piece in (b"3\n4", b"\n5\n", b""):
            await send.send(piece)
            await anyio.wait_all_tasks_blocked()
    assert seen == [b"%d\n" % number for number in range(1, 6)]
    assert ends == []
    send.close()
    receive.close()
