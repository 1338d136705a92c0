"""The iopub channel: one XPUB socket, one ordered queue, one lock.

Every message of the kernel goes through one first-in-first-out queue and is sent by whichever
thread put it there, so nothing is handed from thread to thread and nothing overtakes. A reader that
is slower than the code that prints makes that code wait: memory stays bounded.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from kernel_specs.restricted.config import Output
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.recorder import Recorder
from kernel_specs.restricted.session import LeanSession

SEND_HWM = 64
"""Messages libzmq may hold for a reader that has fallen behind."""
POLL_SECONDS = 0.02
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # plain integers: enum arithmetic is slow
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
STALL_SECONDS = 30.0
"""A reader that takes nothing for this long is gone: what it missed is dropped, code runs on."""


@dataclass
class _Text:
    """Text not yet made into a message; grows until it is sent."""

    name: str
    parent: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    size: int = 0


class IOPub:
    """Owner of the XPUB socket. Everything that is published goes through here, in order."""

    def __init__(
        self,
        socket: Any,
        session: LeanSession,
        output: Output,
        gate: InterruptGate,
        recorder: Recorder,
    ) -> None:
        """Set up an already bound or still unbound XPUB socket."""
        # Without NODROP libzmq silently drops what does not fit; VERBOSE greets every subscriber.
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self.lock = threading.RLock()
        self.parent: dict[str, Any] = {}
        self.flush_text: Callable[[], None] = lambda: None
        self.service_thread: threading.Thread | None = None
        self._socket = socket
        self._fd = socket.getsockopt(zmq.FD)
        self._session = session
        self._output = output
        self._gate = gate
        self._recorder = recorder
        self._queue: deque[_Text | list[Any]] = deque()
        self._text_size = 0
        self._pumping = False
        self._stalled = False
        self._forgotten = False

    @property
    def blocked(self) -> bool:
        """Whether the reader has fallen behind: something could not be sent."""
        return bool(self._queue) and isinstance(self._queue[0], list)

    def send_multipart(
        self, parts: list[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        """Publish one message after all text before it; what Session.send calls."""
        size = sum(len(part) for part in parts)
        with self.lock:
            self.flush_text()
            if size > self._output.message_bytes:
                self._put_text("stderr", self._too_large(size))
            elif not (self._stalled and len(self._queue) >= SEND_HWM):
                self._queue.append(parts)
            self._pump()
        self.wait()

    def put_text(self, name: str, text: str) -> None:
        """Append text; it is sent once there is enough of it, or by `pump`."""
        with self.lock:
            self._put_text(name, text)
            if self._text_size >= self._output.chunk_bytes:
                self._pump()

    def pump(self) -> bool:
        """Send what can be sent now, without waiting; True when nothing is left."""
        with self.lock:
            return self._pump()

    def wait(self) -> None:
        """Wait while the reader has fallen behind, so that no code prints faster than it is read.

        The service thread never waits: it must stay able to answer. Raises KeyboardInterrupt.
        """
        if not self.blocked or self._must_not_wait():
            return
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        left, deadline = len(self._queue), time.monotonic() + STALL_SECONDS
        while not self.pump():
            if len(self._queue) < left:
                left, deadline = len(self._queue), time.monotonic() + STALL_SECONDS
            elif time.monotonic() > deadline:
                self._stalled = True
                return
            self._gate.check()
            poller.poll(POLL_SECONDS * 1000)

    def forget(self) -> None:
        """Drop everything in a forked child: the socket still belongs to the parent there."""
        self.lock = threading.RLock()
        self._forgotten = True
        self._queue.clear()
        self._text_size = 0

    def close(self) -> None:
        """Send what is left, as far as it goes at once, and close the socket."""
        with self.lock:
            self.flush_text()
            self._pump()
            self._queue.clear()
            self._socket.close()
            self._forgotten = True

    def _put_text(self, name: str, text: str) -> None:
        if self._stalled and self._text_size >= self._output.chunk_bytes:
            return
        self._recorder.add(text)
        for start in range(0, len(text), self._output.chunk_bytes):
            piece = text[start : start + self._output.chunk_bytes]
            last = self._queue[-1] if self._queue else None
            if not (
                isinstance(last, _Text)
                and last.name == name
                and last.parent is self.parent
                and last.size < self._output.chunk_bytes
            ):
                last = _Text(name, self.parent)
                self._queue.append(last)
            last.pieces.append(piece)
            last.size += len(piece)
            self._text_size += len(piece)

    def _pump(self) -> bool:
        """Send from the head of the queue until it is empty or the socket is full.

        A garbage collection or a signal handler may print while a message is being sent:
        what it prints is queued, and sent by the call that is already at work.
        """
        if self._forgotten:
            return True
        if self._pumping:
            return False
        self._pumping = True
        try:
            while True:
                while self._queue and self._send_first():
                    self._queue.popleft()
                    self._stalled = False
                # Sending consumes the edge of the socket's file descriptor that would have
                # announced a subscriber, so look every time.
                if not self._socket.getsockopt(_EVENTS) & _POLLIN:
                    return not self._queue
                self._greet()
        finally:
            self._pumping = False

    def _send_first(self) -> bool:
        item = self._queue[0]
        if isinstance(item, _Text):
            message = self._stream_message(item)
            self._text_size -= item.size
            item = self._queue[0] = message
        sent = 0
        try:
            for part in item[:-1]:
                self._socket.send(part, _MORE)
                sent += 1
            self._socket.send(item[-1], _NOBLOCK)
        except zmq.Again:
            return False  # only ever at the first part: a message that fits is taken whole
        except (zmq.ZMQError, MemoryError):
            if sent:  # end the broken message, or the next one would continue it
                self._socket.send(b"", _NOBLOCK)
            self._put_text("stderr", "[an output was lost: there was no memory to send it]\n")
        return True

    def _stream_message(self, text: _Text) -> list[Any]:
        content = {"name": text.name, "text": "".join(text.pieces)}
        msg = self._session.msg("stream", content, text.parent)
        return list(self._session.serialize(msg, b"stream." + text.name.encode()))

    def _greet(self) -> None:
        """Answer new subscribers with iopub_welcome, as ipykernel does."""
        frame = self._socket.recv(_NOBLOCK)
        if frame[:1] != b"\x01":
            return
        topic = frame[1:]
        content = {"subscription": topic.decode("utf-8", "replace")}
        msg = self._session.msg("iopub_welcome", content)
        self._queue.append(self._session.serialize(msg, topic or None))

    def _must_not_wait(self) -> bool:
        return self._pumping or self._stalled or threading.current_thread() is self.service_thread

    def _too_large(self, size: int) -> str:
        limit = self._output.message_bytes
        return (
            f"[an output of {size / 1e6:.1f} MB was left out: a message may have "
            f"{limit / 1e6:.1f} MB; save it to a file instead]\n"
        )
