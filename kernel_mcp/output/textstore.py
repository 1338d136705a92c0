"""The text of one cell: a bounded part in memory, the rest in a file, all of it by position.

Positions count characters from the start of the text. Beyond the size limit of the file only the
end of the text is kept; of the part between only the length is known.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernel_mcp.output.items import (
    DisplayItem,
    FailureItem,
    Item,
    Stream,
    StreamName,
    add_gap,
    add_text,
    item_text,
)
from kernel_mcp.output.terminal import Screen
from kernel_mcp.output.text import Truncation, stripped
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB

BLOCK_CHARS = 64 * 1024
"""Characters of one write to the file, and of one entry of its index."""
SMALL_CHARS = 8 * 1024
"""A text up to this long stays in memory for good."""


@dataclass(frozen=True, slots=True)
class _TextBlock:
    """The characters from `start` to `end`: `size` bytes at `offset` of the file, or `text`."""

    start: int
    end: int
    offset: int = 0
    size: int = 0
    text: str = ""


class TextStore:
    """Append-only text with reads by position.

    Up to `memory_chars` stay in memory; then all goes to the file at `path` (UTF-8), up to
    `file_bytes`. A file that cannot be written costs the middle of the text, never an error.
    """

    def __init__(self, path: Path, *, memory_chars: int, file_bytes: int) -> None:
        self.path = path
        self._memory_chars = max(memory_chars, 2 * BLOCK_CHARS)
        self._file_bytes = file_bytes
        self._fd = -1
        self._reset()

    def _reset(self) -> None:
        self.total = 0
        self.disk_bytes = 0
        self._saved = 0
        self._stopped = False
        self._blocks: list[_TextBlock] = []
        self._recent: deque[str] = deque()
        self._recent_chars = 0

    def append(self, text: str) -> None:
        for start in range(0, len(text), BLOCK_CHARS):
            self._append(text[start : start + BLOCK_CHARS])

    def _append(self, text: str) -> None:
        self.total += len(text)
        self._recent_chars += len(text)
        if self._recent and len(self._recent[-1]) + len(text) <= 4096:
            self._recent[-1] += text
        else:
            self._recent.append(text)
        if self.total <= self._memory_chars:
            return
        while not self._stopped and self.total - self._saved >= BLOCK_CHARS:
            self._save(self._saved, self._saved + BLOCK_CHARS)
            self._stopped = self._stopped or self.disk_bytes >= self._file_bytes
        while self._recent_chars - len(self._recent[0]) >= self._memory_chars:
            self._recent_chars -= len(self._recent.popleft())

    def read(self, start: int, end: int) -> Iterator[tuple[int, str]]:
        """Yield the available pieces between two positions, each with its position, in order."""
        recent_start = self.total - self._recent_chars
        for block in self._blocks[max(0, bisect_right(self._blocks, start, key=_start) - 1) :]:
            first, last = max(start, block.start), min(end, block.end, recent_start)
            if block.start >= end or block.start >= recent_start:
                break
            if first < last and (text := self._load(block)):
                yield first, text[first - block.start : last - block.start]
        first = max(start, recent_start)
        if first < end and (text := self._newest(first, end)):
            yield first, text

    def close(self) -> None:
        """Make the text final: unless it is small, it is moved to the file altogether."""
        if self.total > SMALL_CHARS:
            begin = self.total - self._recent_chars if self._stopped else self._saved
            if begin < self.total:
                self._save(begin, self.total)
            if self._saved == self.total:
                self._recent.clear()
                self._recent_chars = 0
        self._close_file()

    def discard(self) -> None:
        """Forget the text and remove the file; what comes next begins at position 0."""
        self._close_file()
        if self.disk_bytes:
            self.path.unlink(missing_ok=True)
        self._reset()

    def row(self) -> dict[str, Any]:
        """Return a final text as a JSON value, without the part that is in the file."""
        return {
            "total": self.total,
            "disk_bytes": self.disk_bytes,
            "blocks": [[b.start, b.end, b.offset, b.size, b.text] for b in self._blocks],
            "recent": "".join(self._recent),
        }

    def restore(self, row: dict[str, Any]) -> None:
        """Restore the text from a value that `row` returned."""
        self.total, self.disk_bytes = row["total"], row["disk_bytes"]
        self._blocks = [_TextBlock(*block) for block in row["blocks"]]
        self._recent = deque(filter(None, [row["recent"]]))
        self._recent_chars = len(row["recent"])

    def _newest(self, start: int, end: int) -> str:
        """Return a part of the text in memory."""
        offset = self.total - self._recent_chars
        return "".join(self._recent)[start - offset : end - offset]

    def _save(self, start: int, end: int) -> None:
        """Write a part of the text in memory to the file."""
        text = self._newest(start, end)
        raw = text.encode("utf-8", "replace")
        try:
            if self._fd < 0:
                self._open_file()
            done = 0
            while done < len(raw):
                done += os.pwrite(self._fd, raw[done:], self.disk_bytes + done)
        except OSError:
            self._stopped = True
            if not self._blocks:
                self._blocks.append(_TextBlock(start, end, text=text))
            return
        self._blocks.append(_TextBlock(start, end, self.disk_bytes, len(raw)))
        self.disk_bytes += len(raw)
        self._saved = end

    def _load(self, block: _TextBlock) -> str:
        """Return the text of a block; empty if its file no longer exists."""
        if block.text:
            return block.text
        try:
            fd = self._fd if self._fd >= 0 else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.pread(fd, block.size, block.offset).decode("utf-8", "replace")
        finally:
            if fd != self._fd:
                os.close(fd)

    def _open_file(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if self.disk_bytes else os.O_TRUNC
        self._fd = os.open(self.path, flags, 0o600)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1  # also if close(2) fails, as on a full network file system
        if fd >= 0:
            os.close(fd)


def _start(block: _TextBlock) -> int:
    return block.start


MAX_SEGMENTS = 4096
"""Most entries; beyond it text of stdout and stderr is no longer distinguished."""
PIECE_CHARS = 64 * KIB
"""Text that is handled at a time."""


@dataclass(slots=True)
class TextSegment:
    """Stream text from one position of the text to another."""

    name: StreamName
    start: int
    end: int


@dataclass(slots=True)
class DisplayEntry:
    """A display in its place; `tick` grows whenever it changes."""

    tick: int
    item: DisplayItem
    display_id: str | None


@dataclass(frozen=True, slots=True)
class FailureEntry:
    """An exception in its place."""

    tick: int
    item: FailureItem


class Transcript:
    """The final part of a cell's output, in order: its `entries`."""

    def __init__(self, text: TextStore) -> None:
        self.text = text
        self.entries: list[TextSegment | DisplayEntry | FailureEntry] = []

    @property
    def displays(self) -> list[DisplayEntry]:
        return [entry for entry in self.entries if isinstance(entry, DisplayEntry)]

    def write(self, name: StreamName, text: str) -> None:
        if not text:
            return
        start = self.text.total
        self.text.append(text)
        last = self.entries[-1] if self.entries else None
        joins = isinstance(last, TextSegment) and (
            last.name == name or len(self.entries) >= MAX_SEGMENTS
        )
        if isinstance(last, TextSegment) and joins:
            last.end = self.text.total
        else:
            self.entries.append(TextSegment(name, start, self.text.total))

    def place(self, entry: DisplayEntry | FailureEntry) -> None:
        self.entries.append(entry)

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.text.discard()

    def items(self, characters: int, tick: int, limit: int) -> list[Item]:
        """Return the text after a position and the entries changed after a tick, in order.

        Only the first and last `limit` characters of the text are read; a gap stands for the rest.
        """
        first, last = characters + limit, self.text.total - limit
        if first >= last:
            first = last = self.text.total
        items: list[Item] = []
        for entry in self.entries:
            if not isinstance(entry, TextSegment):
                if entry.tick > tick:
                    items.append(entry.item)
            elif entry.end > characters:
                start, end = max(entry.start, characters), entry.end
                self._read(items, entry.name, start, min(end, first))
                add_gap(items, min(end, last) - max(start, first))
                self._read(items, entry.name, max(start, last), end)
        return items

    def stream(self, name: StreamName, limit: int) -> Truncation:
        """Return the text of one stream, at most `limit` characters of it from both ends."""
        spans = [
            (entry.start, entry.end)
            for entry in self.entries
            if isinstance(entry, TextSegment) and entry.name == name
        ]
        total = sum(end - start for start, end in spans)
        if total <= limit:
            return Truncation("".join(self._slice(spans, 0, total)), "", 0)
        half = limit // 2
        head = "".join(self._slice(spans, 0, half))
        return Truncation(head, "".join(self._slice(spans, total - half, total)), total - 2 * half)

    def _slice(self, spans: list[tuple[int, int]], first: int, last: int) -> Iterator[str]:
        """Yield the text of spans, from one of their characters to another."""
        at = 0
        for start, end in spans:
            low, high = max(first - at, 0), min(last - at, end - start)
            if low < high:
                items: list[Item] = []
                self._read(items, "stdout", start + low, start + high)
                yield from map(item_text, items)
            at += end - start

    def whole(self) -> Iterator[Item]:
        """Yield every item with all its text, long text as several items."""
        for entry in list(self.entries):
            if not isinstance(entry, TextSegment):
                yield entry.item
                continue
            for start in range(entry.start, entry.end, PIECE_CHARS):
                items: list[Item] = []
                self._read(items, entry.name, start, min(entry.end, start + PIECE_CHARS))
                yield from items

    def _read(self, items: list[Item], name: StreamName, start: int, end: int) -> None:
        position = start
        for at, text in self.text.read(start, end):
            add_gap(items, at - position)
            add_text(items, name, text)
            position = at + len(text)
        add_gap(items, end - position)


