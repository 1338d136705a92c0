"""The log of one cell's output: complete in order, bounded in memory, readable from any point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kernel_mcp.bundles import Part, Shelf, bounded_metadata, extension, primary
from kernel_mcp.events import Clear, Display, Event, Failure, Stream
from kernel_mcp.items import (
    DisplayItem,
    FailureItem,
    Item,
    NoteItem,
    StreamName,
    TextItem,
    add_gap,
    add_text,
    bounded_failure,
    item_text,
    without_shown,
)
from kernel_mcp.settings import KIB, MIB
from kernel_mcp.terminal import Screen
from kernel_mcp.text import tail_of
from kernel_mcp.textstore import TextStore

PIECE_CHARS = 64 * KIB
SHOWN_CHARS = 64 * KIB
"""Text at each end of a range that `since` reads; more than any answer shows."""
MAX_SEGMENTS = 4096
"""Changes between stdout and stderr that are told apart in one cell."""
MAX_RESULTS = 8
"""Results and failures kept beyond the displays; an honest cell has one."""
MAX_UPDATED = 8
"""Earlier cells, and displays of each, that one `update_display` can reach."""
LINE_CHARS = 500
"""A progress line is at most this long."""


@dataclass(frozen=True, slots=True)
class LogCaps:
    """What the log of one cell may hold.

    text_chars       in memory before text goes to the file
    file_bytes       text in the file; beyond it only the end is kept
    bundle_bytes     one bundle in memory; larger ones become files
    displays_bytes   all bundles in memory
    spill_bytes      all bundle files
    displays         bundles; later ones are counted and dropped
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


@dataclass(slots=True)
class _Segment:
    """Stream text from one position of the text to another."""

    name: StreamName
    start: int
    end: int


