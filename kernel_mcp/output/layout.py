"""How an answer is laid out: which text is shown, which is left out, where pictures stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kernel_mcp.config.settings import KIB
from kernel_mcp.output.bundles import INLINE_IMAGES, Part, extension, primary, readable
from kernel_mcp.output.images import shares
from kernel_mcp.output.items import DisplayItem, FailureItem, GapItem, Item, NoteItem, TextItem
from kernel_mcp.output.text import cut, head_of, tail_of
from kernel_mcp.output.tracebacks import shortened

MAX_PICTURES = 12
MAX_LINKS = 24
READ_CHARS = 64 * KIB
"""Text of one display that is considered; its middle is counted."""
_UNLINKED = ("text/plain", "text/markdown", "application/vnd.jupyter.widget-view+json")
"""What is shown as it is, and what means nothing outside the session."""
_OBJECT = re.compile(r"<[^\n]*>")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of an output; with `apart` it begins on a line of its own."""

    text: str
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Characters left out."""

    characters: int


@dataclass(frozen=True, slots=True)
class Note:
    """A remark that is never cut, on a line of its own."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class PictureAt:
    """A picture that is to be shown here; `uri` is its original."""

    part: Part
    uri: str


@dataclass(frozen=True, slots=True)
class Link:
    """A representation that only a resource can carry."""

    uri: str
    title: str
    mime: str
    size: int


Unit: TypeAlias = Text | Gap | Note | PictureAt


@dataclass(slots=True)
class Layout:
    """The units of an answer in order, and the links that go with it."""

    units: list[Unit] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    @property
    def omitted(self) -> int:
        """Characters left out."""
        return sum(unit.characters for unit in self.units if isinstance(unit, Gap))


def lay_out(items: Sequence[Item], *, cell: int, uri: str, characters: int) -> Layout:
    """Lay out the output of `cell`, whose whole text is at `uri`, in `characters` of text.

    Of a text that is too long its beginning and its end are shown; long displays and tracebacks
    give way first, so that they do not push everything else out.
    """
    layout = Layout()
    for item in items:
        if isinstance(item, TextItem):
            layout.units.append(Text(item.text))
        elif isinstance(item, GapItem):
            layout.units.append(Gap(item.characters))
        elif isinstance(item, NoteItem):
            layout.units.append(Note(item.text))
        elif isinstance(item, FailureItem):
            layout.units += [Text(text, apart=True) for text in shortened(item.failure) if text]
        else:
            _lay_out_display(layout, item, cell, uri)
    if len(layout.links) > MAX_LINKS:
        layout.units.append(Note(f"[… {len(layout.links) - MAX_LINKS} more links left out …]"))
        del layout.links[MAX_LINKS:]
    layout.units = _fewer_pictures(layout.units)
    if _length(layout.units) > characters:
        layout.units = _ends(_shorter_blocks(layout.units, characters), characters)
    return layout


def _lay_out_display(layout: Layout, item: DisplayItem, cell: int, uri: str) -> None:
    if item.cell != cell:
        layout.units.append(Note(f"[the display of cell {item.cell} now shows:]"))
    here = f"{uri}/outputs/{item.number}"
    first = primary(item.parts)
    picture = next((p for mime in INLINE_IMAGES for p in item.parts if p.mime == mime), None)
    for part in item.parts:
        shown = part.mime in _UNLINKED or part is picture or part.mime in INLINE_IMAGES
        if shown or (part.text is None and part.path is None):
            continue
        address = here if part is first else f"{here}.{extension(part.mime)}"
        title = f"cell {cell}, output {item.number} ({part.mime})"
        layout.links.append(Link(address, title, part.mime, part.byte_size))
    if picture is not None:
        address = here if picture is first else f"{here}.{extension(picture.mime)}"
        layout.units.append(PictureAt(picture, address))
    text = readable(item.parts, READ_CHARS)
    if text.head and not (picture is not None and _OBJECT.fullmatch(text.head)):
        layout.units.append(Text(text.head, apart=True))
        if text.omitted:
            layout.units += [Gap(text.omitted), Text(text.tail)]


