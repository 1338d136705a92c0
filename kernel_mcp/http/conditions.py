"""Conditional and range headers of requests for files, and related ones (RFC 9110)."""

from __future__ import annotations

import re
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote

from starlette.requests import Request

from kernel_mcp.http.transfers import RequestFailed

_TAG = re.compile(r'(W/)?"([^"]*)"')
_POSITION_DIGITS = 18
"""Most digits of a position in a range; no file needs more."""
_UNSAFE = re.compile(r'[^\x20-\x7e]|["\\%/]')


def quoted(tag: str) -> str:
    """Return a tag of `files.streams.tag_of` as the value of an ETag header."""
    return f'"{tag}"'


def permitted(request: Request, tag: str) -> bool:
    """Return True if `If-Match` and `If-None-Match` permit a change of the file.

    `tag` is empty if there is no file.
    """
    match, none = _listed(request, "if-match"), _listed(request, "if-none-match")
    if match is not None and not _among(tag, match, weak=False):
        return False
    return none is None or not _among(tag, none, weak=True)


def unchanged(request: Request, tag: str, modified: float) -> bool:
    """Return True if the client already has this version of the file (304).

    `modified` is in seconds since the epoch. Raises RequestFailed (412) if `If-Match` does not
    match.
    """
    match, none = _listed(request, "if-match"), _listed(request, "if-none-match")
    if match is not None and not _among(tag, match, weak=False):
        raise RequestFailed(
            412, "The file is not as the request expects it.", {"etag": quoted(tag)}
        )
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
    """Return True if a list of ETags contains `tag`; `*` matches any file that exists.

    Without `weak`, weak ETags never match.
    """
    if listed.strip() == "*":
        return bool(tag)
    return any(
        each["tag"] == tag and (weak or not each["weak"])
        for found in _TAG.finditer(listed)
        for each in [{"weak": found[1], "tag": found[2]}]
    )


def part_of(request: Request, tag: str, size: int) -> tuple[int, int] | None:
    """Return the offset and number of bytes that `Range` names, or None for the whole file.

    Several ranges, and a range of another version (`If-Range`), are answered with the whole file.
    Raises RequestFailed (416) if the range is beyond the file.
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
        raise RequestFailed(
            416,
            f"The file has {size:,} bytes; none of them are in this range.",
            {"content-range": f"bytes */{size}", "etag": quoted(tag)},
        )
    return first, last + 1 - first


def _positions(header: str) -> tuple[str, str] | None:
    """Return both positions of a single byte range as digits, or None for another header.

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
    """Return a time in seconds since the epoch as an HTTP date."""
    return formatdate(max(0.0, seconds), usegmt=True)


def attachment(name: str) -> str:
    """Return a `Content-Disposition` header for any file name (RFC 6266, RFC 8187)."""
    plain = _UNSAFE.sub("_", name) or "file"
    if plain == name:
        return f'attachment; filename="{plain}"'
    clean = re.sub(r"[\x00-\x1f\x7f/\\]", "_", name)
    encoded = quote(clean.encode("utf-8", "replace"), safe="!#$&+-.^_`|~")
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}"
