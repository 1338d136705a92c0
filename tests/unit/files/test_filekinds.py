from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.files.contents import binary_kind, foreign_encoding, is_text, mime_of


@pytest.mark.parametrize(
    ("path", "head", "mime"),
    [
        ("a.csv", b"a,b\n", "text/csv"),
        ("a.csv", b"\x89PNG\r\n\x1a\n", "image/png"),
        ("a.png", b"just text", "text/plain"),
        ("a.png", b"\0\1\2", "application/octet-stream"),
        ("a.svg", b"<svg/>", "image/svg+xml"),
        ("a", b"text", "text/plain"),
        ("a.json", b"{}", "application/json"),
    ],
)
def test_bytes_decide_about_pictures_and_names_about_the_rest(
    path: str, head: bytes, mime: str
) -> None:
    assert mime_of(path, head) == mime


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("Straße, Köln".encode("latin-1"), "latin-1"),
        ("text".encode("utf-16"), "utf-16"),
        ("text".encode("utf-32"), "utf-32"),
        ("Köln".encode(), None),
        (b"\x1f\x8b\x08" + bytes(range(128, 160)), None),
        (bytes(range(256)), None),
        (b"", None),
    ],
)
def test_text_in_other_encodings_is_recognised(head: bytes, encoding: str | None) -> None:
    assert foreign_encoding(head) == encoding


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.integers(0, 100))
def test_utf8_cut_anywhere_is_text(text: str, end: int) -> None:
    assert is_text(text.encode()[:end])


def test_known_binary_formats_are_named() -> None:
    assert binary_kind(b"PAR1rest") == "a Parquet file"
    assert binary_kind(b"unknown") is None
