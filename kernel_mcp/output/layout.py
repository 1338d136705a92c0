"""Lay out an answer: choose the text that is shown or left out, and place the pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import TypeAlias

from kernel_mcp.output.bundles import (
    ENDLESS_CHARS,
    FOR_VIEWS,
    INLINE_IMAGES,
    Representation,
    embedded,
    extension,
    is_binary,
    primary,
    readable,
)
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.images import shares
from kernel_mcp.output.items import (
    DisplayItem,
    Failure,
    FailureItem,
    GapItem,
    Item,
    NoteItem,
    TextItem,
)
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Truncation, cut, head_of, tail_of, weight
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB

# Tracebacks cut down to what the reader of a cell can act on.
#
# IPython sends one string per frame, in its own layout (`Cell In[1], line 3`, `File x.py:3, in f`
# with numbered source lines) or in that of plain Python. Both are parsed here.
TITLE = "Traceback (most recent call last):"
MAX_OWN_FRAMES = 20
MAX_SOURCE_LINES = 4
LINE_CHARS = 300

_CELL = re.compile(r"\s*(?:Cell|Input) In ?\[\d+\], line \d+")
_FILE = re.compile(r'\s*File (?:"(?P<plain>[^"\n]+)", line \d+|(?P<path>[^"\n]+?):\d+)(?:, in .*)?')
_NOISE = re.compile(r"-{20,}|(?:\S+ +)?Traceback \(most recent call last\):?")
_REPEATED = re.compile(r"\s*\[(?:\.\.\.|Previous line)")
_ARROW = re.compile(r"-+> ?\d*")
_NO_SOURCE = "'Could not get source"
_BODY = re.compile(r"\s|-+>|$")
_PACKAGES = r"(?:site|dist)-packages/"
_LIBRARY = re.compile(rf"(?:/lib/python[\d.]+t?/(?:{_PACKAGES})?|{_PACKAGES})([^/]+)")
_COMPILED = re.compile(r"(?:src/)?([^/<>]+)/.*\.(?:pyx|pxi|pxd|pyi|c|cpp|rs)|<stringsource>")
"""Source of a compiled module, by its path in the package's own repository."""
_FOREIGN = re.compile(r"site-packages|dist-packages|/lib/python|/\.venv/|/\.cache/")


@dataclass(slots=True)
class _Frame:
    header: str
    path: str
    own: bool
    body: list[str] = field(default_factory=list)


def shortened(failure: Failure, workspace: str = "/workspace") -> tuple[str, str]:
    """Return the traceback with the user's own frames, and the exception's message.

    Frames outside cells and the folder `workspace` are counted, not shown. The traceback is empty
    when there is no frame.
    """
    parts = _parsed(failure, workspace)
    end = max((i + 1 for i, part in enumerate(parts) if isinstance(part, _Frame)), default=0)
    message = "\n".join(part for part in parts[end:] if isinstance(part, str)).strip("\n")
    value = clean(failure.value)[:LINE_CHARS].strip("\n")  # long ones are cut differently
    if failure.name not in message and not (value and message.startswith(value)):
        message = f"{clean(failure.name)}: {clean(failure.value)}\n{message}".rstrip()
    message = message.removesuffix("\nTraceback:")  # R's, of an error without frames
    lines = _frame_lines(parts[:end])
    return "\n".join([TITLE, *lines]) if lines else "", message


def _parsed(failure: Failure, workspace: str) -> list[_Frame | str]:
    """Return the frames of a traceback, and the lines between them."""
    parts: list[_Frame | str] = []
    texts = [clean(text) for text in failure.traceback]
    for index, text in enumerate(texts):
        if index and index == len(texts) - 1 and _frame(text.partition("\n")[0], workspace) is None:
            parts.extend(text.split("\n"))
            break
        frame: _Frame | None = None
        for line in text.rstrip("\n").split("\n"):
            if _NOISE.fullmatch(line):
                frame = None
            elif started := _frame(line, workspace):
                frame = started
                parts.append(frame)
            elif frame is not None and _BODY.match(line) and not _REPEATED.match(line):
                frame.body.append(line)
            else:
                frame = None
                parts.append(line)
    return parts


