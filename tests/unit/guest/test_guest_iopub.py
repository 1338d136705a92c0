"""The iopub queue on a real XPUB socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kernel_specs.restricted import iopub as module
from kernel_specs.restricted.config import Output
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.iopub import SEND_HWM, IOPub
from kernel_specs.restricted.recorder import Recorder
from kernel_specs.restricted.session import LeanSession

SECONDS = 10


class Bench:
    """A publisher and subscribers in one process."""

    def __init__(self, output: Output | None = None) -> None:
        """Bind the publisher."""
        self.context = zmq.Context()
        socket = self.context.socket(zmq.XPUB)
        self.session = LeanSession(key=b"k")
        self.gate = InterruptGate()
        self.iopub = IOPub(socket, self.session, output or Output(), self.gate, Recorder(-1))
        socket.bind("inproc://iopub")
        self.readers: list[zmq.Socket[bytes]] = []

    def subscribe(self, *, hwm: int = 0) -> zmq.Socket[bytes]:
        """Connect a subscriber and greet it."""
        reader: zmq.Socket[bytes] = self.context.socket(zmq.SUB)
        reader.rcvhwm = hwm
        reader.subscribe(b"")
        reader.connect("inproc://iopub")
        self.readers.append(reader)
        self.iopub.pump()
        return reader

    def read(self, reader: zmq.Socket[bytes]) -> tuple[str, dict[str, Any]]:
        """Type and content of the next message."""
        assert reader.poll(SECONDS * 1000)
        _, frames = self.session.feed_identities(reader.recv_multipart())
        message = self.session.deserialize(frames)
        return message["msg_type"], message["content"]

    def publish(self, kind: str, content: dict[str, Any] | None = None) -> None:
        """Send a message that is no text."""
        self.session.send(self.iopub, kind, content or {})

    def close(self) -> None:
        """Close everything without waiting for readers."""
        self.iopub.close()
        for reader in self.readers:
            reader.close(0)
        self.context.destroy(0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(Output(chunk_bytes=100, message_bytes=10_000))
    yield made
    made.close()


def test_every_subscriber_is_greeted(bench: Bench) -> None:
    first = bench.subscribe()
    assert bench.read(first) == ("iopub_welcome", {"subscription": ""})
    second = bench.subscribe()
    assert bench.read(second) == ("iopub_welcome", {"subscription": ""})


def test_text_goes_ahead_of_a_message_and_is_joined(bench: Bench) -> None:
    reader = bench.subscribe()
    bench.read(reader)
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
    reader = bench.subscribe()
    bench.read(reader)
    bench.iopub.put_text("stdout", "x" * 250)
    assert [len(bench.read(reader)[1]["text"]) for _ in range(3)] == [100, 100, 50]


def test_text_belongs_to_the_request_it_was_printed_under(bench: Bench) -> None:
    reader = bench.subscribe()
    bench.read(reader)
    for name in ("first", "second"):
        bench.iopub.parent = {"msg_id": name}
        bench.iopub.put_text("stdout", name)
    bench.iopub.pump()
    for name in ("first", "second"):
        frames = reader.recv_multipart()
        assert json.loads(frames[4]) == {"msg_id": name}
        assert json.loads(frames[6])["text"] == name


def test_a_message_too_large_becomes_a_note(bench: Bench) -> None:
    reader = bench.subscribe()
    bench.read(reader)
    bench.publish("display_data", {"data": "x" * 20_000})
    kind, content = bench.read(reader)
    assert (kind, content["name"]) == ("stream", "stderr")
    assert "left out" in content["text"]


def test_without_a_reader_nothing_is_kept(bench: Bench) -> None:
    for _ in range(1000):
        bench.publish("status")
    assert not bench.iopub.blocked


def test_a_slow_reader_makes_the_writer_wait_and_gets_everything_in_order(bench: Bench) -> None:
    reader = bench.subscribe(hwm=1)
    bench.read(reader)
    count = 20 * SEND_HWM

    def write() -> None:
        for number in range(count):
            bench.publish("status", {"n": number})

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    assert [bench.read(reader)[1]["n"] for _ in range(count)] == list(range(count))
    writer.join(SECONDS)
    assert not writer.is_alive()


def test_the_service_thread_never_waits(bench: Bench) -> None:
    reader = bench.subscribe(hwm=1)
    bench.read(reader)
    bench.iopub.service_thread = threading.current_thread()
    for number in range(3 * SEND_HWM):
        bench.publish("status", {"n": number})
    assert bench.iopub.blocked
    for number in range(3 * SEND_HWM):
        assert bench.read(reader)[1] == {"n": number}
        bench.iopub.pump()
    assert not bench.iopub.blocked


def test_a_waiting_writer_can_be_interrupted_and_loses_nothing(bench: Bench) -> None:
    reader = bench.subscribe(hwm=1)
    bench.read(reader)
    bench.gate.check = _raise_on_call(3)  # type: ignore[method-assign]
    sent = []

    def write() -> None:
        for number in range(10 * SEND_HWM):
            sent.append(number)
            bench.publish("status", {"n": number})

    with pytest.raises(KeyboardInterrupt):
        write()
    for number in sent:
        assert bench.read(reader)[1] == {"n": number}
        bench.iopub.pump()


def test_a_reader_that_is_gone_does_not_stop_the_kernel_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.1)
    reader = bench.subscribe(hwm=1)
    bench.read(reader)
    for number in range(20 * SEND_HWM):
        bench.publish("status", {"n": number})
        bench.iopub.put_text("stdout", "x" * 50)
    assert bench.iopub.blocked
    seen = [bench.read(reader)]
    while bench.iopub.blocked or reader.poll(0):
        seen.append(bench.read(reader))
        bench.iopub.pump()
    assert len(seen) < 20 * SEND_HWM
    bench.publish("status", {"n": -1})
    assert bench.read(reader) == ("status", {"n": -1})


def test_what_is_printed_while_a_message_is_sent_comes_after_it(bench: Bench) -> None:
    """As a finaliser does that the garbage collector runs in the middle."""
    reader = bench.subscribe()
    bench.read(reader)
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
    reader = bench.subscribe()
    bench.read(reader)
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
