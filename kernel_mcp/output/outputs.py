"""The log of one cell's output: complete in order, bounded in memory, readable from any point."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kernel_mcp.output.bundles import BundleStore, Representation, extension, primary
from kernel_mcp.output.displays import DisplayIndex, Displays, entry_from, row_of
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.items import (
    Clear,
    Display,
    Event,
    Failure,
    FailureItem,
    Item,
    NoteItem,
    Stream,
    StreamName,
    TextItem,
    add_text,
    bounded_failure,
    item_text,
    without_prefix,
)
from kernel_mcp.output.text import Truncation, tail_of
from kernel_mcp.output.textstore import FailureEntry, Streams, TextStore, Transcript
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB

SHOWN_CHARS = 64 * KIB
"""Characters that `since` reads at each end of a range; more than any answer shows."""
MAX_FAILURES = 4
"""Failures that are kept; an ordinary cell has one."""
EVICTED = "[… this output was removed to make room for later cells …]"


@dataclass(frozen=True, slots=True)
class LogCaps:
    """Limits of one cell's log.

    text_chars       characters of text in memory; beyond them text goes to the file
    file_bytes       size of that file; beyond it only the end is kept
    bundle_bytes     size of one bundle in memory; larger ones become files
    displays_bytes   size of all bundles in memory
    spill_bytes      size of all bundle files
    displays         number of bundles; later ones are counted and dropped
    """

    text_chars: int = 256 * KIB
    file_bytes: int = 64 * MIB
    bundle_bytes: int = 1 * MIB
    displays_bytes: int = 8 * MIB
    spill_bytes: int = 256 * MIB
    displays: int = 200


@dataclass(frozen=True, slots=True)
class Position:
    """A point in a log. The default is its start."""

    generation: int = 0
    characters: int = 0
    tick: int = 0
    shown: tuple[str, str] = ("", "")


class OutputLog:
    """The output of one cell, in order.

    Files are named `<number>.txt` for text and `<number>-<k>.<ext>` for displays, in `folder`,
    which is made when the first is needed. `index` lets updates reach displays of earlier cells.
    Other threads may read while one adds.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        index: DisplayIndex[OutputLog] | None = None,
        caps: LogCaps | None = None,
    ) -> None:
        caps = caps or LogCaps()
        self.number = number
        self._lock = threading.RLock()
        self._index = index or DisplayIndex()
        store = TextStore(
            folder / f"{number}.txt", memory_chars=caps.text_chars, file_bytes=caps.file_bytes
        )
        self._transcript = Transcript(store)
        self._streams = Streams(self._transcript)
        bundles = BundleStore(
            folder,
            number,
            bundle_bytes=caps.bundle_bytes,
            memory_bytes=caps.displays_bytes,
            disk_bytes=caps.spill_bytes,
        )
        self._displays = Displays(self._transcript, bundles, caps.displays)
        self._failures = 0
        self._tick = 0
        self._generation = 0
        self._clear_pending = False
        self._closed = False
        self._lost = ""

    @property
    def characters(self) -> int:
        """Characters of stream text so far."""
        return self._transcript.text.total + sum(map(len, self._streams.live_rows))

    @property
    def closed(self) -> bool:
        """True if the cell has ended."""
        return self._closed

    @property
    def disk_bytes(self) -> int:
        """Bytes in this log's files."""
        return self._transcript.text.disk_bytes + self._displays.disk_bytes

    def add(self, event: Event) -> tuple[int, ...]:
        """Add an output event; return the numbers of earlier cells whose displays it changed."""
        with self._lock:
            return or_fallback(partial(self._add, event), self._add_reason)

    def _add_reason(self, why: str) -> tuple[int, ...]:
        self._transcript.write("stderr", f"\n{why}\n")
        return ()

    def position(self) -> Position:
        """Return the present end of the log."""
        with self._lock:
            total, shown = self._transcript.text.total, self._streams.live_rows
            return Position(self._generation, total, self._tick, shown)

    def since(self, position: Position | None = None, limit: int = SHOWN_CHARS) -> list[Item]:
        """Return the output after `position` and the displays changed since then, in order.

        None means the start. Only the first and last `limit` characters of the new text are read;
        a gap stands for the rest.
        """
        with self._lock:
            mark = position or Position()
            if mark.generation != self._generation:
                mark = Position(self._generation)
            items = self._transcript.items(mark.characters, mark.tick, limit)
            for name in self._streams.order():
                add_text(items, name, self._streams.live(name))
            dropped = self._displays.dropped if self._tick > mark.tick else 0
            if self._lost:
                items.append(NoteItem(self._lost))
        items = without_prefix(items, {"stdout": mark.shown[0], "stderr": mark.shown[1]})
        if dropped:
            kept = self._displays.most
            items.append(NoteItem(f"[… {dropped:,} more displays dropped: a cell keeps {kept} …]"))
        return items

    def news(self, position: Position, limit: int) -> str:
        """Return the end of the stream text after `position`, at most `limit` characters."""
        items = self.since(position, limit)
        return tail_of("".join(i.text for i in items if isinstance(i, TextItem)), limit)

    def stream(self, name: StreamName, limit: int) -> Truncation:
        """Return the text of one stream so far, at most `limit` characters from both ends."""
        with self._lock:
            found, live = self._transcript.stream(name, limit), self._streams.live(name)
        return Truncation(found.head, f"{found.tail}{live}", found.omitted)

    @property
    def failures(self) -> list[Failure]:
        """The exceptions that ended it."""
        with self._lock:
            entries = self._transcript.entries
            return [entry.item.failure for entry in entries if isinstance(entry, FailureEntry)]

    def text(self) -> Iterator[str]:
        """Yield the whole output as text in pieces: streams, readable forms, full tracebacks."""
        at_line_start = True
        whole = self._transcript.whole()
        while True:
            with self._lock:
                item = next(whole, None)
            if item is None:
                break
            text = item_text(item)
            if not at_line_start and not isinstance(item, TextItem):
                yield "\n"
            yield text
            at_line_start = text.endswith("\n")
        for name in self._streams.order():
            yield self._streams.live(name)
        if self._lost:
            yield f"{self._lost}\n"

    def output(self, key: str) -> Representation | None:
        """Return a representation of a display: the richest for the key `k`, one type for `k.ext`.

        None if there is no such display or type.
        """
        number, _, ending = key.partition(".")
        with self._lock:
            shown = self._transcript.displays
        parts = next((s.item.parts for s in shown if str(s.item.number) == number), ())
        if ending:
            return next((part for part in parts if extension(part.mime) == ending), None)
        return primary(parts)

    def close(self) -> None:
        """Make the output final and move large parts to files; it stays readable."""
        with self._lock:
            self._streams.settle(force=True)
            self._transcript.text.close()
            self._closed = True
            self._displays.move_to_files()

    def evict(self, why: str = EVICTED) -> None:
        """Drop all output and its files; later readers see `why` in its place."""
        with self._lock:
            self._clear()
            self._lost = why

    def row(self) -> dict[str, Any]:
        """Return a closed log as a JSON value, which `restored` reads."""
        with self._lock:
            self._streams.settle(force=True)
            return {
                "text": self._transcript.text.row(),
                "entries": [row_of(entry) for entry in self._transcript.entries],
                "displays": self._displays.row(),
                "log": [self._tick, self._generation, self._failures, self._lost],
            }

    @classmethod
    def restored(cls, folder: Path, number: int, row: dict[str, Any]) -> OutputLog:
        """Return the closed log that `row` described, with the same files; for reading only."""
        log = cls(folder, number)
        log._transcript.text.restore(row["text"])
        log._transcript.entries = [entry_from(entry, folder) for entry in row["entries"]]
        log._displays.restore(row["displays"])
        log._tick, log._generation, log._failures, log._lost = row["log"]
        log._closed = True
        return log

    def _add(self, event: Event) -> tuple[int, ...]:
        if isinstance(event, Clear):
            self._clear_pending = event.wait
            if not event.wait:
                self._clear()
            return ()
        if isinstance(event, Display) and event.update:
            return self._update(event)
        if self._clear_pending:
            self._clear_pending = False
            self._clear()
        if isinstance(event, Stream):
            self._streams.write(event)
        elif isinstance(event, Display):
            self._show(event)
        else:
            self._fail(event)
        return ()

    def _show(self, event: Display) -> None:
        self._tick += 1
        if not self._displays.admit(event):
            return
        self._place(event, self.number)
        if event.display_id is not None:
            self._index.add(event.display_id, self)

    def _place(self, event: Display, cell: int) -> None:
        self._streams.settle(force=False)
        self._displays.place(event, cell=cell, tick=self._tick)

    def _update(self, event: Display) -> tuple[int, ...]:
        """Replace every display with the id of `event`; show those of earlier cells here too."""
        if event.display_id is None:
            return ()
        others = self._index.others(event.display_id, self)
        changed = [log.number for log in others if log._replace(event)]
        if not self._replace(event) and changed and not self._displays.full:
            self._tick += 1
            self._place(event, changed[-1])
        return tuple(changed)

    def _replace(self, event: Display) -> bool:
        """Show the content of `event` in the displays of its id; False when there is none."""
        with self._lock:
            found = self._displays.find(event.display_id)
            self._tick += 1 if found else 0
            self._displays.replace(found, event, self._tick)
            return bool(found)

    def _fail(self, failure: Failure) -> None:
        self._streams.settle(force=True)
        self._tick += 1
        self._failures += 1
        if self._failures <= MAX_FAILURES:
            self._transcript.place(FailureEntry(self._tick, FailureItem(bounded_failure(failure))))

    def _clear(self) -> None:
        self._generation += 1
        self._streams.clear()
        for display_id in self._displays.clear():
            self._index.forget(display_id, self)
        self._transcript.clear()
        self._failures = 0
