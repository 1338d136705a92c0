"""The pieces of a cell's output, in the order in which an answer shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from kernel_mcp.output.bundles import Representation, readable
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Masks, cut, omission
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB


# Output events of a running cell, as typed values in the order in which they happened.
#
# Events are built only from validated iopub messages (see `channels`), so every field has the type
# stated here whatever the kernel sent.
@dataclass(frozen=True, slots=True)
class Stream:
    """Text written to stdout or stderr."""

    name: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """A MIME bundle: display data, the update of an earlier one, or the cell's result.

    `data` maps MIME type to a string (base64 for binary types) or, for JSON types, a JSON value.
    """

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    update: bool = False
    result: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """`clear_output`: drop what is shown, now or (`wait`) when the next output arrives."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended the cell. `traceback` has one string a frame, with ANSI codes.

    `lacks` names what is missing according to the kernel, in the form of `console.lacks`.
    """

    name: str
    value: str
    traceback: tuple[str, ...]
    lacks: str = ""


Event: TypeAlias = Stream | Display | Clear | Failure


class Redactor:
    """Masks secret values in the events of one cell, also if split over several stream events.

    Text that may be the beginning of a value is held back until more arrives or `flush` is called.
    """

    def __init__(self, masks: Masks, sink: Callable[[Event], None]) -> None:
        self._masks = masks
        self._sink = sink
        self._kept: dict[StreamName, str] = {"stdout": "", "stderr": ""}

    def __call__(self, event: Event) -> None:
        """Mask an event and pass it on, or hold back the end of a stream's text."""
        masks = self._masks
        if isinstance(event, Stream):
            shown, self._kept[event.name] = masks.split_masked(self._kept[event.name] + event.text)
            if not shown:
                return
            event = Stream(event.name, shown)
        else:
            self.flush()
        self._sink(or_fallback(partial(_masked, masks, event), _in_place))

    def flush(self) -> None:
        """Pass on the text that is held back. Call this at the end of the cell."""
        for name, text in self._kept.items():
            self._kept[name] = ""
            if text:
                self._sink(Stream(name, self._masks.masked(text)))


def _masked(masks: Masks, event: Event) -> Event:
    if isinstance(event, Display):
        return replace(
            event,
            data={
                mime: data if _is_picture(mime) else masks.anywhere(data, keys=True)
                for mime, data in event.data.items()
            },
            metadata=masks.anywhere(event.metadata, keys=True),
        )
    if isinstance(event, Failure):
        name, value, *lines = masks.anywhere([event.name, event.value, *event.traceback])
        return Failure(name, value, tuple(lines), event.lacks)
    return event


def _in_place(why: str) -> Event:
    return Stream("stderr", f"{why}\n")


def _is_picture(mime: str) -> bool:
    return mime.startswith("image/") and mime != "image/svg+xml"


StreamName: TypeAlias = Literal["stdout", "stderr"]

MAX_FRAMES = 40
"""Frames of a traceback that are kept, half of them from its end."""
FRAME_CHARS = 4 * KIB
MESSAGE_CHARS = 16 * KIB
READABLE_CHARS = 16 * MIB
"""Characters of a display in the whole text of a cell: more than one message can carry."""


@dataclass(frozen=True, slots=True)
class TextItem:
    """Text of one stream."""

    name: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class GapItem:
    """Characters of stream text that were left out here."""

    characters: int


@dataclass(frozen=True, slots=True)
class DisplayItem:
    """A MIME bundle, number `number` of its log.

    `cell` is the cell that shows it: an earlier one when this is the update of its display.
    """

    cell: int
    number: int
    parts: tuple[Representation, ...]
    metadata: dict[str, Any]
    result: bool = False


@dataclass(frozen=True, slots=True)
class FailureItem:
    """The exception that ended the cell."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class NoteItem:
    """A remark about the output."""

    text: str


Item: TypeAlias = TextItem | GapItem | DisplayItem | FailureItem | NoteItem


def add_text(items: list[Item], name: StreamName, text: str) -> None:
    """Add stream text at the end, joined to what it continues."""
    if not text:
        return
    last = items[-1] if items else None
    if isinstance(last, TextItem) and last.name == name:
        items[-1] = TextItem(name, last.text + text)
    else:
        items.append(TextItem(name, text))


def add_gap(items: list[Item], characters: int) -> None:
    """Add a gap at the end for text that is left out, joined to a gap before it."""
    if characters <= 0:
        return
    last = items[-1] if items else None
    if isinstance(last, GapItem):
        items[-1] = GapItem(last.characters + characters)
    else:
        items.append(GapItem(characters))


def without_prefix(items: list[Item], shown: dict[StreamName, str]) -> list[Item]:
    """Return `items` without the text at the beginning that has been `shown` already.

    That text could still change then: lines that have changed since are kept.
    """
    rest: list[Item] = []
    left = {name: text for name, text in shown.items() if text}
    for item in items:
        if not left or not isinstance(item, TextItem):
            if isinstance(item, GapItem):
                left.clear()
            rest.append(item)
            continue
        before = left.pop(item.name, "")
        same = _common_length(before, item.text)
        if same == len(item.text) < len(before):
            left[item.name] = before[same:]
        elif same < len(before):
            same = item.text.rfind("\n", 0, same) + 1
        add_text(rest, item.name, item.text[same:])
    return rest


def _common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def bounded_failure(failure: Failure) -> Failure:
    """Return `failure` cut to a size that can be kept, whatever the kernel sent."""
    frames = failure.traceback
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        note = f"    [... {len(frames) - MAX_FRAMES:,} frames left out]"
        frames = (*frames[:half], note, *frames[-half:])
    bounded = [_bounded(frame, FRAME_CHARS) for frame in frames[:-1]]
    bounded += [_bounded(message, MESSAGE_CHARS) for message in frames[-1:]]
    return Failure(failure.name[:200], _bounded(failure.value, MESSAGE_CHARS), tuple(bounded))


def _bounded(text: str, limit: int) -> str:
    return cut(text, limit // 2, limit // 2).joined()


def item_text(item: Item) -> str:
    """Return an item in full as text; it ends with a line end unless it is stream text."""
    return or_fallback(partial(_text, item), lambda why: f"{why}\n")


def _text(item: Item) -> str:
    if isinstance(item, TextItem):
        return item.text
    if isinstance(item, GapItem):
        return omission(item.characters) + "\n"
    if isinstance(item, NoteItem):
        return item.text + "\n"
    if isinstance(item, DisplayItem):
        text = readable(item.parts, READABLE_CHARS).joined() or "[picture]"
    else:
        failure = item.failure
        text = clean("\n".join(failure.traceback) or f"{failure.name}: {failure.value}")
    return text if text.endswith("\n") else text + "\n"
