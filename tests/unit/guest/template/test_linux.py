"""Messages with descriptors between the server and a template."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kernel_specs import linux
from kernel_specs.template import packets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        yield one, two


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_message_arrives_with_its_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    read, write = os.pipe()
    packets.send(pair[0], {"op": "fork", "id": 1}, [write])
    os.close(write)
    received = packets.receive(pair[1])
    assert received is not None
    message, fds = received
    assert message == {"op": "fork", "id": 1}
    assert len(fds) == 1
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"through")
    assert os.read(read, 16) == b"through"
    linux.close_all([read, *fds])


def test_messages_keep_their_bounds_and_order(pair: tuple[socket.socket, socket.socket]) -> None:
    for number in range(3):
        packets.send(pair[0], {"id": number})
    got = [packets.receive(pair[1]) for _ in range(3)]
    assert got == [({"id": number}, []) for number in range(3)]


def test_a_closed_peer_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert packets.receive(pair[1]) is None


def test_a_peer_that_closed_with_a_message_unread_is_none(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    packets.send(pair[1], {})
    pair[0].close()
    assert packets.receive(pair[1]) is None


def test_nothing_there_is_told_when_not_waiting(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(BlockingIOError):
        packets.receive(pair[1], wait=False)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"], ids=["cut", "list", "bytes"])
def test_nonsense_is_refused_and_its_descriptors_closed(
    pair: tuple[socket.socket, socket.socket], content: bytes
) -> None:
    before = open_descriptors()
    socket.send_fds(pair[0], [content], [0, 0])
    with pytest.raises(ValueError, match=r"."):
        packets.receive(pair[1])
    assert open_descriptors() == before


def test_a_message_that_is_too_long_is_refused_on_both_sides(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(ValueError, match="at most"):
        packets.send(pair[0], {"text": "x" * packets.PACKET_BYTES})
    pair[0].send(b'"' + b"x" * packets.PACKET_BYTES + b'"')
    with pytest.raises(ValueError, match="was cut"):
        packets.receive(pair[1])