def _fewer_pictures(units: list[Unit]) -> list[Unit]:
    """`units` with only the first and last pictures when there are too many for one answer."""
    places = [place for place, unit in enumerate(units) if isinstance(unit, PictureAt)]
    dropped = places[MAX_PICTURES // 2 : len(places) - MAX_PICTURES // 2]
    if len(places) <= MAX_PICTURES:
        return units
    pictures = [unit for unit in (units[place] for place in dropped) if isinstance(unit, PictureAt)]
    note = Note(f"[… {len(dropped)} pictures left out: {pictures[0].uri} to {pictures[-1].uri} …]")
    kept: list[Unit] = []
    for place, unit in enumerate(units):
        if place == dropped[0]:
            kept.append(note)
        elif place not in dropped:
            kept.append(unit)
    return kept


def _length(units: Sequence[Unit]) -> int:
    return sum(len(unit.text) for unit in units if isinstance(unit, Text))


def _shorter_blocks(units: Sequence[Unit], limit: int) -> list[Unit]:
    """`units` with both ends of displays and tracebacks that are too long for `limit` in all.

    Together they get what stream text leaves of it, or half of it; none gets less than a third.
    """
    blocks = [unit for unit in units if isinstance(unit, Text) and unit.apart]
    lengths = [len(block.text) for block in blocks]
    room = max(limit // 2, limit - (_length(units) - sum(lengths)))
    shorter: list[Unit] = []
    allowed = iter(shares(lengths, room))
    for unit in units:
        if isinstance(unit, Text) and unit.apart:
            most = max(next(allowed), limit // 3)
            ends = cut(unit.text, most // 2, most - most // 2)
            shorter.append(Text(ends.head, apart=True))
            if ends.omitted:
                shorter += [Gap(ends.omitted), Text(ends.tail)]
        else:
            shorter.append(unit)
    return shorter


def _ends(units: Sequence[Unit], limit: int) -> list[Unit]:
    """`units` with text left out in the middle, so that `limit` characters of it remain."""
    surplus = _length(units) - limit
    if surplus <= 0:
        return list(units)
    head, left = _taken(units, limit // 2)
    kept_tail = limit - _length(head)
    tail: list[Unit] = []
    for unit in reversed(left):
        if not isinstance(unit, Text):
            tail.append(unit)
            continue
        text = tail_of(unit.text, kept_tail)
        kept_tail = kept_tail - len(text) if text == unit.text else 0
        if text:
            tail.append(Text(text, apart=unit.apart and text == unit.text))
        tail.append(Gap(len(unit.text) - len(text)))
    return _merged([*head, *reversed(tail)])


def _taken(units: Sequence[Unit], limit: int) -> tuple[list[Unit], list[Unit]]:
    """The beginning of `units` with at most `limit` characters of text, and the rest."""
    taken: list[Unit] = []
    for place, unit in enumerate(units):
        if isinstance(unit, Text):
            if len(unit.text) > limit:
                text = head_of(unit.text, limit)
                rest = Text(unit.text[len(text) :], apart=unit.apart and not text)
                return [*taken, Text(text, unit.apart)], [rest, *units[place + 1 :]]
            limit -= len(unit.text)
        taken.append(unit)
    return taken, []


def _merged(units: Sequence[Unit]) -> list[Unit]:
    """`units` without empty texts and gaps, and with neighbouring gaps as one."""
    merged: list[Unit] = []
    for unit in units:
        last = merged[-1] if merged else None
        if isinstance(unit, Gap) and isinstance(last, Gap):
            merged[-1] = Gap(last.characters + unit.characters)
        elif not (isinstance(unit, Text) and not unit.text) and unit != Gap(0):
            merged.append(unit)
    return merged
