"""How many connections there may be, and how long one may be silent."""

from __future__ import annotations

import asyncio
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.http.connections import (
    HEAD_S,
    JOINED_BYTES,
    SILENT_S,
    STALLED_S,
    CoalescingTransport,
    Connections,
)
from tests.unit.fake_kernels import FakeClock


class Wire:
    """A connection that notes when it is cut."""

    patience_s: float = HEAD_S

    def __init__(self, connections: Connections) -> None:
        self._all = connections
        self.cuts = 0
        self.ends = 0
        self.waiting = 0
        self._all.opened(self)

    def unsent(self) -> int:
        return self.waiting

    def end(self) -> None:
        self.ends += 1

    def cut(self) -> None:
        self.cuts += 1
        self._all.closed(self)


def test_one_connection_too_many_ends_the_longest_silent_one() -> None:
    clock = FakeClock()
    connections = Connections(3, clock)
    first, second, third = (Wire(connections) for _ in range(3))
    connections.busy(first)
    fourth = Wire(connections)
    assert [each.cuts for each in (first, second, third, fourth)] == [0, 1, 0, 0]
    assert connections.count == 3


def test_one_that_takes_nothing_of_its_answer_is_cut_and_a_slow_one_is_not() -> None:
    clock = FakeClock()
    connections = Connections(9, clock)
    stuck, slow, computing = (Wire(connections) for _ in range(3))
    for each in (stuck, slow, computing):
        connections.busy(each)
    stuck.waiting = slow.waiting = 100
    for _ in range(4):
        connections.sweep()
        clock.now += STALLED_S / 2
        slow.waiting -= 1
    connections.sweep()
    assert [each.cuts for each in (stuck, slow, computing)] == [1, 0, 0]
    slow.waiting = 0
    for _ in range(4):
        connections.sweep()
        clock.now += STALLED_S
    assert slow.cuts == 0


def test_when_all_are_busy_the_new_one_goes() -> None:
    connections = Connections(2, FakeClock())
    wires = [Wire(connections) for _ in range(2)]
    for each in wires:
        connections.busy(each)
    late = Wire(connections)
    assert late.cuts == 1
    assert [each.cuts for each in wires] == [0, 0]


def test_silence_ends_a_connection_but_no_answer_that_takes_long() -> None:
    clock = FakeClock()
    connections = Connections(10, clock)
    new, idle, busy = (Wire(connections) for _ in range(3))
    idle.patience_s = SILENT_S
    connections.busy(busy)
    clock.now += HEAD_S + 1
    connections.sweep()
    assert [each.cuts for each in (new, idle, busy)] == [1, 0, 0]
    clock.now += SILENT_S
    connections.sweep()
    assert [each.cuts for each in (new, idle, busy)] == [1, 1, 0]
    connections.silent(busy)
    clock.now += SILENT_S + 1
    connections.sweep()
    assert busy.cuts == 1


@pytest.mark.anyio
async def test_all_are_ended_or_cut_and_it_is_known_when_none_is_left() -> None:
    connections = Connections(9, lambda: 0.0)
    wires = [Wire(connections), Wire(connections)]
    connections.end()
    assert (connections.count, [each.ends for each in wires]) == (2, [1, 1])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connections.wait_closed)
        connections.cut()
    assert (connections.count, [each.cuts for each in wires]) == (0, [1, 1])


class Pipe:
    """A transport that notes what it was given."""

    def __init__(self, *, half: bool = False) -> None:
        self.sent: list[bytes] = []
        self.closed = False
        self.half = half

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return self.half

    def write_eof(self) -> None:
        self.sent.append(b"EOF")

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.mark.anyio
async def test_what_is_written_in_one_turn_is_one_piece_with_its_end() -> None:
    pipe = Pipe()
    joined = CoalescingTransport(cast(asyncio.Transport, pipe), pytest.fail)
    for part in (b"head", b"body", b"end"):
        joined.write(part)
    assert pipe.sent == []
    await anyio.lowlevel.checkpoint()
    assert pipe.sent == [b"headbodyend"]
    large = b"x" * JOINED_BYTES
    for part in (large, large, b"end"):
        joined.write(part)
    assert pipe.sent[1:] == [large], "no more than one waits"
    await anyio.lowlevel.checkpoint()
    assert pipe.sent[2:] == [large + b"end"]


@pytest.mark.anyio
async def test_a_close_sends_what_waits_and_nothing_is_sent_behind_it() -> None:
    pipe = Pipe()
    dropped: list[bytes] = []
    joined = CoalescingTransport(
        cast(asyncio.Transport, pipe), lambda: dropped.append(b"something")
    )
    joined.write(b"last")
    joined.close()
    assert dropped == []
    joined.write(b"late")
    await anyio.lowlevel.checkpoint()
    assert pipe.sent == [b"last"]
    assert dropped == [b"something"]
    assert joined.is_closing()


@pytest.mark.anyio
async def test_behind_the_last_answer_the_client_closes_first() -> None:
    pipe = Pipe(half=True)
    joined = CoalescingTransport(cast(asyncio.Transport, pipe), pytest.fail)
    joined.write(b"last")
    joined.close()
    joined.close()
    assert (pipe.sent, joined.is_closing(), pipe.closed) == ([b"last", b"EOF"], True, False)
    joined.finish()
    assert pipe.closed


@pytest.mark.anyio
async def test_what_waits_when_the_client_ends_the_connection_is_told_as_dropped() -> None:
    pipe = Pipe()
    dropped: list[bytes] = []
    joined = CoalescingTransport(
        cast(asyncio.Transport, pipe), lambda: dropped.append(b"something")
    )
    joined.write(b"an answer")
    pipe.close()
    await anyio.lowlevel.checkpoint()
    assert (pipe.sent, dropped) == ([], [b"something"])
