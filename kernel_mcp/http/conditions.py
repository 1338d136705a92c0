"""What the headers of a request about a file ask for (RFC 9110): which state of it, which part."""

from __future__ import annotations

import re
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote

from starlette.requests import Request

from kernel_mcp.http.transfers import Failed

_TAG = re.compile(r'(W/)?"([^"]*)"')
_POSITION_DIGITS = 18
"""Digits of a position in a range; no file has that many bytes."""
_UNSAFE = re.compile(r'[^\x20-\x7e]|["\\%/]')


def quoted(tag: str) -> str:
    """A `tag_of` a file as an ETag."""
    return f'"{tag}"'


def permitted(request: Request, tag: str) -> bool:
    """Whether a file with this tag, or none, may be changed: `If-Match`, `If-None-Match`."""
    match, none = _listed(request, "if-match"), _listed(request, "if-none-match")
    if match is not None and not _among(tag, match, weak=False):
        return False
    return none is None or not _among(tag, none, weak=True)


def unchanged(request: Request, tag: str, modified: float) -> bool:
    """Whether the client has this state of a file already. Raises Failed when it wants another."""
    match, none = _listed(request, "if-match"), _listed(request, "if-none-match")
    if match is not None and not _among(tag, match, weak=False):
        raise Failed(412, "The file is not as the request expects it.", {"etag": quoted(tag)})
    if none is not None:
        return _among(tag, none, weak=True)
    try:
        since = parsedate_to_datetime(request.headers.get("if-modified-since", ""))
        return int(modified) <= since.timestamp()
    except (ValueError, OverflowError):
        return False


def _listed(request: Request, name: str) -> str | None:
    found = request.headers.getlist(name)
    return ",".join(found) if found else None


def _among(tag: str, listed: str, *, weak: bool) -> bool:
    """Whether a list of ETags holds this one; `*` stands for any file."""
    if listed.strip() == "*":
        return bool(tag)
    return any(
        each["tag"] == tag and (weak or not each["weak"])
        for found in _TAG.finditer(listed)
        for each in [{"weak": found[1], "tag": found[2]}]
    )


def part_of(request: Request, tag: str, size: int) -> tuple[int, int] | None:
    """First byte and number of bytes that `Range` asks for; None for all. Raises Failed.

    Several ranges, and one of another state of the file, are answered with the whole.
    """
    found = _positions(request.headers.get("range", ""))
    condition = request.headers.get("if-range", "").strip()
    if request.method != "GET" or found is None:
        return None
    if condition and condition != quoted(tag):
        return None
    begin, end = found
    if not begin:
        count = min(int(end), size)
        first, last = size - count, size - 1
    else:
        first, last = int(begin), min(int(end or size), size - 1)
        if end and int(end) < first:
            return None
    if first >= size or last < first:
        raise Failed(
            416,
            f"The file has {size:,} bytes; none of them are in this range.",
            {"content-range": f"bytes */{size}", "etag": quoted(tag)},
        )
    return first, last + 1 - first


def _positions(header: str) -> tuple[str, str] | None:
    """Return the digits of both positions of one range of bytes, None for another header.

    One of them may be empty.
    """
    unit, _, range_ = header.partition("=")
    begin, dash, end = range_.partition("-")
    begin, end = begin.strip(), end.strip()
    if unit.strip().lower() != "bytes" or not dash or not (begin or end):
        return None
    numbers = [each for each in (begin, end) if each]
    fit = all(len(n) <= _POSITION_DIGITS and n.isascii() and n.isdigit() for n in numbers)
    return (begin, end) if fit else None


def date(seconds: float) -> str:
    """A time as headers have it."""
    return formatdate(max(0.0, seconds), usegmt=True)


def attachment(name: str) -> str:
    """A `Content-Disposition` with any name (RFC 6266, RFC 8187)."""
    plain = _UNSAFE.sub("_", name) or "file"
    if plain == name:
        return f'attachment; filename="{plain}"'
    clean = re.sub(r"[\x00-\x1f\x7f/\\]", "_", name)
    encoded = quote(clean.encode("utf-8", "replace"), safe="!#$&+-.^_`|~")
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}"