@dataclass(slots=True)
class _Shown:
    """A display in its place; `tick` grows whenever it changes."""

    tick: int
    item: DisplayItem
    display_id: str | None


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception in its place."""

    tick: int
    item: FailureItem


class DisplayIndex:
    """Which cells of a session show which display id."""

    def __init__(self) -> None:
        self._logs: dict[str, list[OutputLog]] = {}

    def add(self, display_id: str, log: OutputLog) -> None:
        """Remember that `log` shows `display_id`."""
        logs = self._logs.setdefault(display_id, [])
        if log not in logs:
            logs.append(log)
            del logs[:-MAX_UPDATED]

    def forget(self, display_id: str, log: OutputLog) -> None:
        """Undo `add`."""
        logs = self._logs.get(display_id, [])
        if log in logs:
            logs.remove(log)
            if not logs:
                del self._logs[display_id]

    def others(self, display_id: str, log: OutputLog) -> list[OutputLog]:
        """The other logs that show `display_id`, oldest first."""
        return [other for other in self._logs.get(display_id, []) if other is not log]


def pieces(event: Event) -> Iterator[Event]:
    """An event in parts small enough to be added without holding up the event loop."""
    if isinstance(event, Stream) and len(event.text) > PIECE_CHARS:
        for start in range(0, len(event.text), PIECE_CHARS):
            yield Stream(event.name, event.text[start : start + PIECE_CHARS])
    else:
        yield event


class OutputLog:
    """Everything one cell put out.

    Files are named `<number>.txt` for text and `<number>-<k>.<ext>` for displays, in `folder`,
    which is made when the first is needed. `index` lets updates reach displays of earlier cells.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        index: DisplayIndex | None = None,
        caps: LogCaps | None = None,
    ) -> None:
        caps = caps or LogCaps()
        self.number = number
        self._index = index or DisplayIndex()
        self._max_displays = caps.displays
        self._text = TextStore(
            folder / f"{number}.txt", memory_chars=caps.text_chars, file_bytes=caps.file_bytes
        )
        self._shelf = Shelf(
            folder,
            number,
            bundle_bytes=caps.bundle_bytes,
            memory_bytes=caps.displays_bytes,
            disk_bytes=caps.spill_bytes,
        )
        self._screens: dict[StreamName, Screen] = {"stdout": Screen(), "stderr": Screen()}
        self._current: StreamName = "stdout"
        self._entries: list[_Segment | _Shown | _Failed] = []
        self._displays = self._failures = 0
        self._numbers = 0
        self._dropped = 0
        self._tick = 0
        self._generation = 0
        self._clear_pending = False
        self._closed = False

    @property
    def characters(self) -> int:
        """Characters of stream text so far."""
        return self._text.total + sum(len(screen.live) for screen in self._screens.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes in this log's files."""
        return self._text.disk_bytes + self._shelf.on_disk

    def add(self, event: Event) -> tuple[int, ...]:
        """Add what the cell put out; returns the numbers of earlier cells it changed."""
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
            self._write(event)
        elif isinstance(event, Display):
            self._show(event)
        else:
            self._fail(event)
        return ()

    def position(self) -> Position:
        """The present end of the log."""
        shown = (self._screens["stdout"].live, self._screens["stderr"].live)
        return Position(self._generation, self._text.total, self._tick, shown)

    def since(self, position: Position | None = None, limit: int = SHOWN_CHARS) -> list[Item]:
        """What came after `position`, and what changed, in order.

        Text beyond `limit` characters at either end of the new part becomes a gap.
        """
        mark = position or Position()
        if mark.generation != self._generation:
            mark = Position(self._generation)
        skip = (mark.characters + limit, self._text.total - limit)
        items: list[Item] = []
        for entry in self._entries:
            if isinstance(entry, _Segment):
                if entry.end > mark.characters:
                    start = max(entry.start, mark.characters)
                    self._read(items, entry.name, start, entry.end, skip)
            elif entry.tick > mark.tick:
                items.append(entry.item)
        for name in self._live_order():
            add_text(items, name, self._screens[name].live)
        items = without_shown(items, {"stdout": mark.shown[0], "stderr": mark.shown[1]})
        if self._dropped and self._tick > mark.tick:
            items.append(
                NoteItem(
                    f"[… {self._dropped:,} more displays were dropped: one cell keeps "
                    f"{self._max_displays} …]"
                )
            )
        return items

    def progress_line(self) -> str:
        """The newest line that is not blank."""
        live = self._screens[self._current].live
        return tail_of(live.rstrip().rpartition("\n")[2].strip(), LINE_CHARS)

    def news(self, position: Position, limit: int) -> str:
        """The end of the stream text that came after `position`, at most `limit` characters."""
        items = self.since(position, limit)
        return tail_of("".join(i.text for i in items if isinstance(i, TextItem)), limit)

    def text(self) -> Iterator[str]:
        """The whole output as text, in pieces: streams, readable forms and full tracebacks."""
        at_line_start = True
        for item in self._all_items():
            text = item_text(item)
            if not at_line_start and not isinstance(item, TextItem):
                yield "\n"
            yield text
            at_line_start = text.endswith("\n")

    def output(self, key: str) -> Part | None:
        """The display `k`'s richest representation, or with `k.ext` the one of that kind."""
        number, _, ending = key.partition(".")
        for entry in self._entries:
            if isinstance(entry, _Shown) and str(entry.item.number) == number:
                parts = entry.item.parts
                if not ending:
                    return primary(parts)
                return next((part for part in parts if extension(part.mime) == ending), None)
        return None

    def close(self) -> None:
        """Make the output final and move all that is not small to files; it stays readable."""
        self._settle(force=True)
        self._text.close()
        self._closed = True
        for entry in self._entries:
            if isinstance(entry, _Shown):
                parts = self._shelf.settle(entry.item.number, entry.item.parts)
                entry.item = replace(entry.item, parts=parts)

    def discard(self) -> None:
        """Forget everything and remove the files."""
        self._clear()

    def _write(self, event: Stream) -> None:
        if event.name != self._current:
            self._commit(self._current, self._screens[self._current].settle())
            self._current = event.name
        self._commit(event.name, self._screens[event.name].feed(event.text))
        if self._closed:
            self._settle(force=True)

    def _show(self, event: Display) -> None:
        allowed = self._max_displays + (MAX_RESULTS if event.result else 0)
        self._tick += 1
        if self._displays >= allowed:
            self._dropped += 1
            return
        self._settle(force=False)
        self._place(event, self.number)
        if event.display_id is not None:
            self._index.add(event.display_id, self)

    def _place(self, event: Display, cell: int) -> None:
        self._displays += 1
        self._numbers += 1
        item = DisplayItem(
            cell=cell,
            number=self._numbers,
            parts=self._shelf.put(self._numbers, event.data),
            metadata=bounded_metadata(event.metadata),
            result=event.result,
        )
        self._entries.append(_Shown(self._tick, item, event.display_id))

    def _update(self, event: Display) -> tuple[int, ...]:
        """Replace every display with the id of `event`; tell of those in earlier cells here."""
        if event.display_id is None:
            return ()
        changed = [
            log.number for log in self._index.others(event.display_id, self) if log._replace(event)
        ]
        if not self._replace(event) and changed and self._displays < self._max_displays:
            self._tick += 1
            self._settle(force=False)
            self._place(event, changed[-1])
        return tuple(changed)

    def _replace(self, event: Display) -> bool:
        """Show the content of `event` in all displays of its id; False when there is none."""
        entries = [
            entry
            for entry in self._entries
            if isinstance(entry, _Shown) and entry.display_id == event.display_id
        ]
        self._tick += 1 if entries else 0
        for entry in entries[-MAX_UPDATED:]:
            number = entry.item.number
            self._shelf.drop(entry.item.parts)
            parts = self._shelf.put(number, event.data)
            if self._closed:
                parts = self._shelf.settle(number, parts)
            metadata = bounded_metadata(event.metadata)
            entry.tick = self._tick
            entry.item = replace(entry.item, parts=parts, metadata=metadata)
        return bool(entries)

    def _fail(self, failure: Failure) -> None:
        self._settle(force=True)
        self._tick += 1
        self._failures += 1
        if self._failures <= MAX_RESULTS:
            self._entries.append(_Failed(self._tick, FailureItem(bounded_failure(failure))))

    def _clear(self) -> None:
        self._generation += 1
        self._text.discard()
        self._screens = {"stdout": Screen(), "stderr": Screen()}
        for entry in self._entries:
            if isinstance(entry, _Shown):
                self._shelf.drop(entry.item.parts)
                if entry.display_id is not None:
                    self._index.forget(entry.display_id, self)
        self._entries.clear()
        self._displays = self._failures = self._dropped = 0

    def _settle(self, *, force: bool) -> None:
        """Make the live rows final, with `force` even those of a progress bar."""
        for name in self._live_order():
            screen = self._screens[name]
            self._commit(name, screen.flush() if force else screen.settle())

    def _live_order(self) -> list[StreamName]:
        """The streams in the order their live rows are shown: progress bars come last."""
        names: list[StreamName] = ["stdout", "stderr"]
        return sorted(names, key=lambda name: self._screens[name].redrawing)

    def _commit(self, name: StreamName, text: str) -> None:
        if not text:
            return
        start = self._text.total
        self._text.append(text)
        last = self._entries[-1] if self._entries else None
        if isinstance(last, _Segment) and (last.name == name or len(self._entries) >= MAX_SEGMENTS):
            last.end = self._text.total
        else:
            self._entries.append(_Segment(name, start, self._text.total))

    def _read(
        self, items: list[Item], name: StreamName, start: int, end: int, skip: tuple[int, int]
    ) -> None:
        """Add the text between two positions, with a gap for what lies within `skip`."""
        first, last = skip if skip[0] < skip[1] else (end, end)
        self._read_kept(items, name, start, min(end, first))
        add_gap(items, min(end, last) - max(start, first))
        self._read_kept(items, name, max(start, last), end)

    def _read_kept(self, items: list[Item], name: StreamName, start: int, end: int) -> None:
        position = start
        for at, text in self._text.read(start, end):
            add_gap(items, at - position)
            add_text(items, name, text)
            position = at + len(text)
        add_gap(items, end - position)

    def _all_items(self) -> Iterator[Item]:
        """Every item with all its text, long text in several."""
        for entry in list(self._entries):
            if not isinstance(entry, _Segment):
                yield entry.item
                continue
            for start in range(entry.start, entry.end, SHOWN_CHARS):
                items: list[Item] = []
                end = min(entry.end, start + SHOWN_CHARS)
                self._read_kept(items, entry.name, start, end)
                yield from items
        for name in self._live_order():
            if live := self._screens[name].live:
                yield TextItem(name, live)