WORK_S = 0.05
"""Seconds that one event may take; the control codes in the rest of its text are dropped."""


class Streams:
    """The live rows of stdout and stderr; what becomes final goes to `transcript`."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._screens: dict[StreamName, Screen] = {"stdout": Screen(), "stderr": Screen()}
        self._current: StreamName = "stdout"

    @property
    def live_rows(self) -> tuple[str, str]:
        """The live rows of stdout and of stderr."""
        return self._screens["stdout"].live, self._screens["stderr"].live

    def live(self, name: StreamName) -> str:
        return self._screens[name].live

    def order(self) -> list[StreamName]:
        """Return the streams in the order in which live rows are shown: progress bars come last."""
        names: list[StreamName] = ["stdout", "stderr"]
        return sorted(names, key=lambda name: self._screens[name].redrawing)

    def write(self, event: Stream) -> None:
        if event.name != self._current:
            self._transcript.write(self._current, self._screens[self._current].settle())
            self._current = event.name
        screen, text = self._screens[event.name], event.text
        end = time.perf_counter() + WORK_S
        for start in range(0, len(text), PIECE_CHARS):
            if start and time.perf_counter() > end:
                self._transcript.write(event.name, screen.flush())
                self._transcript.write(event.name, stripped(text[start:]))
                break
            self._transcript.write(event.name, screen.feed(text[start : start + PIECE_CHARS]))

    def settle(self, *, force: bool) -> None:
        """Make the live rows final, with `force` even those of a progress bar."""
        for name in self.order():
            screen = self._screens[name]
            self._transcript.write(name, screen.flush() if force else screen.settle())

    def clear(self) -> None:
        """Forget the live rows."""
        self._screens = {"stdout": Screen(), "stderr": Screen()}
