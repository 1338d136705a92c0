"""A connection to a kernel's socket: the handshake, requests that wait, and the end."""

from __future__ import annotations

import asyncio
import platform
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kernel_mcp.kernels.channels import MAX_WAITING_BYTES, Connection
from kernel_specs.restricted.wire.zmtp import GREETING, Decoder, encode, ready

pytestmark = [pytest.mark.anyio]

LINUX = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


class Peer:
    """The other end, played by the test."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.decoder = Decoder(MAX_WAITING_BYTES * 2)
        self.end: socket.socket | None = None

    def connect(self, kind: bytes = b"DEALER") -> Connection:
        made = Connection(self.path, kind, max_bytes=1000, loop=asyncio.get_running_loop())
        self.end, _ = self.listener.accept()
        self.end.setblocking(False)
        return made

    def greet(self) -> None:
        assert self.end is not None
        self.end.send(GREETING + ready(b"ROUTER"))

    async def receive(self) -> list[bytes]:
        """The next message from the connection."""
        assert self.end is not None
        with anyio.fail_after(60):
            while (found := self.decoder.message()) is None:
                await anyio.wait_readable(self.end)
                self.decoder.feed(self.end.recv(1 << 20))
        return found

    def close(self) -> None:
        for each in (self.listener, self.end):
            if each is not None:
                each.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory() as folder:
        made = Peer(str(Path(folder) / "s"))
        yield made
        made.close()


def test_nobody_listening_is_an_error(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(OSError, match=r"No such file|Connection refused"):
            Connection(str(tmp_path / "none"), b"DEALER", max_bytes=1, loop=loop)
    finally:
        loop.close()


async def test_requests_wait_for_the_handshake_and_keep_their_order(peer: Peer) -> None:
    connection = peer.connect()
    connection.send([b"one"])
    connection.send([b"two", b"parts"])
    assert connection.message() is None
    peer.greet()
    connection.read()
    assert connection.message() is None
    connection.send([b"three"])
    assert [await peer.receive() for _ in range(3)] == [[b"one"], [b"two", b"parts"], [b"three"]]
    connection.close()


async def test_a_subscriber_subscribes_to_everything(peer: Peer) -> None:
    connection = peer.connect(b"SUB")
    peer.greet()
    connection.read()
    connection.message()
    assert await peer.receive() == [b"\x01"]
    connection.close()


async def test_messages_come_as_they_were_sent(peer: Peer) -> None:
    connection = peer.connect()
    peer.greet()
    assert peer.end is not None
    peer.end.send(encode([b"a", b"b"]) + encode([b"c"]))
    while connection.read():
        pass
    assert connection.message() == [b"a", b"b"]
    assert connection.message() == [b"c"]
    assert connection.message() is None
    assert not connection.read()
    connection.close()


async def test_a_request_larger_than_the_buffers_arrives_whole(peer: Peer) -> None:
    connection = peer.connect()
    peer.greet()
    connection.read()
    connection.message()
    connection.send([bytes(8_000_000)])
    connection.send([b"after"])
    assert len((await peer.receive())[0]) == 8_000_000
    assert await peer.receive() == [b"after"]
    connection.close()


async def test_a_kernel_that_reads_nothing_cannot_make_the_server_keep_everything(
    peer: Peer,
) -> None:
    connection = peer.connect()
    peer.greet()
    connection.read()
    connection.message()
    connection.send([bytes(MAX_WAITING_BYTES)])  # one request of any size is taken
    with pytest.raises(OSError, match="are waiting to be read"):
        connection.send([bytes(MAX_WAITING_BYTES // 2)])
    connection.close()


async def test_the_end_of_the_peer_is_the_end_of_the_connection(peer: Peer) -> None:
    connection = peer.connect()
    assert peer.end is not None
    peer.end.close()
    with pytest.raises(EOFError):
        connection.read()
    connection.close()


@pytest.mark.skipif(LINUX < (6, 16), reason="Linux can refuse descriptors since 6.16")
async def test_a_kernel_cannot_send_descriptors(peer: Peer) -> None:
    connection = peer.connect()
    assert peer.end is not None
    with pytest.raises(PermissionError):
        socket.send_fds(peer.end, [b"x"], [0])
    connection.close()
