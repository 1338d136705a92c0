"""The order of a cell's output: stream text by position, displays and failures between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernel_mcp.config.settings import KIB
from kernel_mcp.output.items import (
    DisplayItem,
    FailureItem,
    Item,
    StreamName,
    add_gap,
    add_text,
)
from kernel_mcp.output.textstore import TextStore

MAX_SEGMENTS = 4096
"""Changes between stdout and stderr that are told apart in one cell."""
PIECE_CHARS = 64 * KIB
"""Text that is handled at a time."""


@dataclass(slots=True)
class Segment:
    """Stream text from one position of the text to another."""

    name: StreamName
    start: int
    end: int


@dataclass(slots=True)
class Shown:
    """A display in its place; `tick` grows whenever it changes."""

    tick: int
    item: DisplayItem
    display_id: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception in its place."""

    tick: int
    item: FailureItem


class Transcript:
    """What has become final of a cell's output, in order: its `entries`."""

    def __init__(self, text: TextStore) -> None:
        self.text = text
        self.entries: list[Segment | Shown | Failed] = []

    @property
    def displays(self) -> list[Shown]:
        """The displays in order."""
        return [entry for entry in self.entries if isinstance(entry, Shown)]

    def write(self, name: StreamName, text: str) -> None:
        """Add stream text."""
        if not text:
            return
        start = self.text.total
        self.text.append(text)
        last = self.entries[-1] if self.entries else None
        joins = isinstance(last, Segment) and (
            last.name == name or len(self.entries) >= MAX_SEGMENTS
        )
        if isinstance(last, Segment) and joins:
            last.end = self.text.total
        else:
            self.entries.append(Segment(name, start, self.text.total))

    def place(self, entry: Shown | Failed) -> None:
        """Add a display or failure."""
        self.entries.append(entry)

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.text.discard()

    def items(self, characters: int, tick: int, limit: int) -> list[Item]:
        """Text after a position and what changed after a tick, in order.

        Text beyond `limit` characters at either end of the range becomes a gap.
        """
        first, last = characters + limit, self.text.total - limit
        if first >= last:
            first = last = self.text.total
        items: list[Item] = []
        for entry in self.entries:
            if not isinstance(entry, Segment):
                if entry.tick > tick:
                    items.append(entry.item)
            elif entry.end > characters:
                start, end = max(entry.start, characters), entry.end
                self._read(items, entry.name, start, min(end, first))
                add_gap(items, min(end, last) - max(start, first))
                self._read(items, entry.name, max(start, last), end)
        return items

    def whole(self) -> Iterator[Item]:
        """Every item with all its text, long text in several."""
        for entry in list(self.entries):
            if not isinstance(entry, Segment):
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
