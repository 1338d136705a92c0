"""The kernel's sockets, with clients of libzmq and with clients that misbehave."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from kernel_specs.restricted.wire import sockets
from kernel_specs.restricted.wire.sockets import RouterSocket, XPubSocket, listen
from kernel_specs.restricted.wire.zmtp import GREETING, Decoder, encode, ready

SECONDS = 60


class Clients:
    """Sockets of libzmq."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.made: list[zmq.Socket[bytes]] = []

    def connect(self, address: str, name: bytes = b"", kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """One more."""
        client: zmq.Socket[bytes] = self.context.socket(kind)
        self.made.append(client)
        if name:
            client.identity = name
        client.connect(address)
        return client


@pytest.fixture
def clients() -> Iterator[Clients]:
    found = Clients()
    yield found
    for client in found.made:
        client.close(0)
    found.context.term()


@pytest.fixture(params=["ipc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Server:
    """A Router and where it listens."""

    def __init__(self, transport: str, folder: Path) -> None:
        ip = "127.0.0.1" if transport == "tcp" else str(folder / "s")
        listening, self.port = listen(transport, ip, 0)
        self.router = RouterSocket(listening)
        colon = ":" if transport == "tcp" else "-"
        self.address = f"{transport}://{ip}{colon}{self.port}"

    def receive(self) -> list[bytes]:
        """The next message."""
        while (message := self.router.receive()) is None:
            self._wait()
        return message

    def serve_until(self, done: Callable[[], object]) -> None:
        """Accept and read until something has happened; no message may come."""
        while self.router.receive() is None and not done():
            self._wait()
        assert done()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self.router, select.POLLIN)
        assert poller.poll(SECONDS * 1000)


@pytest.fixture
def server(transport: str, tmp_path: Path) -> Iterator[Server]:
    made = Server(transport, tmp_path)
    yield made
    made.router.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Server]:
    made = Server("ipc", tmp_path)
    yield made
    made.router.close()


def raw(server: Server) -> socket.socket:
    """A client that speaks for itself."""
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(SECONDS)
    made.connect(server.address.removeprefix("ipc://"))
    return made


def answered(client: zmq.Socket[bytes]) -> list[bytes]:
    """The next message that a client gets."""
    assert client.poll(SECONDS * 1000)
    return client.recv_multipart()


def test_each_client_gets_its_own_answers(server: Server, clients: Clients) -> None:
    opened = {
        word: clients.connect(server.address, name)
        for word, name in ((b"one", b""), (b"two", b""), (b"three", b"named"))
    }
    for word, client in opened.items():
        client.send_multipart([word, b"", bytes(300)])
    names = set()
    for _ in opened:
        name, *message = server.receive()
        names.add(name)
        server.router.send([name, b"re", *message])
    assert len(names) == 3
    assert b"named" in names
    for word, client in opened.items():
        assert answered(client) == [b"re", word, b"", bytes(300)]


def test_a_request_socket_finds_its_partner(server: Server, clients: Clients) -> None:
    client = clients.connect(server.address, kind=zmq.REQ)
    for _ in range(2):
        client.send(b"ping")
        server.router.send(server.receive())
        assert answered(client) == [b"ping"]


def test_a_client_that_connects_again_keeps_its_name(local: Server, clients: Clients) -> None:
    first = clients.connect(local.address, b"me")
    first.send(b"1")
    assert local.receive() == [b"me", b"1"]
    second = clients.connect(local.address, b"me")
    second.send(b"2")
    assert local.receive() == [b"me", b"2"]
    local.router.send([b"me", b"answer"])
    assert answered(second) == [b"answer"]
    assert not first.poll(50)


def test_a_client_that_has_only_greeted_can_be_asked(local: Server, clients: Clients) -> None:
    """As those that wait for a kernel to ask for input."""
    client = clients.connect(local.address, b"me")
    local.serve_until(lambda: local.router._named)
    local.router.send([b"me", b"input?"])
    assert answered(client) == [b"input?"]


def test_answers_to_nobody_are_dropped(local: Server, clients: Clients) -> None:
    local.router.send([b"nobody", b"x"])
    client = clients.connect(local.address, b"me")
    client.send(b"1")
    local.receive()
    client.close(0)
    local.serve_until(lambda: not local.router._listener.peers)
    local.router.send([b"me", b"x"])


def test_large_messages_come_whole_and_leave_nothing_behind(
    server: Server, clients: Clients
) -> None:
    client = clients.connect(server.address)
    body = bytes(range(256)) * 40_000
    client.send_multipart([body, b"end"])
    name, *message = server.receive()
    assert message == [body, b"end"]
    sender = threading.Thread(target=server.router.send, args=([name, body, b"end"],))
    sender.start()
    assert answered(client) == [body, b"end"]
    sender.join(SECONDS)
    assert not sender.is_alive()
    (peer,) = server.router._listener.peers.values()
    assert not peer._out
    assert not peer._decoder._data


def test_a_client_that_takes_no_answers_is_hung_up_on(
    local: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.1)
    with raw(local) as client:
        client.sendall(GREETING + ready(b"DEALER") + encode([b"x"]))
        name, _ = local.receive()
        local.router.send([name, bytes(2_000_000)])
        assert not local.router._listener.peers
        while client.recv(1 << 20):
            pass


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n".ljust(64), GREETING + b"\xff\x00"])
def test_who_does_not_speak_the_protocol_is_hung_up_on(local: Server, data: bytes) -> None:
    with raw(local) as client:
        client.sendall(data)
        assert local.router.receive() is None
        assert not local.router._listener.peers
        assert client.recv(1000).startswith(GREETING)
        with suppress(ConnectionResetError):
            assert client.recv(1000) == b""


def test_what_a_client_sends_at_once_is_understood_bit_by_bit(local: Server) -> None:
    data = GREETING + ready(b"DEALER") + encode([b"a", b"b"]) + encode([b"c"])
    with raw(local) as client:
        found = []
        for byte in data:
            client.sendall(bytes((byte,)))
            while (message := local.router.receive()) is not None:
                found.append(message[1:])
        assert found == [[b"a", b"b"], [b"c"]]
        decoder = Decoder(1000)
        decoder.feed(client.recv(1000))
        decoder.message()
        assert decoder.ready


def test_no_memory_loses_no_message(local: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(local) as client:
        client.sendall(GREETING + ready(b"DEALER"))
        local.serve_until(lambda: local.router._listener.peers)
        feed = Decoder.feed
        failed: list[bytes] = []

        def failing(decoder: Decoder, data: bytes) -> None:
            if not failed:
                failed.append(data)
                raise MemoryError
            feed(decoder, data)

        monkeypatch.setattr(Decoder, "feed", failing)
        client.sendall(encode([b"one"]))
        with pytest.raises(MemoryError):
            local.receive()
        client.sendall(encode([b"two"]))
        assert [local.receive()[1:] for _ in range(2)] == [[b"one"], [b"two"]]


def test_no_descriptor_for_a_client_is_no_reason_to_spin(
    local: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw(local) as client:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", _no_descriptor)
            assert local.router.receive() is None
        assert not local.router._listener.peers
        with raw(local) as other:
            for each in (client, other):
                with suppress(BrokenPipeError):
                    each.sendall(GREETING + ready(b"DEALER") + encode([b"x"]))
            assert local.receive()[1:] == [b"x"]


def test_pings_are_answered(local: Server) -> None:
    with raw(local) as client:
        ping = b"\x04PING\0\x01context"
        client.sendall(GREETING + ready(b"DEALER") + bytes((4, len(ping))) + ping + encode([b"x"]))
        assert local.receive()[1:] == [b"x"]
        pong = b"\x04PONGcontext"
        answer = client.recv(1000)
        assert answer.endswith(bytes((4, len(pong))) + pong)


def test_a_signal_handler_that_raises_while_something_is_sent_breaks_no_message(
    local: Server,
) -> None:
    class Broken(socket.socket):
        """Raises after it has sent."""

        def send(self, *arguments: Any) -> int:
            size = super().send(*arguments)
            if fail:
                raise fail.pop()
            return size

    fail: list[Exception] = []
    with raw(local) as client:
        client.sendall(GREETING + ready(b"DEALER") + encode([b"x"]))
        name, _ = local.receive()
        (peer,) = local.router._listener.peers.values()
        peer._socket = Broken(fileno=peer._socket.detach())
        fail.append(TimeoutError("the alarm of user code"))
        with pytest.raises(TimeoutError):
            local.router.send([name, b"one"])
        local.router.send([name, b"two"])
        decoder = Decoder(1000)
        found: list[list[bytes]] = []
        while [b"two"] not in found:
            decoder.feed(client.recv(1000))
            while (message := decoder.message()) is not None:
                found.append(message)


def _no_descriptor(*_: object) -> None:
    raise OSError(errno.EMFILE, "too many open files")


def test_a_port_that_is_given_is_taken_from_the_kernel_before(tmp_path: Path) -> None:
    first, port = listen("ipc", str(tmp_path / "s"), 0)
    assert port == 1
    second, port = listen("ipc", str(tmp_path / "s"), 0)
    assert port == 2
    third, port = listen("ipc", str(tmp_path / "s"), 1)
    assert port == 1
    for each in (first, second, third):
        each.close()


def test_a_reader_that_holds_up_another_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, port = listen("ipc", str(tmp_path / "s"), 0)
    publisher = XPubSocket(listening, 1_000_000)
    readers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    try:
        for reader in readers:
            reader.connect(f"{tmp_path / 's'}-{port}")
            reader.sendall(GREETING + ready(b"SUB") + encode([b"\x01"]))
            reader.setblocking(False)
        topics: list[bytes] = []
        while len(topics) < 2:
            select.select([publisher], [], [], SECONDS)
            topics += publisher.subscribed()
        while not publisher.full:
            publisher.put([b"topic", b"x" * 100_000])
            publisher.flush()
        monkeypatch.setattr(sockets, "BEHIND_SECONDS", -1.0)
        publisher.shed()
        assert publisher.full, "all are slow: who prints has to wait"
        while all(peer.waiting for peer in publisher._subscribers()):
            with suppress(BlockingIOError):
                readers[0].recv(1 << 20)
            publisher.flush()
        monkeypatch.setattr(sockets, "BEHIND_SECONDS", SECONDS)
        publisher.shed()
        assert publisher.full, "it gets some time"
        monkeypatch.setattr(sockets, "BEHIND_SECONDS", -1.0)
        publisher.shed()
        assert not publisher.full
        assert not publisher.waiting
    finally:
        for reader in readers:
            reader.close()
        publisher.close()


def test_a_forked_process_leaves_what_another_thread_was_sending(
    local: Server, clients: Clients
) -> None:
    client = clients.connect(local.address)
    client.send(b"")
    local.receive()
    (peer,) = local.router._listener.peers.values()
    peer.keep(b"not sent yet")
    with memoryview(peer._out):  # as while it is sent by a thread that the child does not have
        local.router.leave()
    assert peer.fileno() == -1
    with pytest.raises(ValueError, match="closed"):
        local.router.fileno()
