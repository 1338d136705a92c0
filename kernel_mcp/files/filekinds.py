"""What a file is, from its first bytes and its name."""

from __future__ import annotations

import codecs
import mimetypes

from kernel_mcp.output.images import sniff

PROBE_BYTES = 8 * 1024
"""How much of a file the functions here want to see."""

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
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\b\x1b")


def foreign_encoding(head: bytes) -> str | None:
    """The likely encoding of text that is not UTF-8; None for UTF-8 and for what is no text."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    if is_text(head) or b"\0" in head or sniff(head) or binary_kind(head):
        return None
    odd = sum(byte < 32 and byte not in _TEXT_CONTROLS for byte in head)
    high = sum(byte >= 128 for byte in head)
    return "latin-1" if odd == 0 and high * 3 <= len(head) else None


def is_text(head: bytes) -> bool:
    """Whether `head` begins a UTF-8 text; an incomplete character at its end is fine."""
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def binary_kind(head: bytes) -> str | None:
    """What binary data is, in words, if its first bytes tell."""
    return next((words for magic, words in _MAGIC if head.startswith(magic)), None)


def mime_of(path: str, head: bytes) -> str:
    """The MIME type of a file; pictures by their bytes, everything else by name."""
    if picture := sniff(head):
        return picture
    guessed, encoding = mimetypes.guess_type(path)
    if guessed and not encoding and not guessed.startswith("image/"):
        return guessed
    if guessed == "image/svg+xml":
        return guessed
    return "text/plain" if is_text(head) else "application/octet-stream"
