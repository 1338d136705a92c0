"""The iopub channel: one XPUB socket, one ordered queue, one lock.

Every message goes through one first-in-first-out queue, and the thread that adds it sends it. So
the order holds, and no thread waits for another one to run. A slow reader blocks the code that
prints, so the queue stays bounded.

Messages of `UNHURRIED` topics are sent with the next other message or at the end of the request.
Thus a quick cell is one sendmsg(2), and wakes its reader once.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernel_specs.restricted.config import OutputSettings
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.wire.session import LeanSession
from kernel_specs.restricted.wire.sockets import STALL_SECONDS, XPubSocket

HEADER_BYTES = 64
_COUNTERS = struct.Struct("<QQ")


class OutputRingWriter:
    """A memfd with the end of all stream text, which the host can read after a crash.

    Its header counts characters and UTF-8 bytes since the start. The ring follows: byte n of the
    text is at n modulo the ring's size.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory and close the descriptor; with -1, keep nothing."""
        self._memory: mmap.mmap | None = None
        self._characters = self._bytes = 0
        if fd >= 0:
            self._memory = mmap.mmap(fd, 0)
            self._size = len(self._memory) - HEADER_BYTES
            os.close(fd)

    def add(self, text: str) -> None:
        """Append text; the counters are written last, so that all counted text is complete."""
        if self._memory is None:
            return
        data = text.encode("utf-8", "replace")
        self._characters += len(text)
        kept = data[-self._size :]
        start = (self._bytes + len(data) - len(kept)) % self._size
        first = min(len(kept), self._size - start)
        at = HEADER_BYTES + start
        self._memory[at : at + first] = kept[:first]
        self._memory[HEADER_BYTES : HEADER_BYTES + len(kept) - first] = kept[first:]
        self._bytes += len(data)
        _COUNTERS.pack_into(self._memory, 0, self._characters, self._bytes)


HIGH_WATER_BYTES = 1024 * 1024
"""Bytes queued for a slow reader above which the code that prints has to wait."""
QUEUE_MOST = 64
"""Most messages kept for a stalled reader."""
POLL_SECONDS = 0.02
HAND_OUT_SECONDS = 0.2
"""Longest wait for readers to receive a large message."""
UNHURRIED = (b".status", b".execute_input", b".execute_result")
"""Suffixes of the topics whose messages are sent with the next other one."""


@dataclass
class _Text:
    """Text of a stream message that is not yet sent."""

    name: str
    parent: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    size: int = 0


