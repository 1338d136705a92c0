"""Mask identifiers of HTML and SVG that libraries draw by chance for each display."""

from __future__ import annotations

import re
from collections.abc import Iterator

_DRAWN = re.compile(
    r"T_[0-9a-f]{5}(?![0-9a-f])"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|[0-9a-f]{32}"
    r"|[mph][0-9a-f]{10}(?![0-9a-f])"
    r"|sk-(?:container|estimator)-id-[0-9]{1,6}"
)
"""Of pandas' Styler, plotly and xarray, altair, SVG of matplotlib, scikit-learn."""
_RAW = ("script", "style")
_NEAR_CHARS = 64
"""Characters of an attribute's value before an identifier."""


def without_identifiers(*documents: str) -> list[str]:
    """Return documents in which drawn identifiers are numbers, in the order of their elements.

    An identifier counts if an attribute `id` has it. It is replaced in tags, scripts and styles,
    and stays in texts, which readers see.
    """
    return [_without(each) for each in documents]


def _without(source: str) -> str:
    if 'id="' not in source and "id='" not in source:
        return source
    parts = [*_parts(source)]
    numbers: dict[str, str] = {}
    for text, is_tag in parts:
        for found in _DRAWN.finditer(text) if is_tag else ():
            if found[0] not in numbers and _names_element(text, found.start()):
                numbers[found[0]] = f"#{len(numbers)}"
    return "".join(
        _DRAWN.sub(lambda found: numbers.get(found[0], found[0]), text) if is_tag else text
        for text, is_tag in parts
    )


def _parts(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a document and, with True, its tags, scripts and styles."""
    at = 0
    while (start := source.find("<", at)) >= 0:
        yield source[at:start], False
        at = source.find(">", start) + 1 or len(source)
        name = source[start + 1 : start + 7].lower()
        raw = next((each for each in _RAW if name.startswith(each)), "")
        if raw:
            ended = source.find(f"</{raw}", at)
            at = len(source) if ended < 0 else ended
        yield source[start:at], True
    yield source[at:], False


def _names_element(tag: str, place: int) -> bool:
    """Return True if the text at `place` is in a value of an attribute `id`."""
    near = max(0, place - _NEAR_CHARS)
    start = max(tag.rfind(f" id={quote}", near, place) for quote in "\"'")
    value = tag[start + len(" id=") : place]
    return start >= 0 and value[:1] not in value[1:]
