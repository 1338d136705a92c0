"""The output journal: text output since the last save, in a mapped file.

It survives a killed server. A frame is a head and a text. The head has the number of a cell, the
length of the text and its CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.output.items import Display, Event, Failure, Stream
from kernel_mcp.sessions.cell_journal import mapped
from kernel_mcp.units import KIB

if TYPE_CHECKING:
    from kernel_mcp.sessions.cell import Cell

OUTPUT_BYTES = 256 * KIB
"""Size of the file. When it is full, the older half is dropped."""
MOST_TEXT_BYTES = OUTPUT_BYTES // 4
"""Maximum bytes of the text of one frame: the end of a longer text is kept."""
CUT = "[… earlier output was not kept …]\n"
_HEAD = struct.Struct("<III")


class OutputJournal:
    """The journal of one session, and a `Watcher` of its cells."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it; existing frames stay until `forget`. Raises OSError."""
        self._memory = mapped(path, OUTPUT_BYTES)
        self._end = sum(len(frame) for _, frame in _frames(self._memory[:]))

    def begun(self, cell: Cell) -> None:
        """See `Watcher`."""

    def shown(self, cell: Cell, event: Event) -> None:
        """See `Watcher`."""
        if isinstance(event, Stream):
            self.add(cell.number, event.text)
        elif isinstance(event, Failure):
            self.add(cell.number, f"{event.name}: {event.value}\n")
        elif isinstance(event, Display) and isinstance(text := event.data.get("text/plain"), str):
            self.add(cell.number, f"{text}\n")

    def ended(self, cell: Cell) -> None:
        """See `Watcher`."""

    def add(self, number: int, text: str) -> None:
        """Append output of a cell; nothing after `close`."""
        if self._memory.closed:
            return
        frame = _frame(number, text)
        if self._end + len(frame) > OUTPUT_BYTES:
            self._keep(self._newer_half())
        self._memory[self._end : self._end + len(frame)] = frame
        self._end += len(frame)

    def texts(self) -> dict[int, str]:
        """Return the text of each cell by its number."""
        found: dict[int, list[str]] = {}
        for number, frame in _frames(self._memory[: self._end]):
            found.setdefault(number, []).append(frame[_HEAD.size :].decode("utf-8", "replace"))
        return {number: "".join(parts) for number, parts in found.items()}

    def forget(self, last: int) -> None:
        """Remove the output of cells up to this number, which have been saved."""
        if self._end:
            frames = _frames(self._memory[: self._end])
            self._keep([frame for number, frame in frames if number > last])

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._memory.close()

    def _newer_half(self) -> list[bytes]:
        frames = list(_frames(self._memory[: self._end]))
        left = self._end
        while frames and left > OUTPUT_BYTES // 2:
            left -= len(frames.pop(0)[1])
        cut = [_frame(frames[0][0], CUT)] if frames else []
        return [*cut, *(frame for _, frame in frames)]

    def _keep(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        self._memory[: self._end] = data.ljust(self._end, b"\0")[: self._end]
        self._end = len(data)


def _frame(number: int, text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) > MOST_TEXT_BYTES:
        data = CUT.encode() + data[-MOST_TEXT_BYTES:].decode("utf-8", "ignore").encode()
    return _HEAD.pack(number, len(data), zlib.crc32(data)) + data


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each frame, up to the first that is not complete."""
    place = 0
    while place + _HEAD.size <= len(data):
        number, length, checksum = _HEAD.unpack_from(data, place)
        text = data[place + _HEAD.size : place + _HEAD.size + length]
        if not number or len(text) != length or zlib.crc32(text) != checksum:
            return
        yield number, data[place : place + _HEAD.size + length]
        place += _HEAD.size + length
