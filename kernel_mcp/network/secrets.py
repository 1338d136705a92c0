"""Values that code may use and never read: placeholders of theirs, and the search in replies."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

PREFIX = "kmcp_"
"""What all placeholders begin with; nothing in them is changed by URLs, JSON or quotes."""
_LETTERS = string.ascii_letters + string.digits

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Secret:
    """One value for one header of requests to one host; code knows its `placeholder`.

    The value is text of visible ASCII, and stays out of what is shown of this.
    """

    name: str
    host: str
    header: str
    value: str = field(repr=False)
    placeholder: str

    def to_json(self) -> list[str]:
        """For the proxy, by its own socket and nothing else."""
        return [self.name, self.host, self.header, self.value, self.placeholder]

    def fill(self, name: bytes, text: bytes) -> bytes:
        """The content of a header as the host gets it: as it was, except for this one's header."""
        if name.lower() != self.header.lower().encode():
            return text
        scheme, blank, rest = text.partition(b" ")
        if scheme.lower() == b"basic":
            return scheme + blank + self._fill_basic(rest)
        return self._filled(text)

    def _filled(self, text: bytes) -> bytes:
        return text.replace(self.placeholder.encode(), self.value.encode())

    def _fill_basic(self, text: bytes) -> bytes:
        """User and password, as base64 (RFC 7617)."""
        try:
            plain = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            return text
        return base64.b64encode(self._filled(plain))


def placeholder(length: int, taken: Iterable[str] = ()) -> str:
    """One of that many characters, as Content-Length may count it; none of `taken`."""
    while True:
        made = PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(length - len(PREFIX)))
        if made not in taken:
            return made


def forms(value: str) -> tuple[bytes, ...]:
    """What hosts commonly make of a value: literal, for URLs, for JSON, in base64 of any text."""
    plain = value.encode()
    quoted = [quote(value, safe=safe) for safe in ("", "/")]
    in_json = json.dumps(value)[1:-1]
    found = {
        plain,
        *(each.encode() for each in quoted),
        *(_lower_escapes(each).encode() for each in quoted),
        in_json.encode(),
        in_json.replace("/", "\\/").encode(),
    }
    for before in range(3):
        bits = 8 * (before + len(plain))
        encoded = base64.b64encode(bytes(before) + plain)
        # whole characters only: those at both ends depend on what is next to it
        part = encoded[-(-8 * before // 6) : bits // 6]
        found |= {part, part.translate(bytes.maketrans(b"+/", b"-_"))}
    return tuple(sorted(found))


def _lower_escapes(text: str) -> str:
    first, *rest = text.split("%")
    return "%".join([first, *(each[:2].lower() + each[2:] for each in rest)])


class Found(Exception):
    """A reply held what is told to nobody; the text is the name of the secret."""


class Scan:
    """Searches one reply as it comes; what may be the beginning of a value is held back.

    `feed` returns what can be passed on. Both methods raise Found.
    """

    def __init__(self, sought: Sequence[tuple[str, bytes]]) -> None:
        """`sought` are forms, each after the name of its secret."""
        self._sought = sought
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the reply."""
        text = self._held + data
        for name, form in self._sought:
            if form in text:
                self._held = b""
                raise Found(name)
        kept = max((_overlap(text, form) for _, form in self._sought), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> bytes:
        """What was held back of a reply that has ended."""
        held, self._held = self._held, b""
        return held


def _overlap(text: bytes, form: bytes) -> int:
    """How many last bytes of `text` may be the first of `form`, and not all of it."""
    # the first byte of a form, found from the left: the longest beginning comes first
    start = text.find(form[0], max(0, len(text) - len(form) + 1))
    while start >= 0:
        if form.startswith(text[start:]):
            return len(text) - start
        start = text.find(form[0], start + 1)
    return 0


def sought(found: Iterable[Secret]) -> list[tuple[str, bytes]]:
    """What `Scan` looks for."""
    return [(each.name, form) for each in found for form in forms(each.value)]
