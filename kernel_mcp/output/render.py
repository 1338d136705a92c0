"""Render a cell's output as MCP content, within the limits of clients and models."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import anyio.to_thread
from mcp_types import ContentBlock, ImageContent, ResourceLink, TextContent

from kernel_mcp.config.settings import MAX_OUTPUT
from kernel_mcp.output.bundles import INLINE_IMAGES, Representation, primary
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.images import ImageError, Picture, fit, shares
from kernel_mcp.output.items import DisplayItem, FailureItem, Item, StreamName, TextItem
from kernel_mcp.output.layout import Gap, Layout, Link, PictureAt, Text, lay_out, shortened
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.text import cut, escaped_lines, omission
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB

PICTURE_BYTES = 650_000
"""All pictures of one answer before base64: the SDK's client refuses HTTP events over 1 MiB."""
PICTURES_S = 5.0
"""Processor seconds after which the remaining pictures of an answer are linked instead of shown."""
MAX_TYPES = 100
STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
FAILURE_CHARS = 4000
INLINE_CHARS = 32 * KIB
"""Displays and tracebacks up to this size are laid out on the event loop, others in a thread."""

_ERROR_TYPE = "application/vnd.jupyter.error"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Content blocks, how many characters they leave out, and the MIME types of the outputs."""

    content: list[ContentBlock]
    omitted: int
    mime_types: list[str]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one answer: characters of text, bytes of pictures."""

    characters: int = MAX_OUTPUT
    picture_bytes: int = PICTURE_BYTES


def cell_uri(session: str, cell: int) -> str:
    """Return the URI of the resource with the whole text of a cell's output."""
    return f"kernel://{session}/cells/{cell}"


async def render(
    items: Sequence[Item],
    *,
    session: str,
    cell: int,
    budget: Budget | None = None,
    silence: str = "(no output)",
) -> Rendered:
    """Return the content blocks for `items` of one cell.

    Pictures are checked and shrunk in a thread. Text beyond the budget is left out in the middle;
    its exact length and a link to the whole replace it. `silence` is the text if there is none.
    """
    budget = budget or Budget()
    uri = cell_uri(session, cell)
    work = partial(lay_out, items, cell=cell, uri=uri, characters=budget.characters)
    heavy = sum(map(_weight, items)) > INLINE_CHARS
    layout = await anyio.to_thread.run_sync(work, abandon_on_cancel=True) if heavy else work()
    wanted = [unit for unit in layout.units if isinstance(unit, PictureAt)]
    pictures: dict[PictureAt, Picture | str] = {}
    if wanted:
        pictures = await anyio.to_thread.run_sync(
            _prepare, wanted, budget.picture_bytes, abandon_on_cancel=True
        )
    content = _content(layout, pictures, uri, silence)
    return Rendered(content, layout.omitted, mime_types(items))


def text_by_stream(log: OutputLog) -> tuple[dict[str, str], int]:
    """Return the text of each stream, and the number of characters left out of both.

    stderr ends with the exceptions that ended the cell. Each text has at most some
    `MAX_OUTPUT`. Blocks.
    """
    streams: dict[str, str] = {}
    omitted = 0
    for name in STREAMS:
        found = log.stream(name, MAX_OUTPUT)
        text = found.joined()
        omitted += found.omitted
        if name == "stderr":
            for failure in log.failures:
                told = or_fallback(partial(shortened, failure), lambda why: ("", why))
                ended = cut("\n".join(filter(None, told)), FAILURE_CHARS, 0)
                text += f"{'' if text.endswith(chr(10)) or not text else chr(10)}{ended.head}\n"
                omitted += ended.omitted
        streams[name] = escaped_lines(text)
    return streams, omitted


def _weight(item: Item) -> int:
    """Return the characters of `item` that the layout has to clean or read."""
    if isinstance(item, DisplayItem):
        return sum(part.size for part in item.parts if part.mime not in INLINE_IMAGES)
    if isinstance(item, FailureItem):
        return sum(map(len, item.failure.traceback))
    return 0


def mime_types(items: Sequence[Item]) -> list[str]:
    """Return one type for each output in order: a display's picture or richest form."""
    types: list[str] = []
    for item in items[:MAX_TYPES]:
        if isinstance(item, TextItem):
            types.append(f"application/vnd.jupyter.{item.name}")
        elif isinstance(item, FailureItem):
            types.append(_ERROR_TYPE)
        elif isinstance(item, DisplayItem) and (part := _listed_part(item.parts)):
            types.append(part.mime)
    return types


