"""The displays of one cell: their number, their bundles and their updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from kernel_mcp.output.bundles import BundleStore, Representation, bounded_metadata
from kernel_mcp.output.items import Display, DisplayItem, Failure, FailureItem
from kernel_mcp.output.textstore import DisplayEntry, FailureEntry, TextSegment, Transcript


def row_of(entry: TextSegment | DisplayEntry | FailureEntry) -> list[Any]:
    """Return an entry of a finished cell as a JSON value; values in files stay there."""
    if isinstance(entry, TextSegment):
        return ["text", entry.name, entry.start, entry.end]
    if isinstance(entry, FailureEntry):
        failure = entry.item.failure
        return ["failure", entry.tick, failure.name, failure.value, failure.traceback]
    item = entry.item
    parts = [_part_row(part) for part in item.parts]
    shown = [item.cell, item.number, parts, item.metadata, item.result]
    return ["display", entry.tick, entry.display_id, shown]


def entry_from(row: list[Any], folder: Path) -> TextSegment | DisplayEntry | FailureEntry:
    """Return the entry that `row_of` turned into this value; its files are in `folder`."""
    kind, *rest = row
    if kind == "text":
        return TextSegment(*rest)
    if kind == "failure":
        tick, name, value, traceback = rest
        return FailureEntry(tick, FailureItem(Failure(name, value, tuple(traceback))))
    tick, display_id, (cell, number, parts, metadata, result) = rest
    kept = tuple(_part(part, folder) for part in parts)
    return DisplayEntry(tick, DisplayItem(cell, number, kept, metadata, result), display_id)


def _part_row(part: Representation) -> list[Any]:
    file = None if part.path is None else part.path.name
    return [part.mime, part.size, part.text, file, part.structured, part.problem]


def _part(row: list[Any], folder: Path) -> Representation:
    mime, size, text, file, structured, problem = row
    return Representation(mime, size, text, file and folder / file, structured, problem)


MAX_LOGS = 8
"""Earlier cells that one `update_display` can reach."""
MAX_HELD = 32
"""Cells with display ids that can be updated at all: they stay in memory."""

LogT = TypeVar("LogT")


class DisplayIndex(Generic[LogT]):
    """Index from display ids to the logs of the newest cells that show them."""

    def __init__(self) -> None:
        self._logs: dict[str, list[LogT]] = {}
        self._ids: dict[LogT, set[str]] = {}

    def add(self, display_id: str, log: LogT) -> None:
        """Record that `log` shows `display_id`; beyond the limits the oldest logs are dropped."""
        logs = self._logs.setdefault(display_id, [])
        if log not in logs:
            logs.append(log)
            self._ids.setdefault(log, set()).add(display_id)
            for earlier in logs[:-MAX_LOGS]:
                self.forget(display_id, earlier)
        while len(self._ids) > MAX_HELD:
            oldest = next(iter(self._ids))
            for held in list(self._ids[oldest]):
                self.forget(held, oldest)

    def forget(self, display_id: str, log: LogT) -> None:
        """Undo `add`."""
        logs = self._logs.get(display_id, [])
        if log in logs:
            logs.remove(log)
            self._ids[log].discard(display_id)
            if not logs:
                del self._logs[display_id]
            if not self._ids[log]:
                del self._ids[log]

    def others(self, display_id: str, log: LogT) -> list[LogT]:
        """Return the other logs that show `display_id`, oldest first."""
        return [other for other in self._logs.get(display_id, []) if other is not log]

    def holds(self, log: LogT) -> bool:
        """Return True if `log` shows an id that an update may still name."""
        return log in self._ids

    def clear(self) -> None:
        """Forget all ids: they end with the kernel that made them."""
        self._logs.clear()
        self._ids.clear()


MAX_RESULTS = 4
"""Results kept beyond the displays; an ordinary cell has one."""
MAX_UPDATED = 8
"""Displays of one cell that one `update_display` can reach."""


class Displays:
    """Displays in their places in `transcript`, with their parts in `bundles`.

    At most `most` are kept; `dropped` counts the others. A tick is the log's time of a change.
    """

    def __init__(self, transcript: Transcript, bundles: BundleStore, most: int) -> None:
        self.most = most
        self.dropped = 0
        self._transcript = transcript
        self._bundles = bundles
        self._count = 0
        self._numbers = 0
        self._settled = False

    @property
    def full(self) -> bool:
        """True if no further display is accepted, except a result."""
        return self._count >= self.most

    @property
    def disk_bytes(self) -> int:
        """Bytes in files."""
        return self._bundles.on_disk

    def admit(self, event: Display) -> bool:
        """Return True if there is room for `event`; otherwise count it as dropped."""
        if self._count < self.most + (MAX_RESULTS if event.result else 0):
            return True
        self.dropped += 1
        return False

    def place(self, event: Display, *, cell: int, tick: int) -> None:
        """Show `event` after everything else, as a display of `cell`."""
        self._count += 1
        self._numbers += 1
        item = DisplayItem(
            cell=cell,
            number=self._numbers,
            parts=self._stored(self._numbers, event),
            metadata=bounded_metadata(event.metadata),
            result=event.result,
        )
        self._transcript.place(DisplayEntry(tick, item, event.display_id))

    def find(self, display_id: str | None) -> list[DisplayEntry]:
        """Return the displays with this id, in order."""
        return [shown for shown in self._transcript.displays if shown.display_id == display_id]

    def replace(self, found: list[DisplayEntry], event: Display, tick: int) -> None:
        """Show the content of `event` in the last of these displays."""
        for shown in found[-MAX_UPDATED:]:
            self._bundles.drop(shown.item.parts)
            shown.tick = tick
            shown.item = replace(
                shown.item,
                parts=self._stored(shown.item.number, event),
                metadata=bounded_metadata(event.metadata),
            )

    def move_to_files(self) -> None:
        """Move all large values to files; those of later displays go there immediately."""
        self._settled = True
        for shown in self._transcript.displays:
            parts = self._bundles.move_to_files(shown.item.number, shown.item.parts)
            shown.item = replace(shown.item, parts=parts)

    def clear(self) -> list[str]:
        """Release all displays and return the ids they had. Their numbers are not used again."""
        displays = self._transcript.displays
        for shown in displays:
            self._bundles.drop(shown.item.parts)
        self._count = self.dropped = 0
        return [shown.display_id for shown in displays if shown.display_id is not None]

    def row(self) -> dict[str, int]:
        """Return the counters as a JSON value; the displays themselves are in the transcript."""
        store = self._bundles
        return {
            "dropped": self.dropped,
            "count": self._count,
            "numbers": self._numbers,
            "in_memory": store.in_memory,
            "on_disk": store.on_disk,
        }

    def restore(self, row: dict[str, int]) -> None:
        """Restore the counters from a value that `row` returned."""
        self._settled = True
        self.dropped, self._count, self._numbers = row["dropped"], row["count"], row["numbers"]
        self._bundles.in_memory, self._bundles.on_disk = row["in_memory"], row["on_disk"]

    def _stored(self, number: int, event: Display) -> tuple[Representation, ...]:
        parts = self._bundles.put(number, event.data)
        return self._bundles.move_to_files(number, parts) if self._settled else parts