def _frame(line: str, workspace: str) -> _Frame | None:
    """Return the frame that begins with `line`, None if none does."""
    if _CELL.match(line):
        return _Frame(line.strip(), "", own=True)
    match = _FILE.fullmatch(line)
    if match is None:
        return None
    path = match.group("plain") or match.group("path")
    if _COMPILED.fullmatch(path):
        own = False
    elif path.startswith("<"):
        own = not path.startswith(("<frozen", "<__array"))
    else:
        own = path.startswith((f"{workspace}/", "~/", "/tmp/ipykernel_")) or path[0] != "/"
        own = own and not _FOREIGN.search(path)
    return _Frame(line.strip(), path, own)


def _frame_lines(parts: list[_Frame | str]) -> list[str]:
    """Return the lines for own frames, and a count for each run of others."""
    lines: list[str] = []
    hidden: list[_Frame] = []
    own = sum(isinstance(part, _Frame) and part.own for part in parts)
    seen = 0
    for part in parts:
        if isinstance(part, _Frame) and part.own:
            seen += 1
            if MAX_OWN_FRAMES // 2 < seen <= own - MAX_OWN_FRAMES // 2:
                hidden.append(part)
                continue
        elif isinstance(part, _Frame):
            hidden.append(part)
            continue
        lines += _counted(hidden)
        hidden.clear()
        lines += [part[:LINE_CHARS]] if isinstance(part, str) else _marked_lines(part)
    return lines + _counted(hidden)


def _marked_lines(frame: _Frame) -> list[str]:
    """Return the frame's header and its marked line of code, or all lines when none is marked."""
    source = [line[match.end() :].strip() for line in frame.body if (match := _ARROW.match(line))]
    if not source:
        source = [line for line in frame.body if line.strip()]
        margin = min((len(line) - len(line.lstrip()) for line in source), default=0)
        source = [line[margin:] for line in source]
    source = [line[:LINE_CHARS] for line in source if not line.startswith(_NO_SOURCE)]
    return [frame.header[:LINE_CHARS], *(f"    {line}" for line in source[:MAX_SOURCE_LINES])]


def _counted(frames: list[_Frame]) -> list[str]:
    if not frames:
        return []
    names: list[str] = []
    for frame in frames:
        match = _LIBRARY.search(frame.path) or _COMPILED.fullmatch(frame.path)
        name = (match.group(1) or "").removesuffix(".py") if match else ""
        if name and name not in names:
            names.append(name)
    inside = f" inside {', '.join(names[:3])}" if names else ""
    return [f"[… {len(frames)} frame{'s' if len(frames) > 1 else ''}{inside} …]"]


MAX_PICTURES = 12
MAX_LINKS = 24
_TRIES = 4
"""Attempts to cut text that is not of ASCII characters alone, each from the result before."""
READ_CHARS = 64 * KIB
"""Most characters kept of one display's text, from both ends; the middle counts as left out."""
_UNLINKED = (
    "text/plain",
    "text/markdown",
    "application/vnd.jupyter.widget-view+json",
    *FOR_VIEWS,
)
"""Types without a link: their text is shown in full, or they are useless outside the session."""
_WITHOUT_TEXT = re.compile(r"<(?:script|iframe|img|svg|canvas|object|embed|video|audio)\b", re.I)
_OBJECT = re.compile(r"<[^\n]*>|plot without title")  # the latter is R's


@dataclass(frozen=True, slots=True)
class Text:
    """Text of an output; with `own_line` it begins on a line of its own."""

    text: str
    own_line: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Characters left out."""

    characters: int


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark that is never cut, on a line of its own."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class PictureAt:
    """A picture to show here; `uri` is its original, `others` are other encodings of it."""

    part: Representation
    uri: str
    others: tuple[Representation, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A representation that only a resource can carry."""

    uri: str
    title: str
    mime: str
    size: int


