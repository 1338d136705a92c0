"""The iopub queue, read by subscribers of libzmq."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kernel_specs.restricted.config import OutputSettings
from kernel_specs.restricted.console import iopub as module
from kernel_specs.restricted.console.iopub import QUEUE_MOST, IOPubPublisher, OutputRingWriter
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.wire.session import LeanSession
from kernel_specs.restricted.wire.sockets import XPubSocket, listen

SECONDS = 60
MANY = 400
"""Messages of `PADDING` bytes: more than what fits between a publisher and a reader."""
PADDING = "x" * 5000


class Bench:
    """A publisher that a thread attends to, and subscribers."""

    def __init__(self, folder: Path, output: OutputSettings) -> None:
        """Listen."""
        self.context = zmq.Context()
        listening, self.port = listen("ipc", str(folder / "s"), 0)
        self.address = f"ipc://{folder}/s-{self.port}"
        self.publisher = XPubSocket(listening, high_water=50_000)
        self.session = LeanSession(key=b"k")
        self.gate = InterruptGate()
        self.iopub = IOPubPublisher(
            self.publisher, self.session, output, self.gate, OutputRingWriter(-1)
        )
        self.readers: list[zmq.Socket[bytes]] = []
        self._ended = threading.Event()
        self._service = threading.Thread(target=self._attend)
        self._service.start()

    def subscribe(self, *, hwm: int = 0) -> zmq.Socket[bytes]:
        """Connect a subscriber; it is greeted."""
        reader: zmq.Socket[bytes] = self.context.socket(zmq.SUB)
        reader.rcvhwm = hwm
        reader.subscribe(b"")
        reader.connect(self.address)
        self.readers.append(reader)
        return reader

    def greeted(self, *, hwm: int = 0) -> zmq.Socket[bytes]:
        """Connect a subscriber that has been greeted."""
        reader = self.subscribe(hwm=hwm)
        assert self.read(reader)[0] == "iopub_welcome"
        return reader

    def read(self, reader: zmq.Socket[bytes]) -> tuple[str, dict[str, Any]]:
        """Type and content of the next message."""
        assert reader.poll(SECONDS * 1000)
        _, frames = self.session.feed_identities(reader.recv_multipart())
        message = self.session.deserialize(frames)
        return message["msg_type"], message["content"]

    def publish(self, kind: str, content: dict[str, Any] | None = None) -> None:
        """Send a message that is no text."""
        self.session.send(self.iopub, kind, content or {}, ident=f"kernel.{kind}".encode())

    def number(self, number: int) -> None:
        """Send a numbered message."""
        self.publish("display_data", {"n": number, "padding": PADDING})

    def numbers(self, reader: zmq.Socket[bytes], count: int) -> list[int]:
        """The numbers of the next messages."""
        return [self.read(reader)[1]["n"] for _ in range(count)]

    def close(self) -> None:
        """Close everything without waiting for readers."""
        self._ended.set()
        self._service.join()
        for reader in self.readers:
            reader.close(0)
        self.context.destroy(0)
        self.iopub.close()

    def _attend(self) -> None:
        poller = select.poll()
        poller.register(self.publisher, select.POLLIN)
        while not self._ended.is_set():
            if poller.poll(10):
                self.iopub.attend()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, OutputSettings(chunk_bytes=100, message_bytes=10_000))
    yield made
    made.close()


def test_every_subscriber_is_greeted(bench: Bench) -> None:
    first = bench.subscribe()
    assert bench.read(first) == ("iopub_welcome", {"subscription": ""})
    second = bench.subscribe()
    assert bench.read(second) == ("iopub_welcome", {"subscription": ""})


def test_text_goes_ahead_of_a_message_and_is_joined(bench: Bench) -> None:
    reader = bench.greeted()
    bench.iopub.put_text("stdout", "a")
    bench.iopub.put_text("stdout", "b")
    bench.iopub.put_text("stderr", "c")
    bench.iopub.put_text("stdout", "d")
    bench.publish("display_data")
    bench.iopub.put_text("stdout", "e")
    bench.iopub.pump()
    assert [bench.read(reader) for _ in range(5)] == [
        ("stream", {"name": "stdout", "text": "ab"}),
        ("stream", {"name": "stderr", "text": "c"}),
        ("stream", {"name": "stdout", "text": "d"}),
        ("display_data", {}),
        ("stream", {"name": "stdout", "text": "e"}),
    ]


def test_enough_text_is_sent_without_being_asked_for_and_in_chunks(bench: Bench) -> None:
    reader = bench.greeted()
    bench.iopub.put_text("stdout", "x" * 250)
    assert [len(bench.read(reader)[1]["text"]) for _ in range(3)] == [100, 100, 50]


def test_text_belongs_to_the_request_it_was_printed_under(bench: Bench) -> None:
    reader = bench.greeted()
    for name in ("first", "second"):
        bench.iopub.parent = {"msg_id": name}
        bench.iopub.put_text("stdout", name)
    bench.iopub.pump()
    for name in ("first", "second"):
        frames = reader.recv_multipart()
        assert json.loads(frames[4]) == {"msg_id": name}
        assert json.loads(frames[6])["text"] == name


def test_a_message_too_large_becomes_a_note(bench: Bench) -> None:
    reader = bench.greeted()
    bench.publish("display_data", {"data": "x" * 20_000})
    kind, content = bench.read(reader)
    assert (kind, content["name"]) == ("stream", "stderr")
    assert "left out" in content["text"]


def test_without_a_reader_nothing_is_kept(bench: Bench) -> None:
    for _ in range(1000):
        bench.publish("status")
    assert not bench.iopub.blocked


@pytest.mark.parametrize("kind", ["status", "execute_input", "execute_result"])
def test_what_tells_a_reader_nothing_waits_for_what_does(bench: Bench, kind: str) -> None:
    reader = bench.greeted()
    bench.publish(kind)
    assert not reader.poll(50)
    bench.publish("display_data")
    assert [bench.read(reader)[0] for _ in range(2)] == [kind, "display_data"]
    bench.publish(kind)
    bench.iopub.pump()
    assert bench.read(reader)[0] == kind


def test_only_text_waits_and_what_a_reader_does_not_take(bench: Bench) -> None:
    reader = bench.greeted(hwm=1)
    bench.publish("status")
    assert not bench.iopub.waiting
    bench.iopub.put_text("stdout", "text")
    assert bench.iopub.waiting
    bench.iopub.pump()
    assert not bench.iopub.waiting
    assert [bench.read(reader)[0] for _ in range(2)] == ["status", "stream"]
    bench.iopub.service_thread = threading.current_thread()
    for number in range(MANY):
        bench.number(number)
    assert bench.iopub.waiting
    assert bench.numbers(reader, MANY) == list(range(MANY))
    assert not bench.iopub.waiting


def test_a_slow_reader_makes_the_writer_wait_and_gets_everything_in_order(bench: Bench) -> None:
    reader = bench.greeted(hwm=1)

    def write() -> None:
        for number in range(MANY):
            bench.number(number)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()
    assert bench.numbers(reader, MANY) == list(range(MANY))
    writer.join(SECONDS)
    assert not writer.is_alive()


def test_the_service_thread_never_waits(bench: Bench) -> None:
    reader = bench.greeted(hwm=1)
    bench.iopub.service_thread = threading.current_thread()
    for number in range(MANY):
        bench.number(number)
    assert bench.iopub.blocked
    assert bench.numbers(reader, MANY) == list(range(MANY))
    assert not bench.iopub.blocked


def test_a_waiting_writer_can_be_interrupted_and_loses_nothing(bench: Bench) -> None:
    reader = bench.greeted(hwm=1)
    bench.gate.check = _raise_on_call(3)  # type: ignore[method-assign]
    sent = []

    def write() -> None:
        for number in range(MANY):
            sent.append(number)
            bench.number(number)

    with pytest.raises(KeyboardInterrupt):
        write()
    assert bench.numbers(reader, len(sent)) == sent


def test_a_reader_that_is_gone_does_not_stop_the_kernel_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.1)
    reader = bench.greeted(hwm=1)
    for number in range(MANY):
        bench.number(number)
        bench.iopub.put_text("stdout", "x" * 50)
    assert bench.iopub.blocked
    kept = len(bench.iopub._queue)
    assert kept <= QUEUE_MOST + 4
    seen = []
    while reader.poll(500):
        seen.append(bench.read(reader))
    assert len(seen) < 2 * MANY
    bench.publish("display_data", {"n": -1})
    assert bench.read(reader) == ("display_data", {"n": -1})


def test_other_readers_get_everything_when_one_has_gone(bench: Bench) -> None:
    gone, stays = bench.greeted(), bench.greeted()
    gone.close(0)
    bench.readers.remove(gone)
    for number in range(10):
        bench.number(number)
    assert bench.numbers(stays, 10) == list(range(10))


def test_only_topics_that_were_subscribed_to_are_sent(bench: Bench) -> None:
    reader: zmq.Socket[bytes] = bench.context.socket(zmq.SUB)
    bench.readers.append(reader)
    reader.subscribe(b"stream.stderr")
    reader.connect(bench.address)
    assert bench.read(reader) == ("iopub_welcome", {"subscription": "stream.stderr"})
    for name in ("stdout", "stderr"):
        bench.iopub.put_text(name, "x")
    bench.iopub.pump()
    assert bench.read(reader) == ("stream", {"name": "stderr", "text": "x"})
    reader.unsubscribe(b"stream.stderr")
    reader.subscribe(b"other")  # whose welcome tells that the one before it has been read
    assert bench.read(reader) == ("iopub_welcome", {"subscription": "other"})
    bench.iopub.put_text("stderr", "y")
    bench.iopub.pump()
    assert not reader.poll(50)


def test_what_is_printed_while_a_message_is_sent_comes_after_it(bench: Bench) -> None:
    """As a finaliser does that the garbage collector runs in the middle."""
    reader = bench.greeted()
    serialize = bench.session.serialize
    done: list[bool] = []

    def printing(msg: dict[str, Any], ident: Any = None) -> list[bytes]:
        if not done:
            done.append(True)
            bench.iopub.put_text("stdout", "y" * 200)
            bench.publish("status")
        return serialize(msg, ident)

    bench.session.serialize = printing  # type: ignore[method-assign]
    bench.iopub.put_text("stderr", "x" * 100)
    kinds = [bench.read(reader) for _ in range(4)]
    assert [content.get("text", kind)[:1] for kind, content in kinds] == ["x", "y", "y", "s"]


def test_a_forked_child_touches_no_socket(bench: Bench) -> None:
    reader = bench.greeted()
    bench.iopub.forget()
    bench.iopub.put_text("stdout", "x" * 1000)
    assert bench.iopub.pump()
    assert not reader.poll(50)


def _raise_on_call(number: int) -> Callable[[], None]:
    calls = iter(range(1, number + 1))

    def check() -> None:
        if next(calls) == number:
            raise KeyboardInterrupt

    return check
