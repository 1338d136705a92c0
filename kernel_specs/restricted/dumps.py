"""The bytes of a dump: how they are made without copies, and how they fall into place again.

Layout: length of the header (8 bytes), the header (JSON), then for each segment its pickles and the
buffers that lie outside of them. A segment holds values that were pickled with one memo, so that
objects they share are still shared afterwards.
"""

from __future__ import annotations

import json
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kernel_specs.restricted.watch import TooLargeError

if TYPE_CHECKING:
    from kernel_specs.restricted.pickles import NotebookPickler

LENGTH = struct.Struct("<Q")
RESULT = re.compile(r"Out\[\d+\]")
"""The name of a cell's result in a dump."""
BUFFER_BYTES = 64 * 1024
"""Buffers from this size on are passed without being copied into the pickle."""


class Room:
    """Bytes that a dump may still take."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._size = self.left = size

    def take(self, count: int) -> None:
        """Use bytes. Raises TooLargeError."""
        if count > self.left:
            raise TooLargeError(f"too large: a dump takes {self._size / 1e6:,.0f} MB in all")
        self.left -= count


class Segment:
    """Values pickled with one memo; a failed one leaves no trace."""

    def __init__(self, room: Room, pickler: Callable[[Any, Callable[[Any], bool]], Any]) -> None:
        """`pickler` makes a NotebookPickler from a file and a callback for buffers.

        `copies` names the values that no longer share the memory of their arrays with others.
        """
        self.names: list[str] = []
        self.copies: list[str] = []
        self._modules: dict[str, list[str]] = {}
        self.pickles: list[bytes] = []
        self.buffers: list[memoryview] = []
        self._room = room
        self._pickler: NotebookPickler = pickler(self, self._put_aside)
        self._record: list[Any] = []
        self._mark: tuple[int, int, int] | None = None
        self._seen = 0

    def write(self, data: Any) -> None:
        """Called by the pickler, every 64 KiB and for each long text."""
        self._room.take(len(data))
        self.pickles.append(bytes(data))

    def add(self, value: Any) -> None:
        """Pickle one value; then call `keep`, or `undo` when it has failed."""
        # The list is the first thing that the pickler remembers of this value.
        self._record = [value]
        self._mark = (len(self.pickles), len(self.buffers), self._room.left)
        self._seen = len(self._pickler.modules)
        self._pickler.arrays.copied = False
        self._pickler.dump(self._record)

    def keep(self, name: str) -> None:
        """The last value is complete."""
        self.names.append(name)
        if fresh := list(self._pickler.modules)[self._seen :]:
            self._modules[name] = fresh
        if self._pickler.arrays.copied:
            self.copies.append(name)
        self._mark = None

    def undo(self) -> None:
        """Forget what was written and remembered since the last `keep`."""
        if self._mark is None:
            return
        pickles, buffers, self._room.left = self._mark
        self._mark = None
        del self.pickles[pickles:]
        del self.buffers[buffers:]
        for module in list(self._pickler.modules)[self._seen :]:
            del self._pickler.modules[module]
        memo = self._pickler.memo.copy()
        first = memo.get(id(self._record))
        if first is not None:
            known = {key: entry for key, entry in memo.items() if entry[0] < first[0]}
            self._pickler.memo = known

    def _put_aside(self, buffer: Any) -> bool:
        """Keep a buffer outside of the pickle; True for those that stay inside."""
        try:
            view = buffer.raw()
        except BufferError:
            return True
        if view.nbytes < BUFFER_BYTES:
            return True
        self._room.take(view.nbytes)
        self.buffers.append(view)
        return False

    def close(self) -> None:
        """Let go of the values at once: pickler and segment refer to each other."""
        self._pickler.clear_memo()
        del self._pickler, self._record
        self.pickles.clear()
        self.buffers.clear()

    def description(self) -> dict[str, Any]:
        """The part of the header for this segment."""
        return {
            "names": self.names,
            "modules": self._modules,
            "size": sum(map(len, self.pickles)),
            "buffers": [view.nbytes for view in self.buffers],
        }


class Dump:
    """The finished bytes, read in order and in parts."""

    def __init__(self, header: dict[str, Any], segments: list[Segment]) -> None:
        """Nothing is copied."""
        text = json.dumps(header).encode()
        pieces: list[bytes | memoryview] = [LENGTH.pack(len(text)), text]
        for segment in segments:
            pieces += [*segment.pickles, *segment.buffers]
        self.size = sum(memoryview(piece).nbytes for piece in pieces)
        self._pieces = deque(memoryview(piece) for piece in pieces)

    def read(self, size: int) -> bytes:
        """The next bytes, fewer than `size` at the end only."""
        found = []
        while size > 0 and self._pieces:
            piece = self._pieces.popleft()
            found.append(piece[:size])
            if len(piece) > size:
                self._pieces.appendleft(piece[size:])
            size -= len(found[-1])
        return b"".join(found)


class Arrival:
    """A dump on its way in; every byte goes to its final place at once."""

    def __init__(self) -> None:
        """Nothing is here yet."""
        self.header: dict[str, Any] = {}
        self.segments: list[tuple[bytearray, list[bytearray]]] = []
        self.complete = False
        self._targets = self._places()
        self._target = memoryview(next(self._targets))

    def write(self, data: memoryview) -> None:
        """Take the next part. Raises ValueError for more than the dump has."""
        while len(data) and not self.complete:
            count = min(len(self._target), len(data))
            self._target[:count] = data[:count]
            self._target, data = self._target[count:], data[count:]
            while not len(self._target) and not self.complete:
                place = next(self._targets, None)
                self.complete = place is None
                self._target = memoryview(place or b"")
        if len(data):
            raise ValueError("the dump is longer than its header says")

    def _places(self) -> Iterator[bytearray]:
        """What is to be filled next; the one before has been filled then."""
        length = bytearray(LENGTH.size)
        yield length
        text = bytearray(LENGTH.unpack(length)[0])
        yield text
        self.header = json.loads(text)
        for segment in self.header["segments"]:
            pickles = bytearray(segment["size"])
            buffers = [bytearray(size) for size in segment["buffers"]]
            self.segments.append((pickles, buffers))
            yield pickles
            yield from buffers
