"""Compare the outputs of a cell with those of an earlier run, and return the first difference.

Outputs are those of nbformat. Their values are untrusted: pictures are inflated within bounds, and
never decoded.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

from kernel_mcp.output.images import raster_of
from kernel_mcp.records import dataclass
from kernel_mcp.verification.clock import Run
from kernel_mcp.verification.identifiers import without_identifiers
from kernel_mcp.verification.rows import differing_row, floats_equal, shown

_IGNORED = ("application/vnd.jupyter.widget-view+json",)
"""Types whose values are numbers of models that each kernel draws by chance."""
_MARKUP = ("text/html", "image/svg+xml")
_PICTURE = "image/png"
_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs of a cell.

    kind           `stdout`, `stderr`, `error`, `outputs` (other ones) or a MIME type
    row, column    place in the text from 1; 0 where a value has no rows
    before, after  what differs, at most 60 characters each; empty for nothing
    more           number of further rows or values that differ
    """

    kind: str
    row: int
    column: int
    before: str
    after: str
    more: int


def first_difference(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], was: Run, now: Run
) -> Difference | None:
    """Return the first difference of two lists of outputs; None if there is none. Blocking.

    `was` and `now` are the runs, whose times and pids do not count. Texts of both streams are
    compared for themselves, then displays, results and errors in their order. Of errors the name
    and the value count, of others neither metadata nor execution counts.
    """
    found = [*_differences(before, after, was, now)]
    if not found:
        return None
    first = found[0]
    more = first.more + sum(1 + each.more for each in found[1:])
    return Difference(first.kind, first.row, first.column, first.before, first.after, more)


def values_differ(before: object, after: object) -> bool:
    """Return True if two JSON values differ, but for floats within 1e-9 of each other."""
    return next(_json("", before, after), None) is not None


def _differences(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], was: Run, now: Run
) -> Iterator[Difference]:
    for name in _STREAMS:
        yield from _text(name, _stream(before, name), _stream(after, name), was, now)
    ones, others = _shown_values(before), _shown_values(after)
    for one, other in zip_longest(ones, others):
        if one is None or other is None:
            yield Difference("outputs", 0, 0, _named(one), _named(other), 0)
            continue
        if one.keys() != other.keys():
            was_kinds, now_kinds = (shown(", ".join(sorted(each))) for each in (one, other))
            yield Difference("outputs", 0, 0, was_kinds, now_kinds, 0)
            continue
        for kind in sorted(one):
            yield from _value(kind, one[kind], other[kind], was, now)


def _stream(outputs: Sequence[Mapping[str, Any]], name: str) -> str:
    return "".join(
        _joined(each.get("text"))
        for each in outputs
        if each.get("output_type") == "stream" and each.get("name") == name
    )


def _shown_values(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of each output by their kind, without those of streams."""
    found: list[dict[str, Any]] = []
    for each in outputs:
        if each.get("output_type") == "error":
            name, text = (_joined(each.get(part, "")) for part in ("ename", "evalue"))
            found.append({"error": f"{name}: {text}"})
        elif each.get("output_type") != "stream":
            data = each.get("data")
            found.append(_originals(data) if isinstance(data, Mapping) else {})
    return found


def _originals(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bundle without the picture that the kernel draws of a drawing, chart or page.

    It draws for a limited time, so on a busy machine the picture may be missing.
    """
    has_other = data.keys() - {_PICTURE, "text/plain"}
    return {mime: value for mime, value in data.items() if mime != _PICTURE or not has_other}


def _named(value: Mapping[str, Any] | None) -> str:
    """Name an output: its plain text if it has one, else its types; empty for none."""
    if value is None:
        return ""
    text = value.get("text/plain", value.get("error"))
    return shown(", ".join(sorted(value)) if text is None else _joined(text))


def _value(kind: str, one: object, other: object, was: Run, now: Run) -> Iterator[Difference]:
    if kind in _IGNORED:
        return
    is_json = kind.startswith("application/") and kind.endswith("json")
    if is_json or not (_is_text(one) and _is_text(other)):
        yield from _json(kind, one, other)
        return
    before, after = _joined(one), _joined(other)
    if before == after:
        return
    if kind.startswith("image/") and kind not in _MARKUP:
        if (raster := _raster(before)) is None or raster != _raster(after):
            sizes = [f"a picture of {len(each) * 3 // 4:,} bytes" for each in (before, after)]
            yield Difference(kind, 0, 0, sizes[0], sizes[1], 0)
        return
    if kind in _MARKUP:
        before, after = without_identifiers(before, after)
    yield from _text(kind, before, after, was, now)


def _text(kind: str, before: str, after: str, was: Run, now: Run) -> Iterator[Difference]:
    if found := differing_row(before, after, was, now):
        yield Difference(kind, found.row, found.column, found.before, found.after, found.more)


def _raster(text: str) -> object:
    try:
        return raster_of(binascii.a2b_base64(text))
    except (binascii.Error, ValueError):
        return None


def _json(kind: str, before: object, after: object) -> Iterator[Difference]:
    """Yield the differences of two JSON values, without recursion."""
    pairs = [(before, after)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other):
            pairs += [(one[key], other[key]) for key in reversed(one)]
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs += zip(reversed(one), reversed(other), strict=True)
        elif not _scalars_equal(one, other):
            yield Difference(kind, 0, 0, _brief(one), _brief(other), 0)


def _brief(value: object) -> str:
    """Return a JSON value as text; the number of its values if it has several."""
    return f"{len(value)} values" if isinstance(value, (Mapping, list)) else shown(str(value))


def _scalars_equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return floats_equal(one, other)
    return type(one) is type(other) and one == other


def _is_text(value: object) -> bool:
    """Return True for a text of nbformat, which may be a list of lines."""
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return isinstance(value, str)


def _joined(value: object) -> str:
    """Return a text of nbformat; of another value a few words."""
    if not _is_text(value):
        return _brief(value)
    return value if isinstance(value, str) else "".join(cast("list[str]", value))
