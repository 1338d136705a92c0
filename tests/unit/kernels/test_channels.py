"""The channels of a kernel: the handshake, requests that wait, floods, and the end."""

from __future__ import annotations

import asyncio
import platform
import re
import socket
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import sleep, thread_time

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels import channels as module
from kernel_mcp.kernels.channels import (
    Channel,
    ChannelListener,
    Channels,
    Floods,
)
from kernel_mcp.kernels.message_codec import Message, MessageCodec, Overload
from kernel_mcp.kernels.zmtp_client import MAX_WAITING_BYTES, READ_BYTES, ZmtpClient
from kernel_mcp.launch.base import ConnectionInfo
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

    def connect(self, kind: bytes = b"DEALER") -> ZmtpClient:
        made = ZmtpClient(self.path, kind, max_bytes=1000, loop=asyncio.get_running_loop())
        self.accept()
        return made

    def accept(self) -> None:
        self.end, _ = self.listener.accept()
        self.end.setblocking(False)

    def greet(self) -> None:
        assert self.end is not None
        self.end.send(GREETING + ready(b"ROUTER"))

    async def take_in(self) -> None:
        """Read some of what the connection has sent."""
        assert self.end is not None
        await anyio.wait_readable(self.end)
        self.decoder.feed(self.end.recv(1 << 20))

    async def receive(self) -> list[bytes]:
        """The next message from the connection."""
        with anyio.fail_after(60):
            while (found := self.decoder.message()) is None:
                await self.take_in()
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
            ZmtpClient(str(tmp_path / "none"), b"DEALER", max_bytes=1, loop=loop)
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


@pytest.mark.parametrize("connected", [False, True], ids=["a path", "a socket"])
async def test_it_subscribes_once_the_other_end_has_greeted(peer: Peer, connected: bool) -> None:
    place: str | socket.socket = peer.path
    if connected:
        place = socket.socket(socket.AF_UNIX)
        place.connect(peer.path)
        place.setblocking(False)
    connection = ZmtpClient(place, b"SUB", max_bytes=1000, loop=asyncio.get_running_loop())
    peer.accept()
    assert peer.end is not None
    assert peer.end.recv(1000) == GREETING + ready(b"SUB")
    peer.greet()
    connection.read()
    assert connection.message() is None
    assert peer.end.recv(1000) == encode([b"\x01"])
    connection.close()


async def test_over_a_connection_that_was_opened_nothing_is_said_twice() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with theirs:
        loop = asyncio.get_running_loop()
        connection = ZmtpClient(ours, b"SUB", max_bytes=1000, loop=loop, opened=True)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        connection.send([b"held"])
        theirs.send(GREETING + ready(b"XPUB"))
        connection.read()
        assert connection.message() is None
        assert theirs.recv(100) == encode([b"held"])
        connection.close()


