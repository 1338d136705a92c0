"""Values behind escapes and in base64, in whole texts and in streams."""

from __future__ import annotations

import base64
import html
import json
import quopri
import string
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_mcp.output.text import Masks

WORD = "[TOKEN masked]"


def each(form: str) -> Callable[[str], str]:
    return lambda value: "".join(
        char if char.isalnum() else form.format(ord(char)) for char in value
    )


WAYS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "decimal entities": each("&#{0};"),
    "hexadecimal entities": each("&#x{0:X};"),
    "named entities": lambda value: value.replace("+", "&plus;").replace("=", "&equals;"),
    "escapes of JavaScript": each("\\u{0:04x}"),
    "short ones": each("\\x{0:02X}"),
    "all escaped": lambda value: "".join(f"\\u{ord(char):04x}" for char in value),
    "percent": each("%{0:02x}"),
    "percent twice": lambda value: quote(quote(value, safe=""), safe=""),
    "entities in JSON": lambda value: json.dumps(each("&#{0};")(value))[1:-1],
    "entities of URLs": lambda value: html.escape(quote(value, safe="")),
    "mail": lambda value: quopri.encodestring(value.encode()).decode(),
    "base64": lambda value: base64.b64encode(b"x" + value.encode() + b"y").decode(),
    "base64 in lines": lambda value: base64.encodebytes(b"x" * 50 + value.encode()).decode(),
    "base64 for URLs": lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
}
VALUES = st.text(
    st.sampled_from(string.ascii_letters + string.digits + "+/=-_."), min_size=12, max_size=40
)


@pytest.mark.parametrize("way", WAYS)
@given(value=VALUES)
@settings(max_examples=30)
def test_a_value_is_masked_however_it_is_written(way: str, value: str) -> None:
    text = f"before {WAYS[way](value)} after"
    masks = Masks([("TOKEN", value)])
    shown = masks.masked(text)
    assert shown.startswith("before ")
    assert WORD in shown
    assert shown.endswith(" after")
    if way.startswith(("as it", "base64")):  # in a stream, too, where enough of it waits
        written = WAYS[way](value)
        cut = text.index(written) + (written.find("\n") + 1 or len(written) // 2)
        assert WORD in "".join(masks.pieces([text[:cut], text[cut:]]))


def test_what_is_around_a_value_stays() -> None:
    masks = Masks([("TOKEN", "s3cr3t+token/")])
    text = "a%20b &amp; c\\n&#x2F;s3cr3t&#43;token%2F\n  next \\u0041"
    assert masks.masked(text) == f"a%20b &amp; c\\n&#x2F;{WORD}\n  next \\u0041"


@pytest.mark.parametrize(
    "part", ["&#65;", "\\\\", "%2541", "=41", "&amp;", "\n", "a\n  ", "&", "="]
)
def test_escapes_take_linear_time(part: str) -> None:
    masks = Masks([("TOKEN", "s3cr3t+token/" * 4)])

    def spent(text: str) -> float:
        began = time.process_time()
        assert masks.masked(text) == text
        return time.process_time() - began

    text = part * (100_000 // len(part))
    once = max(spent(text) for _ in range(3))
    assert min(spent(text * 10) for _ in range(2)) < 20 * once


@given(text=st.text(max_size=200))
def test_other_texts_stay(text: str) -> None:
    masks = Masks([("TOKEN", "s3cr3t+token/" * 4)])
    assert masks.masked(text) == "".join(masks.pieces([text[:50], text[50:]])) == text