def _listed_part(parts: tuple[Representation, ...]) -> Representation | None:
    """Return the representation by which a bundle is listed, a picture first; None for none."""
    return next((part for part in parts if part.mime in INLINE_IMAGES), primary(parts))


def _prepare(wanted: Sequence[PictureAt], total: int) -> dict[PictureAt, Picture | str]:
    """Return each picture ready to show, or the reason why it cannot be shown. Blocks."""
    data = [or_fallback(partial(_data, place.part), _unshowable) for place in wanted]
    limits = shares([len(raw) if isinstance(raw, bytes) else 0 for raw in data], total)
    deadline = time.thread_time() + PICTURES_S
    return {
        place: or_fallback(partial(_fitted, raw, limit, deadline, place.others), _unshowable)
        for place, raw, limit in zip(wanted, data, limits, strict=True)
    }


def _unshowable(why: str) -> str:
    return why.strip("[]")


def _data(part: Representation) -> bytes | str:
    try:
        return part.data()
    except ValueError as error:
        return str(error)


def _fitted(
    raw: bytes | str, limit: int, deadline: float, others: Sequence[Representation]
) -> Picture | str:
    """Return a picture ready to show: `raw`, or one of `others` with the same content.

    If none of them can be shown, the reason.
    """
    if time.thread_time() > deadline:
        return "there was no time left to prepare it"
    if isinstance(raw, str):
        return raw
    try:
        return fit(raw, limit)
    except ImageError as error:
        for other in others:
            small = _fitted(_data(other), limit, deadline, ())
            if isinstance(small, Picture):
                return replace(small, change=f"a smaller copy, as {error}")
        return str(error)


def _content(
    layout: Layout,
    pictures: dict[PictureAt, Picture | str],
    uri: str,
    silence: str,
) -> list[ContentBlock]:
    page = _Page()
    pointed = False
    links: list[Link] = []
    if layout.omitted:
        links.append(Link(uri, "the whole output", "text/plain", 0))
    for unit in layout.units:
        if isinstance(unit, Text):
            page.text(unit.text, apart=unit.own_line)
        elif isinstance(unit, Gap):
            page.line(omission(unit.characters, "" if pointed else f"the whole: {uri}"))
            pointed = True
        elif isinstance(unit, PictureAt):
            if link := _show(page, unit, pictures[unit]):
                links.append(link)
        else:
            page.line(unit.text)
    if page.empty:
        page.line(silence)
    return [*page.blocks(), *map(_resource, [*links, *layout.links])]


def _show(page: _Page, place: PictureAt, picture: Picture | str) -> Link | None:
    """Put a picture on the page; return a link to the original if that has more than is shown."""
    part = place.part
    link = Link(place.uri, f"original picture ({part.mime})", part.mime, part.byte_size)
    if isinstance(picture, Picture):
        page.picture(picture)
        if not picture.change:
            return None
        page.line(f"[picture {picture.change}; original: {place.uri}]")
        return link
    page.line(f"[{part.mime} not shown: {picture}]")
    return None if part.problem else link


def _resource(link: Link) -> ResourceLink:
    return ResourceLink(name=link.title, uri=link.uri, mime_type=link.mime, size=link.size or None)


class _Page:
    """Content blocks in the making: text is joined until a picture interrupts it."""

    def __init__(self) -> None:
        self._blocks: list[ContentBlock] = []
        self._text: list[str] = []
        self._at_line_start = True
        self.empty = True

    def text(self, text: str, *, apart: bool) -> None:
        """Add text, with `apart` on a line of its own."""
        if not text:
            return
        if apart and not self._at_line_start:
            self._text.append("\n")
        self._text.append(text)
        self._at_line_start = text.endswith("\n")
        self.empty = self.empty and not text.strip()
        if apart and not self._at_line_start:
            self._text.append("\n")
            self._at_line_start = True

    def line(self, text: str) -> None:
        """Add a line of its own."""
        self.text(text, apart=True)

    def picture(self, picture: Picture) -> None:
        self._end_text()
        data = base64.b64encode(picture.data).decode("ascii")
        self._blocks.append(ImageContent(data=data, mime_type=picture.mime))
        self.empty = False

    def blocks(self) -> list[ContentBlock]:
        self._end_text()
        return self._blocks

    def _end_text(self) -> None:
        text = "".join(self._text).rstrip("\n")
        if text.strip():
            self._blocks.append(TextContent(text=text))
        self._text.clear()
        self._at_line_start = True
