"""Reports to the server about connections, whatever their number."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_mcp.network.http import ProxyRefusal
from kernel_mcp.network.records import Records, Traffic
from kernel_specs.template import packets


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


def told(server: socket.socket) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        try:
            received = packets.receive(server, wait=False)
        except BlockingIOError:
            return found
        assert received is not None
        found.append(received[0])


def sums(records: list[dict[str, Any]]) -> tuple[int, int, int]:
    return (
        sum(each["count"] for each in records),
        sum(each["up"] for each in records),
        sum(each["down"] for each in records),
    )


def test_a_flood_is_told_together_and_nothing_of_it_is_lost(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server, proxy = ends
    now = 0.0
    records = Records(proxy, lambda: now)
    refusal = ProxyRefusal("no")
    for number in range(5000):
        records.add(1, (f"h{number}.test", 80), refusal, Traffic(1, 2, 0.001))
    records.add(2, ("a.test", 80), None, Traffic(5, 6, 0.001))
    first = told(server)
    assert first[-1]["end"] == 2
    assert len(first) < 100
    records.flush()
    rest = told(server)
    assert len(rest) < 30
    assert sums([each for each in first + rest if each["end"] == 1]) == (5000, 5000, 10_000)
    assert rest[-1]["host"] == "…"
    now = 100.0
    records.add(1, ("a.test", 80), None, Traffic(5, 6, 0.001))
    assert [each["host"] for each in told(server)] == ["a.test"]


def test_a_server_that_reads_nothing_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server, proxy = ends
    now = 0.0
    records = Records(proxy, lambda: now)
    for number in range(5000):
        now += 1
        records.add(number % 7, ("a.test", 80), None, Traffic(1, 1, 0.0))
        records.flush()
    found = told(server)
    records.flush()
    found += told(server)
    assert sums(found)[0] == 5000


def test_the_last_records_of_a_listener_come_with_its_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server, proxy = ends
    records = Records(proxy, lambda: 0.0)
    for _ in range(100):
        records.add(1, ("a.test", 80), None, Traffic(1, 1, 0.0))
        records.add(2, ("a.test", 80), None, Traffic(1, 1, 0.0))
    told(server)
    records.flush(1)
    assert {each["end"] for each in told(server)} == {1}
    records.flush()
    assert {each["end"] for each in told(server)} == {2}