class IOPubPublisher:
    """Owns the XPUB socket, and sends what is published in order."""

    def __init__(
        self,
        publisher: XPubSocket,
        session: LeanSession,
        output: OutputSettings,
        gate: InterruptGate,
        ring: OutputRingWriter,
    ) -> None:
        self.lock = threading.RLock()
        self.parent: dict[str, Any] = {}
        self.flush_text: Callable[[], None] = lambda: None
        self.service_thread: threading.Thread | None = None
        self.high_water = HIGH_WATER_BYTES
        self._publisher = publisher
        self._session = session
        self._output = output
        self._gate = gate
        self._ring = ring
        self._queue: deque[_Text | list[Any]] = deque()
        self._text_size = 0
        self._pumping = False
        self._stalled = False
        self._forgotten = False

    @property
    def waiting(self) -> bool:
        """Return True if there is text to send, or messages wait for send(2)."""
        return self._text_size > 0 or self.blocked

    @property
    def is_parents(self) -> bool:
        """Return True in a forked child, whose messages are dropped."""
        return self._forgotten

    @property
    def blocked(self) -> bool:
        """Return True if messages wait because send(2) would block."""
        return bool(self._queue) and self._publisher.full

    def send_multipart(
        self, parts: list[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        """Publish one message after all text before it; called by Session.send."""
        size = sum(len(part) for part in parts)
        hurried = not parts[0].endswith(UNHURRIED)
        with self.lock:
            self.flush_text()
            if size > self._output.message_bytes:
                self._put_text("stderr", self._too_large(size))
            elif not (self._stalled and len(self._queue) >= QUEUE_MOST):
                self._queue.append(parts)
            if hurried:
                self._pump()
        self.wait()

    def put_text(self, name: str, text: str) -> None:
        """Append text; it is sent once there is enough of it, or by `pump`."""
        with self.lock:
            self._put_text(name, text)
            if self._text_size >= self._output.chunk_bytes:
                self._pump()

    def pump(self) -> bool:
        """Send what can be sent now, without waiting; return True if nothing is left."""
        with self.lock:
            return self._pump()

    def attend(self) -> None:
        """Send iopub_welcome to new subscribers, as ipykernel does, then queued messages."""
        with self.lock:
            for topic in self._publisher.subscribed():
                content = {"subscription": topic.decode("utf-8", "replace")}
                msg = self._session.msg("iopub_welcome", content)
                self._queue.append(self._session.serialize(msg, topic or None))
            self._pump()

    def wait(self) -> None:
        """Wait until all is sent, or the reader has received nothing for `STALL_SECONDS`.

        Does nothing in the service thread, which answers control requests. Raises
        KeyboardInterrupt.
        """
        if self._must_not_wait():
            return
        self._gate.catch_up()
        if not self.blocked:
            self._hand_out()
            return
        left, deadline = self._left(), time.monotonic() + STALL_SECONDS
        while not self.pump():
            if self._left() != left:
                left, deadline = self._left(), time.monotonic() + STALL_SECONDS
            elif time.monotonic() > deadline:
                self._stalled = True
                return
            self._gate.check()
            self._publisher.wait(POLL_SECONDS)

    def _hand_out(self) -> None:
        """Send what exceeds the socket's buffer, for at most `HAND_OUT_SECONDS`.

        Code that follows may end the process, or hold the GIL.
        """
        deadline = time.monotonic() + HAND_OUT_SECONDS
        while (left := self._publisher.waiting) and time.monotonic() < deadline:
            self._publisher.wait(POLL_SECONDS)
            self.pump()
            if self._publisher.waiting >= left:
                return

    def leave(self) -> None:
        """Close the socket in a checkpoint, without sending anything."""
        self._queue.clear()
        self._text_size = 0
        self._publisher.leave()

    def renew(self, publisher: XPubSocket, ring: OutputRingWriter) -> None:
        """Use a new socket and ring, in a kernel forked from a checkpoint.

        Drops text of the fork itself, such as that of hooks of packages.
        """
        self.flush_text()
        self._queue.clear()
        self._text_size = 0
        self._publisher, self._ring = publisher, ring
        self._stalled = self._pumping = False

    def forget(self) -> None:
        """Drop all messages in a forked child: the socket is the parent's."""
        self.lock = threading.RLock()
        self._forgotten = True
        self._queue.clear()
        self._text_size = 0

    def close(self) -> None:
        """Send as much as the socket's buffer accepts, and close the socket."""
        with self.lock:
            self.flush_text()
            self._pump()
            self._queue.clear()
            self._forgotten = True
            self._publisher.close()

    def _put_text(self, name: str, text: str) -> None:
        if self._stalled and self._text_size >= self._output.chunk_bytes:
            return
        self._ring.add(text)
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

        A garbage collection or a signal handler may print while a message is being sent.
        That text is queued, and sent by the call that is already running.
        """
        if self._forgotten:
            return True
        if self._pumping:
            return False
        self._pumping = True
        try:
            while self._queue and self._send_first():
                self._queue.popleft()
                self._stalled = False
            self._publisher.flush()
            return not self._queue
        finally:
            self._pumping = False

    def _send_first(self) -> bool:
        if self._publisher.full:
            self._publisher.flush()
            self._publisher.shed()
            if self._publisher.full:
                return False
        item = self._queue[0]
        if isinstance(item, _Text):
            message = self._stream_message(item)
            self._text_size -= item.size
            item = self._queue[0] = message
        try:
            self._publisher.put(item)
        except MemoryError:
            self._put_text("stderr", "[an output was lost: there was no memory to send it]\n")
        except TypeError as error:
            self._put_text("stderr", f"[an output was lost: it is no message: {error}]\n")
        return True

    def _stream_message(self, text: _Text) -> list[Any]:
        content = {"name": text.name, "text": "".join(text.pieces)}
        msg = self._session.msg("stream", content, text.parent)
        return list(self._session.serialize(msg, b"stream." + text.name.encode()))

    def _left(self) -> tuple[int, int]:
        return len(self._queue), self._publisher.waiting

    def _must_not_wait(self) -> bool:
        return self._pumping or self._stalled or threading.current_thread() is self.service_thread

    def _too_large(self, size: int) -> str:
        limit = self._output.message_bytes
        return (
            f"[an output of {size / 1e6:.1f} MB was left out: a message may have "
            f"{limit / 1e6:.1f} MB; save it to a file instead]\n"
        )