Unit: TypeAlias = Text | Gap | Remark | PictureAt


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

    Of a text that is too long the beginning and the end are shown. Long displays and tracebacks are
    shortened first, so that they do not displace everything else.
    """
    layout = Layout()
    for item in items:
        made = or_fallback(partial(_laid_out, item, cell, uri), lambda why: Layout([Remark(why)]))
        layout.units += made.units
        layout.links += made.links
    if len(layout.links) > MAX_LINKS:
        layout.units.append(Remark(f"[… {len(layout.links) - MAX_LINKS} more links left out …]"))
        del layout.links[MAX_LINKS:]
    layout.units = _fewer_pictures(layout.units)
    layout.units = _fitting(layout.units, characters)
    return layout


def _fitting(units: list[Unit], characters: int) -> list[Unit]:
    """Return `units` with their text cut to `characters`, counted as `weight` does."""
    limit = characters
    for _ in range(_TRIES):
        fitting = units
        if (length := _length(units)) > limit:
            fitting = _ends(_shorter_blocks(units, limit), limit)
        heavy = sum(weight(unit.text) for unit in fitting if isinstance(unit, Text))
        if heavy <= characters:
            break
        limit = min(limit, length) * characters // heavy
    return fitting


def _laid_out(item: Item, cell: int, uri: str) -> Layout:
    if isinstance(item, TextItem):
        return Layout([Text(item.text)])
    if isinstance(item, GapItem):
        return Layout([Gap(item.characters)])
    if isinstance(item, NoteItem):
        return Layout([Remark(item.text)])
    if isinstance(item, FailureItem):
        return Layout([Text(text, own_line=True) for text in shortened(item.failure) if text])
    layout = Layout()
    _lay_out_display(layout, item, cell, uri)
    return layout


def _lay_out_display(layout: Layout, item: DisplayItem, cell: int, uri: str) -> None:
    if item.cell != cell:
        layout.units.append(Remark(f"[the display of cell {item.cell} now shows:]"))
    here = f"{uri}/outputs/{item.number}"
    first = primary(item.parts)
    pictures = [p for mime in INLINE_IMAGES for p in item.parts if p.mime == mime]
    picture = pictures[0] if pictures else None
    text = readable(item.parts, READ_CHARS)
    plain = next((part for part in item.parts if part.mime == "text/plain"), None)
    marked = plain is not None and any(part.mime == "text/markdown" for part in item.parts)
    unlinked = (*_UNLINKED, "text/latex") if marked else _UNLINKED  # as every value of R has
    for part in item.parts:
        shown = part.mime in unlinked or part is picture or part.mime in INLINE_IMAGES
        shown = shown and not (part is plain and _has_yielded(part, text))
        if shown or (part.text is None and part.path is None) or _is_shown(part, text, plain):
            continue
        address = here if part is first else f"{here}.{extension(part.mime)}"
        title = f"cell {cell}, output {item.number} ({part.mime})"
        layout.links.append(Link(address, title, part.mime, part.byte_size))
    if picture is not None:
        address = here if picture is first else f"{here}.{extension(picture.mime)}"
        layout.units.append(PictureAt(picture, address, tuple(pictures[1:])))
    more, remark = embedded(item.parts)
    page = here if first is not None and first.mime == "text/html" else f"{here}.html"
    layout.units += [PictureAt(part, page) for part in more]
    layout.units += [Remark(remark)] if remark else []
    if text.head and not ((picture or more) and _OBJECT.fullmatch(text.head)):
        layout.units.append(Text(text.head, own_line=True))
        if text.omitted:
            layout.units += [Gap(text.omitted), Text(text.tail)]


def _has_yielded(plain: Representation, text: Truncation) -> bool:
    """Return True if the plain text of an object is too long to be shown, and another one is."""
    return plain.size > ENDLESS_CHARS and clean(plain.read()[:40]) != text.head[:40]


def _is_shown(part: Representation, text: Truncation, plain: Representation | None) -> bool:
    """Return True if the shown `text` already has the whole content of a part.

    For HTML that is so if it has only words and `plain` has the same ones.
    """
    if text.omitted or part.size > READ_CHARS or is_binary(part.mime):
        return False
    own = part.read()
    if part.mime == "text/html" and plain is not None:
        return clean(plain.read()) == text.head and _WITHOUT_TEXT.search(own) is None
    return clean(own) == text.head


def _fewer_pictures(units: list[Unit]) -> list[Unit]:
    """Return `units` with only the first and last pictures if there are too many."""
    places = [place for place, unit in enumerate(units) if isinstance(unit, PictureAt)]
    dropped = places[MAX_PICTURES // 2 : len(places) - MAX_PICTURES // 2]
    if len(places) <= MAX_PICTURES:
        return units
    pictures = [unit for unit in (units[place] for place in dropped) if isinstance(unit, PictureAt)]
    note = Remark(
        f"[… {len(dropped)} pictures left out: {pictures[0].uri} to {pictures[-1].uri} …]"
    )
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
    """Return `units` with long displays and tracebacks cut to their ends, to fit into `limit`.

    Together they may use the characters that stream text leaves, and at least half of `limit`. Each
    may use at least a third of `limit`.
    """
    blocks = [unit for unit in units if isinstance(unit, Text) and unit.own_line]
    lengths = [len(block.text) for block in blocks]
    room = max(limit // 2, limit - (_length(units) - sum(lengths)))
    shorter: list[Unit] = []
    allowed = iter(shares(lengths, room))
    for unit in units:
        if isinstance(unit, Text) and unit.own_line:
            most = max(next(allowed), limit // 3)
            ends = cut(unit.text, most // 2, most - most // 2)
            shorter.append(Text(ends.head, own_line=True))
            if ends.omitted:
                shorter += [Gap(ends.omitted), Text(ends.tail)]
        else:
            shorter.append(unit)
    return shorter


def _ends(units: Sequence[Unit], limit: int) -> list[Unit]:
    """Return `units` with text left out in the middle, so that `limit` characters remain."""
    surplus = _length(units) - limit
    if surplus <= 0:
        return list(units)
    head, left = _head_units(units, limit // 2)
    kept_tail = limit - _length(head)
    tail: list[Unit] = []
    for unit in reversed(left):
        if not isinstance(unit, Text):
            tail.append(unit)
            continue
        text = tail_of(unit.text, kept_tail)
        kept_tail = kept_tail - len(text) if text == unit.text else 0
        if text:
            tail.append(Text(text, own_line=unit.own_line and text == unit.text))
        tail.append(Gap(len(unit.text) - len(text)))
    return _merged([*head, *reversed(tail)])


def _head_units(units: Sequence[Unit], limit: int) -> tuple[list[Unit], list[Unit]]:
    """Return the beginning of `units` with at most `limit` characters of text, and the rest."""
    taken: list[Unit] = []
    for place, unit in enumerate(units):
        if isinstance(unit, Text):
            if len(unit.text) > limit:
                text = head_of(unit.text, limit)
                rest = Text(unit.text[len(text) :], own_line=unit.own_line and not text)
                return [*taken, Text(text, unit.own_line)], [rest, *units[place + 1 :]]
            limit -= len(unit.text)
        taken.append(unit)
    return taken, []


def _merged(units: Sequence[Unit]) -> list[Unit]:
    """Return `units` without empty texts and gaps, and with neighbouring gaps joined."""
    merged: list[Unit] = []
    for unit in units:
        last = merged[-1] if merged else None
        if isinstance(unit, Gap) and isinstance(last, Gap):
            merged[-1] = Gap(last.characters + unit.characters)
        elif not (isinstance(unit, Text) and not unit.text) and unit != Gap(0):
            merged.append(unit)
    return merged
