"""Read an open file as lines of text or as bytes; decode content that callers write.

The file may change or grow while it is read.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import mimetypes
import os
from collections.abc import Callable, Iterable, Iterator

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.encodings import ENCODINGS, foreign_encodings, is_text
from kernel_mcp.output.images import sniff
from kernel_mcp.output.text import within
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB

PROBE_BYTES = 8 * 1024
"""Bytes from the beginning of a file that the functions on `head` need."""

_MAGIC = (
    (b"PK\x03\x04", "a ZIP archive (.xlsx, .docx and .npz are ZIP archives too)"),
    (b"\x1f\x8b", "gzip data"),
    (b"PAR1", "a Parquet file"),
    (b"%PDF", "a PDF document"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "a program"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
)


def binary_kind(head: bytes) -> str | None:
    """Return a description of binary data by its first bytes, such as "gzip data"; else None."""
    return next((words for magic, words in _MAGIC if head.startswith(magic)), None)


def mime_of(path: str, head: bytes) -> str:
    """Return the MIME type of a file: of pictures by their bytes, of others by their name."""
    if picture := sniff(head):
        return picture
    guessed, encoding = mimetypes.guess_type(path)
    if guessed and not encoding and not guessed.startswith("image/"):
        return guessed
    if guessed == "image/svg+xml":
        return guessed
    return "text/plain" if is_text(head) else "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Page:
    """Some lines of a text.

    `first` is the number of the first line, from 0; `total` counts the lines of the whole text.
    `cut` characters at the end of the last line were left out because it is too long.
    """

    text: str
    first: int
    lines: int
    total: int
    cut: int = 0

    @property
    def next(self) -> int | None:
        """The offset at which to read on, or None at the end."""
        after = self.first + self.lines
        return after if after < self.total else None


def page_of(pieces: Iterable[str], *, offset: int, limit: int, characters: int) -> Page:
    """Return at most `limit` lines from line `offset` on; 0 for as many as fit.

    The page has at most `characters` characters, as `weight` counts them, and whole lines only,
    except a single line that is too long. All pieces are read to count the lines.
    """
    window: list[str] = []
    size = skipped = found = total = after = 0
    line_open = ends_line = True
    for piece in filter(None, pieces):
        breaks = piece.count("\n")
        total += breaks
        ends_line = piece.endswith("\n")
        start = 0
        if skipped < offset:
            if skipped + breaks < offset:
                skipped += breaks
                continue
            start = _after_breaks(piece, offset - skipped)
            skipped = offset
        if size <= characters and not (limit and found >= limit):
            window.append(piece[start:])
            size += len(piece) - start
            found += piece.count("\n", start)
        elif line_open:
            end = piece.find("\n")
            after += len(piece) if end < 0 else end
            line_open = end < 0
    text = "".join(window)
    if limit:
        text = text[: _after_breaks(text, limit)]
    cut = 0
    characters = within(text, characters) if len(text) > characters // 2 else characters
    if len(text) > characters:
        line_end = text.find("\n")
        whole = text.rfind("\n", 0, characters) + 1
        if not whole:
            cut = (len(text) + after if line_end < 0 else line_end) - characters
        text = text[: whole or characters]
    lines = text.count("\n") + (bool(text) and not text.endswith("\n"))
    return Page(text, offset, lines, total + (not ends_line), cut)


def _after_breaks(text: str, count: int) -> int:
    """Return the position after `count` line ends; the end of the text if it has fewer."""
    position = 0
    for _ in range(count):
        position = text.find("\n", position) + 1
        if not position:
            return len(text)
    return position


SCAN_BYTES = 256 * MIB
"""Largest text file of which lines are read."""
_BLOCK = 256 * KIB


def lines_of(
    fd: int,
    info: os.stat_result,
    path: str,
    offset: int,
    limit: int,
    characters: int,
    masked: Callable[[Iterator[str]], Iterable[str]] = iter,
    encoding: str = "utf-8-sig",
) -> Page:
    """Return lines of a text, `masked`, as `page_of` does. Raises WorkspaceError."""
    if info.st_size > SCAN_BYTES:
        raise WorkspaceError(
            f"{path!r} has {info.st_size:,} bytes, too many to page through. Read the part "
            "you need with code."
        )
    try:
        pieces = masked(_text_pieces(fd, SCAN_BYTES, encoding))
        page = page_of(pieces, offset=offset, limit=limit, characters=characters)
    except UnicodeDecodeError as error:
        if encoding != "utf-8-sig":
            raise WorkspaceError(f"{path!r} is not {encoding} text: {error.reason}.") from error
        near = error.object[max(0, error.start - PROBE_BYTES) : error.start + PROBE_BYTES]
        if len(near) < PROBE_BYTES:  # the file ends within a character
            near = os.pread(fd, PROBE_BYTES, max(0, info.st_size - PROBE_BYTES)) + b"\n"
        raise folders.not_utf8(path, foreign_encodings(near)) from error
    if offset and offset >= page.total:
        lines = f"{page.total:,} line{'' if page.total == 1 else 's'}"
        raise WorkspaceError(f"{path!r} has {lines}; offset {offset:,} is after it.")
    return page


def bytes_of(fd: int, info: os.stat_result, path: str, most: int, resource: int) -> bytes:
    """Return the whole file. Raises WorkspaceError when it has more than `most` bytes.

    The error says if it can be read as a resource, which may have up to `resource` bytes.
    """
    if info.st_size <= most:
        data = b"".join(_blocks(fd, most + 1))
        if len(data) <= most:
            return data
    where = f"kernel://SESSION/files/{path}" if info.st_size <= resource else "code"
    raise WorkspaceError(
        f"{path!r} has {info.st_size:,} bytes; at most {most:,} can be returned here. Read it "
        f"with {'code or as the resource ' if where != 'code' else ''}{where}."
    )


def bytes_from(fd: int, offset: int, most: int) -> bytes:
    """Return at most `most` bytes of a file from `offset` on."""
    data = b""
    while len(data) < most and (more := os.pread(fd, most - len(data), offset + len(data))):
        data += more
    return data


def base64_room(limit: int, characters: int) -> int:
    """Return how many bytes of base64 an answer shows, of `limit` that were asked for, 0 for all.

    Pages of them can be joined as base64: their size is a multiple of three.
    """
    room = max(3, characters * 3 // 4 // 3 * 3)
    return min(limit or room, room)


def any_encoding(name: str) -> str:
    """Return utf-8, base64 or the name of another encoding of texts. Raises WorkspaceError."""
    plain = name.lower().replace("_", "-").strip()
    if plain in ("utf8", "utf-8", "base64"):
        return encoding_of(plain)
    try:
        found = codecs.lookup(plain)
    except (LookupError, ValueError):
        found = None
    if found is None or found.name not in ENCODINGS:
        known = ", ".join(sorted(ENCODINGS))
        raise WorkspaceError(f"encoding {name!r} is not known: use utf-8, base64, or {known}.")
    return found.name


def decoded(content: str, encoding: str) -> bytes:
    """Return the bytes of content that a caller wrote in `encoding`. Raises WorkspaceError."""
    try:
        if encoding_of(encoding) == "utf-8":
            return content.encode("utf-8")
        return base64.b64decode("".join(content.split()), validate=True)
    except UnicodeEncodeError:
        raise WorkspaceError(
            "The content holds half of a surrogate pair, which UTF-8 cannot store. Write it as "
            "base64."
        ) from None
    except (binascii.Error, ValueError) as error:
        raise WorkspaceError(f"The content is not valid base64: {error}.") from None


def encoding_of(name: str) -> str:
    """Return "utf-8" or "base64" for any spelling of it. Raises WorkspaceError for others."""
    if name.lower() in ("utf-8", "utf8"):
        return "utf-8"
    if name.lower() == "base64":
        return "base64"
    raise WorkspaceError(f"encoding {name!r} is not known: use utf-8 or base64.")


def _blocks(fd: int, most: int) -> Iterator[bytes]:
    """Yield the content of a file in blocks, up to `most` bytes."""
    offset = 0
    while offset < most and (data := os.pread(fd, min(_BLOCK, most - offset), offset)):
        yield data
        offset += len(data)


def _text_pieces(fd: int, most: int, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    for data in _blocks(fd, most):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)