async def test_a_connection_that_has_taken_in_a_flood_keeps_no_room_for_one(peer: Peer) -> None:
    tracemalloc.start()
    try:
        connection = ZmtpClient(
            peer.path, b"DEALER", max_bytes=2 * READ_BYTES, loop=asyncio.get_running_loop()
        )
        peer.accept()
        peer.greet()
        assert peer.end is not None
        connection.read()
        connection.message()
        peer.end.send(encode([bytes(READ_BYTES // 2)]))
        connection.read()
        assert connection.message() == [bytes(READ_BYTES // 2)]
        assert tracemalloc.get_traced_memory()[0] < READ_BYTES // 4
    finally:
        tracemalloc.stop()
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


KEY = "k" * 32
PORTS: dict[Channel, int] = {"shell": 1, "iopub": 2, "control": 4}


class Kernel:
    """The other ends of all channels, and what came of the messages they sent."""

    def __init__(self, folder: str) -> None:
        self.info = ConnectionInfo(f"{folder}/k", KEY)
        self.peers = {name: Peer(self.info.path(port)) for name, port in PORTS.items()}
        self.wire = MessageCodec(KEY)
        self.taken: list[tuple[Channel, str, object]] = []
        self.refused: list[str] = []
        self.broken: list[str] = []
        self.costs_s = 0.0
        """Processor seconds that each message costs the event loop."""
        self.waits_s = 0.0
        """Seconds that the event loop waits for a processor during each message."""

    def take(self, channel: Channel, message: Message) -> None:
        if message.kind == "poison":
            raise MemoryError
        self.taken.append((channel, message.kind, message.content.get("n")))
        sleep(self.waits_s)
        until = thread_time() + self.costs_s
        while thread_time() < until:
            pass

    def connect(self, *, reads_ahead: bool = False) -> Channels:
        listener = ChannelListener(self.take, self.refused.append, self.broken.append)
        return Channels(self.info, listener, reads_ahead=reads_ahead)

    def say(self, channel: Channel, kind: str, n: int = 0) -> None:
        self.send(channel, encode(self.wire.request(kind, {"n": n})[1]))

    def send(self, channel: Channel, data: bytes) -> None:
        end = self.peers[channel].end
        assert end is not None
        end.send(data)

    def hang_up(self, channel: Channel) -> None:
        end = self.peers[channel].end
        assert end is not None
        end.close()

    async def has_taken(self, count: int) -> None:
        with anyio.fail_after(60):
            while len(self.taken) < count:
                await anyio.lowlevel.checkpoint()

    async def is_broken(self) -> str:
        with anyio.fail_after(60):
            while not self.broken:
                await anyio.lowlevel.checkpoint()
        return self.broken[0]


@asynccontextmanager
async def connected(*, reads_ahead: bool = False) -> AsyncIterator[tuple[Kernel, Channels]]:
    """Channels whose other ends have shaken hands."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        found = kernel.connect(reads_ahead=reads_ahead)
        for peer in kernel.peers.values():
            peer.accept()
            peer.greet()
        kernel.say("iopub", "iopub_welcome")
        try:
            await found.ready(60)
            for peer in kernel.peers.values():
                await peer.take_in()
            yield kernel, found
        finally:
            found.close()
            for peer in kernel.peers.values():
                peer.close()


async def test_messages_are_delivered_in_order_with_their_channel() -> None:
    async with connected() as (kernel, channels):
        for n in range(3):
            kernel.say("iopub", "status", n)
        await kernel.has_taken(3)
        kernel.say("control", "reply", 3)
        await kernel.has_taken(4)
        assert kernel.taken == [
            ("iopub", "status", 0),
            ("iopub", "status", 1),
            ("iopub", "status", 2),
            ("control", "reply", 3),
        ]
        assert channels.received == 5  # the welcome is one


async def test_requests_arrive_signed_and_are_known_to_have_been_read() -> None:
    async with connected() as (kernel, channels):
        msg_id = channels.send("shell", "execute_request", {"code": "1"}, [b"buffer"])
        assert not channels.taken("shell")
        frames = await kernel.peers["shell"].receive()
        message = MessageCodec(KEY).decode(frames)
        assert (message.kind, message.content, message.buffers) == (
            "execute_request", {"code": "1"}, (b"buffer",),
        )  # fmt: skip
        assert msg_id.encode() in frames[2]
        assert channels.taken("shell")


async def test_a_kernel_that_does_not_greet_is_given_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        channels = kernel.connect()
        with pytest.raises(LaunchError, match=r"did not answer within 0 s\. Call reset"):
            await channels.ready(0)
        channels.close()
        for peer in kernel.peers.values():
            peer.close()


async def test_a_channel_that_is_not_there_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        kernel.peers["control"].listener.close()
        channels = kernel.connect()
        with pytest.raises(LaunchError, match="its control channel cannot be opened"):
            await channels.ready(60)
        with pytest.raises(LaunchError, match="control channel is closed"):
            channels.send("control", "kernel_info_request", {})
        assert not channels.taken("control")
        channels.close()
        for peer in kernel.peers.values():
            peer.close()


async def test_what_is_no_message_is_left_out_and_what_fails_is_told() -> None:
    async with connected() as (kernel, channels):
        kernel.send("iopub", encode([b"no", b"message"]))
        kernel.say("iopub", "poison")
        kernel.say("iopub", "status", 1)
        await kernel.has_taken(1)
        assert channels.received == 4
        (reason,) = kernel.refused
        assert reason.startswith("the server could not take it in: ")
        assert not kernel.broken


async def test_a_message_that_would_take_too_long_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(_frames: object) -> None:
        raise Overload("it has too many values")

    async with connected() as (kernel, channels):
        with monkeypatch.context() as now:
            now.setattr(channels.wire, "decode", decode)
            kernel.say("iopub", "status")
            with anyio.fail_after(60):
                while not kernel.refused:
                    await anyio.lowlevel.checkpoint()
        assert kernel.refused == ["it has too many values"]


async def test_what_breaks_the_protocol_breaks_the_channel() -> None:
    async with connected() as (kernel, channels):
        kernel.send("shell", b"\xff" * 100)
        assert "on its shell channel" in await kernel.is_broken()
        with pytest.raises(LaunchError, match="shell channel is closed"):
            channels.send("shell", "execute_request", {})


async def test_a_kernel_that_closes_a_channel_has_time_to_end_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (kernel, channels):
        kernel.hang_up("control")
        with anyio.fail_after(60):
            while "control" in channels._lines:
                await anyio.lowlevel.checkpoint()
        assert not kernel.broken
        assert not channels.unread
    monkeypatch.setattr(module, "CLOSED_GRACE_S", 0.0)
    async with connected() as (kernel, _):
        kernel.hang_up("control")
        assert await kernel.is_broken() == "it closed its control channel"


async def test_requests_that_a_kernel_has_not_read_at_its_end_are_known() -> None:
    async with connected() as (kernel, channels):
        channels.send("shell", "execute_request", {"code": "1"})
        kernel.hang_up("shell")
        with anyio.fail_after(60):
            while "shell" not in channels.unread:
                await anyio.lowlevel.checkpoint()


async def test_a_flood_is_read_in_turns_and_arrives_whole() -> None:
    async with connected() as (kernel, channels):
        kernel.costs_s = 1.1 * module.BURST_S
        for n in range(20):
            kernel.say("iopub", "stream", n)
        turns = 0
        with anyio.fail_after(60):
            while len(kernel.taken) < 20:
                before = len(kernel.taken)
                await anyio.lowlevel.checkpoint()
                turns += len(kernel.taken) > before
        assert [n for _, _, n in kernel.taken] == list(range(20))
        assert turns == 20
        assert channels.received == 21
        assert channels.rests >= 20


@pytest.mark.parametrize("reads_ahead", [False, True], ids=["pushed back", "read ahead"])
async def test_a_flood_is_received_in_a_pause_only_from_kernels_that_drop_messages(
    monkeypatch: pytest.MonkeyPatch, reads_ahead: bool
) -> None:
    monkeypatch.setattr(module, "SHARE", 1e-9)
    monkeypatch.setattr(module, "MOST_AHEAD_BYTES", 2 << 20)
    async with connected(reads_ahead=reads_ahead) as (kernel, channels):
        kernel.costs_s = 1.1 * module.BURST_S
        kernel.say("iopub", "stream")
        await kernel.has_taken(1)
        data, sent = encode(kernel.wire.request("stream", {"n": 1, "text": "x" * 9000})[1]), 0
        with suppress(BlockingIOError):
            while True:
                kernel.send("iopub", data)
                sent += len(data)
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
        assert (sent > module.MOST_AHEAD_BYTES) == reads_ahead
        assert len(kernel.taken) == 1
        monkeypatch.setattr(module, "LONGEST_READ_S", 60)
        kernel.costs_s = 0.0
        kernel.hang_up("iopub")
        await channels.drained(60)
        assert len(kernel.taken) >= sent // len(data)


async def test_waiting_for_a_processor_is_not_taken_for_a_flood() -> None:
    async with connected() as (kernel, channels):
        kernel.waits_s = 2 * module.BURST_S
        for n in range(3):
            kernel.say("iopub", "stream", n)
        await kernel.has_taken(3)
        assert channels.rests == 0


@pytest.mark.parametrize("held", [False, True], ids=["ended", "held by a child"])
async def test_what_a_dead_kernel_had_sent_is_delivered_even_in_a_pause(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    async with connected() as (kernel, channels):
        kernel.costs_s = 1.1 * module.BURST_S
        monkeypatch.setattr(module, "SHARE", 1e-9)
        for n in range(10):
            kernel.say("iopub", "stream", n)
        await kernel.has_taken(1)
        assert len(kernel.taken) == 1
        for channel in () if held else PORTS:
            kernel.hang_up(channel)
        with anyio.fail_after(60):
            await channels.drained(600)
        assert [n for _, _, n in kernel.taken] == list(range(10))


@pytest.mark.parametrize("count", [1, 2, 20])
def test_floods_have_one_part_of_the_loop_together(count: int) -> None:
    floods = Floods()
    for each in range(count):
        floods.add(each)
    rate = floods.pays(0)  # who has taken t rests for t / rate
    assert count * rate / (1 + rate) == pytest.approx(module.SHARE)
    for each in range(1, count):
        floods.discard(each)
    assert floods.pays(0) == pytest.approx(0.5)


async def test_nothing_is_delivered_or_told_once_channels_are_closed() -> None:
    async with connected() as (kernel, channels):
        kernel.say("iopub", "status")
        channels.close()
        for channel in PORTS:
            kernel.hang_up(channel)
        await anyio.wait_all_tasks_blocked()
        assert (kernel.taken, kernel.broken) == ([], [])
