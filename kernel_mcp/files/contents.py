"""What is in a file that is open: lines of text or all its bytes, and how callers encode them.

The file may change or grow while it is read.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import os
from collections.abc import Iterator

from kernel_mcp.config.settings import KIB, MIB
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import complaints
from kernel_mcp.files.paging import Page, page_of

SCAN_BYTES = 256 * MIB
"""Largest text file of which lines are read."""
_BLOCK = 256 * KIB


def lines_of(
    fd: int, info: os.stat_result, path: str, offset: int, limit: int, characters: int
) -> Page:
    """Lines of a UTF-8 text as `page_of` counts them. Raises WorkspaceError."""
    if info.st_size > SCAN_BYTES:
        raise WorkspaceError(
            f"{path!r} has {info.st_size:,} bytes, too many to page through. Read the part "
            "you need with code."
        )
    try:
        page = page_of(
            _text_pieces(fd, SCAN_BYTES), offset=offset, limit=limit, characters=characters
        )
    except UnicodeDecodeError as error:
        raise complaints.not_utf8(path, "") from error
    if offset and offset >= page.total:
        raise WorkspaceError(f"{path!r} has {page.total:,} lines; offset {offset:,} is after it.")
    return page


def bytes_of(fd: int, info: os.stat_result, path: str, most: int, resource: int) -> bytes:
    """The whole file. Raises WorkspaceError when it has more than `most` bytes.

    Up to `resource` bytes can be read as a resource, which the error says.
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


def decoded(content: str, encoding: str) -> bytes:
    """The bytes of what a caller wrote in `encoding`. Raises WorkspaceError."""
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
    """utf-8 or base64, from any way to write it. Raises WorkspaceError for all else."""
    if name.lower() in ("utf-8", "utf8"):
        return "utf-8"
    if name.lower() == "base64":
        return "base64"
    raise WorkspaceError(f"encoding {name!r} is not known: use utf-8 or base64.")


def _blocks(fd: int, most: int) -> Iterator[bytes]:
    """What a file holds, up to `most` bytes."""
    offset = 0
    while offset < most and (data := os.pread(fd, min(_BLOCK, most - offset), offset)):
        yield data
        offset += len(data)


def _text_pieces(fd: int, most: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for data in _blocks(fd, most):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)
