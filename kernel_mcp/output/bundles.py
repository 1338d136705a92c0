"""MIME bundles of a cell, kept in memory when small and as host-side files when not."""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_mcp.output.markup import (
    JSON_DEPTH,
    Shape,
    html_outline,
    html_to_text,
    pictures_in,
    slices,
    utf8,
)
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Truncation, cut, visible
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB

MAX_TYPES = 16
"""MIME types kept of one bundle."""
SMALL_BYTES = 8 * KIB
"""Size of one value up to which it stays in memory for good."""
SETTLED_BYTES = 256 * KIB
"""Size of a cell's values up to which each one below `SMALL_BYTES` stays in memory for good."""

METADATA_CHARS = 4 * KIB
BLOCK_BYTES = 48 * KIB
"""Size of the blocks that files are read in; base64 of a whole block needs no padding."""
HTML_CHARS = 256 * KIB
"""Characters of an HTML document that are searched for words."""

_EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "text/plain": "txt",
    "text/html": "html",
    "text/markdown": "md",
    "text/latex": "tex",
    "application/json": "json",
    "application/geo+json": "geojson",
    "application/pdf": "pdf",
    "application/javascript": "js",
    "text/csv": "csv",
}
_MIME = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,99}/[a-z0-9][a-z0-9!#$&^_.+-]{0,99}", re.I)
_READABLE = (
    *("text/markdown", "text/latex", "application/json", "application/geo+json", "text/html"),
    *("image/svg+xml", "application/javascript"),
)
"""Types that have words besides plain text, in the order in which they are preferred."""
_RICH = (
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "application/pdf",
    "text/latex",
    "text/markdown",
)
CHART = "application/vnd.kernel-mcp.chart+json"
"""The numbers of a figure, which views draw; notebooks have its picture."""
TABLE = "application/vnd.kernel-mcp.table+html"
"""Some hundred rows of a long data frame, for views; its own HTML has ten."""
FOR_VIEWS = (CHART, TABLE)
INLINE_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Pictures that can be shown to a model, some of them after conversion."""
_PLACEHOLDER = re.compile(r"<[\w.]+ object>|<[\w.<>]+(?: object)? at 0x[0-9a-f]+>|<Figure size .*>")
"""The plain text of an object that has a better representation, such as `<Axes object>`."""
_NO_TEXT = " cannot be represented in plain text "
"""Part of the plain text that R gives to widgets."""
_PAGE = "<IPython.core.display.HTML object>"
"""The plain text of a page that code displays: the kernel gives it one of its own pictures."""
ENDLESS_CHARS = 4000
"""Characters of plain text beyond which a much shorter table is shown instead."""
MOST_EMBEDDED = 8
"""Most pictures of one page that are shown."""


def _is_name(plain: str) -> bool:
    """Return True for plain text that may be no more than a name, such as `<Table>`, or no text."""
    line = "\n" not in plain
    return line and ((plain[:1] == "<" and plain[-1:] == ">") or _NO_TEXT in plain)


def is_binary(mime: str) -> bool:
    """Return True if Jupyter carries this MIME type as base64."""
    return (
        mime.startswith(("image/", "audio/", "video/")) and mime != "image/svg+xml"
    ) or mime in ("application/pdf", "application/octet-stream", "application/zip")


def extension(mime: str) -> str:
    """Return the file name ending for a MIME type, without the dot."""
    if mime in _EXTENSIONS:
        return _EXTENSIONS[mime]
    return "json" if mime.endswith("json") else "bin" if is_binary(mime) else "txt"


@dataclass(frozen=True, slots=True)
class Representation:
    """One representation of a bundle.

    The value is `text` (base64 for binary types) or the file at `path` (decoded); both are None
    when it could not be kept, and `problem` says why. `size` is in characters of the value as it
    came; `structured` says that the text is the JSON form of a value that was not a string.
    """

    mime: str
    size: int
    text: str | None = None
    path: Path | None = None
    structured: bool = False
    problem: str = ""

    @property
    def byte_size(self) -> int:
        """Approximate size of the value as a file, in bytes."""
        return self.size * 3 // 4 if is_binary(self.mime) else self.size

    def read(self) -> str:
        """Return the value as text; empty when it is not kept."""
        if self.text is not None:
            return self.text
        if is_binary(self.mime):
            return base64.b64encode(self._file()).decode("ascii")
        return self._file().decode("utf-8", "replace")

    def data(self) -> bytes:
        """Return the value as the bytes of a file.

        Raises ValueError if it is not kept or is no valid base64.
        """
        if self.text is None:
            if self.path is None:
                raise ValueError(self.problem)
            return self._file()
        if is_binary(self.mime):
            return decode_base64(self.text)
        return self.text.encode("utf-8", "replace")

    def pieces(self) -> Iterator[str]:
        """Yield the value as text, in pieces. Raises OSError when its file cannot be read."""
        if self.text is not None:
            yield from slices(self.text)
        elif is_binary(self.mime):
            yield from (base64.b64encode(block).decode("ascii") for block in self.raw())
        else:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            yield from (decoder.decode(block) for block in self.raw())

    def raw(self) -> Iterator[bytes]:
        """Yield the text or the file unchanged, in pieces. Raises OSError."""
        if self.text is not None:
            yield from map(utf8, slices(self.text))
        elif self.path is not None:
            with self.path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

    def _file(self) -> bytes:
        if self.path is None:
            return b""
        try:
            return self.path.read_bytes()
        except OSError:
            return b""


def decode_base64(text: str) -> bytes:
    """Return the bytes of base64 text, which may have line breaks. Raises ValueError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not valid base64 ({error})") from None


class BundleStore:
    """Keeps the parts of one cell's bundles within its budgets of memory and disk (bytes).

    Values over `bundle_bytes` in one bundle, or over `memory_bytes` in all, become files named
    `<cell>-<number>.<ext>`; what exceeds `disk_bytes` is dropped with its size remembered.
    """

    def __init__(
        self, folder: Path, cell: int, *, bundle_bytes: int, memory_bytes: int, disk_bytes: int
    ) -> None:
        self._folder = folder
        self._cell = cell
        self._bundle_bytes = bundle_bytes
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self.in_memory = 0
        self.on_disk = 0

    def put(self, number: int, data: Mapping[str, Any]) -> tuple[Representation, ...]:
        """Keep a bundle under `number`; files of a former one with that number are replaced."""
        parts = [_part(mime, data[mime]) for mime in _types(data)]
        small = sum(part.size for part in parts) <= self._bundle_bytes
        kept: list[Representation] = []
        for part in sorted(parts, key=_size):
            fits = self.in_memory + part.size <= self._memory_bytes
            if part.size > SMALL_BYTES and not (small and fits):
                kept.append(self._spill(number, part))
            else:
                kept.append(part)
                self.in_memory += part.size
        return tuple(kept)

    def move_to_files(
        self, number: int, parts: tuple[Representation, ...]
    ) -> tuple[Representation, ...]:
        """Move every value above `SMALL_BYTES` to a file; return the parts.

        When the cell has more than `SETTLED_BYTES` in memory, smaller values are moved too.
        """
        settled: list[Representation] = []
        for part in parts:
            stays = SMALL_BYTES if self.in_memory <= SETTLED_BYTES else SMALL_BYTES // 32
            if part.text is not None and part.size > stays:
                self.in_memory -= part.size
                settled.append(self._spill(number, part))
            else:
                settled.append(part)
        return tuple(settled)

    def drop(self, parts: tuple[Representation, ...]) -> None:
        """Release the memory and remove the files of `parts`."""
        for part in parts:
            if part.text is not None:
                self.in_memory -= part.size
            elif part.path is not None:
                self.on_disk -= _file_size(part.path)
                part.path.unlink(missing_ok=True)

    def _spill(self, number: int, part: Representation) -> Representation:
        try:
            raw = part.data()
        except ValueError as error:
            return replace(part, text=None, problem=str(error))
        if self.on_disk + len(raw) > self._disk_bytes:
            return replace(part, text=None, problem="too large to be kept")
        path = self._free_path(number, part.mime)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(raw)
        except OSError as error:
            path.unlink(missing_ok=True)
            return replace(part, text=None, problem=f"the server could not store it ({error})")
        self.on_disk += len(raw)
        return replace(part, text=None, path=path)

    def _free_path(self, number: int, mime: str) -> Path:
        """Return a file name, distinct even for two types with the same ending."""
        path = self._folder / f"{self._cell}-{number}.{extension(mime)}"
        if path.exists():
            return path.with_name(f"{path.stem}-{re.sub(r'[^a-z0-9]+', '-', mime)}{path.suffix}")
        return path


def primary(parts: tuple[Representation, ...]) -> Representation | None:
    """Return the representation to open for a user: rich before plain; None without one."""
    for mime in _RICH:
        for part in parts:
            if part.mime == mime:
                return part
    return next((part for part in parts if part.mime != "text/plain"), *parts[:1] or (None,))


def readable(parts: tuple[Representation, ...], limit: int) -> Truncation:
    """Return a bundle as text for a reader without a browser; only its ends beyond `limit`.

    Plain text that is only a name, or endless, is not shown if another type says more. Empty when
    only a picture represents the bundle.
    """
    by_type = {part.mime: part for part in parts}
    pictured = any(mime in by_type for mime in INLINE_IMAGES)
    plain = by_type["text/plain"].read() if "text/plain" in by_type else ""
    others = (_words(mime, by_type, pictured) for mime in _READABLE if mime in by_type)
    text = plain
    if not plain.strip() or _is_name(plain.strip()):
        is_placeholder = len(parts) > 1 and _PLACEHOLDER.fullmatch(plain.strip())
        text = next(filter(str.strip, others), "" if is_placeholder else plain)
    elif len(plain) > ENDLESS_CHARS and "text/html" in by_type:
        page = by_type["text/html"].read()
        words = html_to_text(page, HTML_CHARS) if "<table" in page.lower() else ""
        text = words if words and len(words) < len(plain) // 2 else plain
    if text.strip():
        ends = cut(text, limit // 2, limit - limit // 2)
        return Truncation(clean(ends.head), clean(ends.tail), ends.omitted)
    shown = primary(parts)
    if shown is None or pictured:
        return Truncation("", "", 0)
    return Truncation(f"[{shown.mime}, {shown.size:,} characters]", "", 0)


def _words(mime: str, by_type: Mapping[str, Representation], pictured: bool) -> str:
    """Return what one type of a bundle other than plain text says to a reader."""
    part = by_type[mime]
    if mime == "application/javascript":
        return f"[JavaScript, {part.size:,} characters, which is not run here]"
    text = part.read()
    if mime == "text/html":
        words = html_to_text(text, HTML_CHARS)
        return words if words or pictured else html_outline(text, HTML_CHARS)
    if mime == "image/svg+xml":
        return html_to_text(text[text.find(">", text.find("<svg")) + 1 :], HTML_CHARS)
    return text


def embedded(parts: Sequence[Representation]) -> tuple[list[Representation], str]:
    """Return the pictures that only the page of a bundle has, and a remark on those beyond a bound.

    If an object has a picture that is not the first of its page, the page is another form of it.
    """
    page = next((part.read() for part in parts if part.mime == "text/html"), "")
    own = next((part for mime in INLINE_IMAGES for part in parts if part.mime == mime), None)
    found = pictures_in(page) if "data:image/" in page else []
    if own is not None and found:
        shown_data = "".join(own.read().split())
        same = next((n for n, each in enumerate(found) if each[1] == shown_data), len(found))
        is_page = any(part.mime == "text/plain" and part.text == _PAGE for part in parts)
        found = found[:same] + found[same + 1 :] if same == 0 or is_page else []
    inline = [each for each in found if each[0] in INLINE_IMAGES]
    shown = inline[:MOST_EMBEDDED]
    rest = inline[MOST_EMBEDDED:] + [each for each in found if each[0] not in INLINE_IMAGES]
    remark = ""
    if rest:
        names = [f"{alt[:60] or mime} ({len(data):,} characters)" for mime, data, alt in rest]
        more = ["…"] if len(names) > MOST_EMBEDDED else []
        told = ", ".join([*names[:MOST_EMBEDDED], *more])
        are = "picture of this page is" if len(rest) == 1 else "pictures of this page are"
        remark = f"[… {len(rest)} more {are} not shown: {told} …]"
    return [Representation(mime, len(data), data) for mime, data, _ in shown], visible(remark)


def representations(data: Mapping[str, Any]) -> tuple[Representation, ...]:
    """Return the parts of a MIME bundle, all in memory."""
    return tuple(_part(mime, data[mime]) for mime in _types(data))


def bounded_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return `metadata`; empty when it is too large or too deeply nested to keep."""
    if not metadata:
        return {}
    try:
        text = json.dumps(metadata, allow_nan=False)
    except (RecursionError, ValueError):
        return {}
    shape = Shape()
    shape.feed(text[: METADATA_CHARS + 1])
    return metadata if len(text) <= METADATA_CHARS and shape.deepest <= JSON_DEPTH else {}


def _types(data: Mapping[str, Any]) -> list[str]:
    return [mime for mime in data if _MIME.fullmatch(mime)][:MAX_TYPES]


def _part(mime: str, value: Any) -> Representation:
    if isinstance(value, str):
        return Representation(mime.lower(), len(value), value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        return Representation(mime.lower(), 0, problem="nested too deeply to be kept")
    except ValueError:
        return Representation(mime.lower(), 0, problem="it holds a number that JSON cannot carry")
    return Representation(mime.lower(), len(text), text, structured=True)


def _size(part: Representation) -> int:
    return part.size


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
