"""The input of h11 for connections that would make its patterns slow."""

from __future__ import annotations

import time

import h11
import pytest

from kernel_mcp.network.h11_input import MOST_BLANKS, H11Input, TooManyBlanks
from kernel_mcp.network.http import Head, ProxyRefusal

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BLANKS = b" " * 60_000


def events(*received: bytes) -> list[object]:
    """Feed a server's side of h11; the events it makes of what comes."""
    connection = h11.Connection(h11.SERVER, 64 * 1024)
    pieces = H11Input(connection)
    found: list[object] = []
    for data in received:
        pieces.add(data)
        while piece := pieces.next():
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                found.append(event)
    return found


@pytest.mark.parametrize(
    "received",
    [
        [GET + b"a:" + BLANKS + b"\0\r\n\r\n"],
        [GET + b"a:", *[b" " * 500] * 120, b"\0\r\n\r\n"],
        [GET + b"a:" + b" \r\n" * 20_000 + b"\0\r\n\r\n"],
        [GET + b"\r\n" + GET + b"a:" + BLANKS + b"\0\r\n\r\n"],
        [CHUNKED, b"1;" + BLANKS + b"\nx\r\n"],
        [CHUNKED + b"1;", *[b"\t" * 511] * 120, b"\nx\r\n"],
        [CHUNKED + b"0\r\na:" + BLANKS, b"\0\r\n\r\n"],
    ],
)
def test_a_run_of_blanks_is_refused_before_h11_stands_still_at_it(received: list[bytes]) -> None:
    start = time.process_time()
    with pytest.raises((TooManyBlanks, h11.RemoteProtocolError)):
        events(*received)
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize(
    "received",
    [
        [GET + b"Content-Length: 60000\r\n\r\n" + BLANKS],
        [GET + b"Content-Length: 60000\r\n\r\n", BLANKS[:7], BLANKS[7:]],
        [CHUNKED, b"ea60\r\n" + BLANKS + b"\r\n0\r\n\r\n"],
    ],
)
def test_a_body_of_blanks_arrives_whole(received: list[bytes]) -> None:
    found = events(*received)
    body = b"".join(bytes(each.data) for each in found if isinstance(each, h11.Data))
    assert body == BLANKS
    assert isinstance(found[-1], h11.EndOfMessage)


def test_ordinary_data_stays_in_one_piece() -> None:
    pieces = H11Input(h11.Connection(h11.SERVER))
    for data in (GET + b"a: b", b" " * (MOST_BLANKS - 1) + b"x"):
        pieces.add(data)
        assert pieces.next() == data
        assert pieces.next() == b""


def test_a_head_of_blanks_is_read_once() -> None:
    start = time.process_time()
    with pytest.raises(ProxyRefusal):
        Head.parse(GET + b"a:" + b" " * 20_000 + b"\0\r\n\r\n")
    assert time.process_time() - start < 0.1
