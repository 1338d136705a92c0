"""The encoding of text is guessed by the letters of languages, also where these are few."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.files.encodings import foreign_encodings

_SECTIONS = Path(__file__).with_name("encodings.txt").read_text().split("### ")[1:]
TEXTS = {name: text.replace("\n", " ") for name, _, text in (s.partition("\n") for s in _SECTIONS)}
"""By encoding and language."""
CHARS = 120
"""Of a part that is long enough to be sure of."""


@pytest.mark.parametrize("name", TEXTS)
def test_each_part_of_a_text_is_read_as_it_was_written(name: str) -> None:
    text, (encoding, _) = TEXTS[name], name.split()
    parts = [text, *(text[start : start + CHARS] for start in range(0, len(text) - CHARS + 1, 7))]
    wrong = [part for part in parts if _read(part.encode(encoding)) != part]
    assert not wrong


def _read(data: bytes) -> str:
    found = foreign_encodings(data)
    return data.decode(found[0] if found else "utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Verbrauch: 12 m³, Preis 3 € je m², siehe Müller¹", "cp1252"),
        ("See Smith¹, Jones² and Miller³ for ½ of this", "latin-1"),
        ("Kwota: 120 zł, płatność do piątku", "cp1250"),
        ("Il a dû partir en août, été compris", "latin-1"),
        ("São Paulo põe à mesa o pão", "latin-1"),
        ("örülök, hogy eljött, ő is itt van", "cp1250"),
    ],
)
def test_symbols_are_told_from_letters(text: str, encoding: str) -> None:
    assert foreign_encodings(text.encode(encoding)) == [encoding]
