from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.output.bundles import (
    MAX_TYPES,
    BundleStore,
    bounded_metadata,
    embedded,
    extension,
    primary,
    readable,
)

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30_000)).decode()


def shelf_in(folder: Path, **limits: int) -> BundleStore:
    defaults = {"bundle_bytes": 50_000, "memory_bytes": 100_000, "disk_bytes": 200_000}
    return BundleStore(folder, 7, **(defaults | limits))


def text_of(data: dict[str, Any], folder: Path) -> str:
    return readable(shelf_in(folder).put(1, data), 1000).joined()


def test_small_bundles_stay_in_memory(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "cells")
    parts = shelf.put(1, {"text/plain": "x", "text/html": "<b>x</b>"})
    assert {part.mime: part.read() for part in parts} == {
        "text/plain": "x",
        "text/html": "<b>x</b>",
    }
    assert not (tmp_path / "cells").exists()


def test_large_values_become_files_with_their_decoded_bytes(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path, bundle_bytes=10_000)
    parts = shelf.put(3, {"text/plain": "<Figure>", "image/png": PNG})
    picture = primary(parts)
    assert picture is not None
    assert picture.path == tmp_path / "7-3.png"
    assert picture.data() == base64.b64decode(PNG) == picture.path.read_bytes()
    assert picture.read() == PNG
    assert next(part for part in parts if part.mime == "text/plain").text == "<Figure>"
    assert shelf.on_disk == len(picture.data())


def test_memory_of_all_bundles_together_is_bounded(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    for number in range(10):
        shelf.put(number, {"text/html": "x" * 30_000})
    assert shelf.in_memory <= 100_000
    assert shelf.on_disk <= 200_000


def test_what_exceeds_the_disk_budget_is_dropped_and_says_so(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path, disk_bytes=10)
    (part,) = shelf.put(1, {"text/html": "x" * 60_000})
    assert part.size == 60_000
    assert part.problem == "too large to be kept"
    assert part.read() == ""
    with pytest.raises(ValueError, match="too large"):
        part.data()
    assert not list(tmp_path.iterdir())


def test_settled_values_are_the_same_from_their_files(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    value = {"rows": list(range(5000)), "half": "\ud800"}
    parts = shelf.put(1, {"application/json": value, "text/plain": "x"})
    settled = shelf.move_to_files(1, parts)
    assert shelf.in_memory == 1
    assert (tmp_path / "7-1.json").exists()
    by_type = {part.mime: part for part in settled}
    assert json.loads(by_type["application/json"].read())["rows"] == value["rows"]


def test_very_many_small_values_do_not_stay_in_memory(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path, memory_bytes=10_000_000, disk_bytes=10_000_000)
    kept = [shelf.put(number, {"text/html": "x" * 8000}) for number in range(200)]
    settled = [shelf.move_to_files(number, parts) for number, parts in enumerate(kept)]
    assert shelf.in_memory <= 256 * 1024
    assert all(parts[0].read() == "x" * 8000 for parts in settled)


def test_dropping_gives_back_memory_and_files(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    first = shelf.put(1, {"text/html": "x" * 20_000})
    second = shelf.move_to_files(2, shelf.put(2, {"text/html": "y" * 20_000}))
    shelf.drop(first)
    shelf.drop(second)
    assert (shelf.in_memory, shelf.on_disk) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_two_types_with_one_ending_get_files_of_their_own(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path, bundle_bytes=0)
    value = "x" * 10_000
    parts = shelf.put(
        1, {"application/vnd.plotly.v1+json": [value], "application/vnd.vega.v5+json": [value]}
    )
    assert len({part.path for part in parts}) == 2


def test_wrong_base64_is_named_when_it_is_read(tmp_path: Path) -> None:
    (part,) = shelf_in(tmp_path).put(1, {"image/png": "!!!"})
    with pytest.raises(ValueError, match="not valid base64"):
        part.data()
    (part,) = shelf_in(tmp_path, bundle_bytes=0).put(1, {"image/png": "!" * 10_000})
    assert "not valid base64" in part.problem


def test_hostile_bundles_are_bounded(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    data: dict[str, Any] = {f"text/x{number}": "v" for number in range(10_000)}
    data = {"../../etc/passwd": "v", "no type": "v", "application/json": nested} | data
    parts = shelf_in(tmp_path).put(1, data)
    assert len(parts) == MAX_TYPES
    assert all("/" in part.mime and ".." not in part.mime for part in parts)
    assert bounded_metadata({"k": nested}) == {}
    assert bounded_metadata({"k": "v" * 100_000}) == {}
    assert bounded_metadata({"isolated": True}) == {"isolated": True}
    while nested:  # unwound here: freeing it at once would recurse
        nested = nested[0]


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"text/plain": "   a\n0  1", "text/html": "<table>"}, "   a\n0  1"),
        ({"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>Hi</b>"}, "Hi"),
        ({"text/plain": "<IPython.core.display.Markdown object>", "text/markdown": "# T"}, "# T"),
        ({"text/latex": "$x^2$"}, "$x^2$"),
        ({"application/json": {"a": [1, "é"]}}, '{"a": [1, "é"]}'),
        ({"text/plain": "<Figure size 640x480 with 1 Axes>", "image/png": PNG}, ""),
        ({"image/svg+xml": "<svg/>"}, "[image/svg+xml, 6 characters]"),
        ({"image/svg+xml": "<?xml?><svg id='a'><style>x</style><text>Hi</text></svg>"}, "Hi"),
        (
            {"text/plain": "<pandas.io.formats.style.Styler at 0x7f26>", "text/html": "<p>1.00"},
            "1.00",
        ),
        (
            {"text/plain": "<a.IFrame at 0x7f>", "text/html": "<iframe src='https://x/y'>"},
            "[HTML without words, 26 characters: iframe https://x/y]",
        ),
        ({"text/html": "<svg></svg>", "image/png": PNG}, ""),
        ({"text/plain": "<x.GeoJSON object>", "application/geo+json": {"a": 1}}, '{"a": 1}'),
        (
            {"text/plain": "<x.Javascript object>", "application/javascript": "f()" * 6000},
            "[JavaScript, 18,000 characters, which is not run here]",
        ),
        (
            {"application/javascript": "f()", "application/vnd.holoviews_load.v0+json": "f()"},
            "[JavaScript, 3 characters, which is not run here]",
        ),
        ({"text/plain": "<Table>", "text/html": "<table><tr><td>1<td>2</table>"}, "1 | 2"),
        (
            {
                "text/plain": "Shiny tags cannot be represented in plain text (need html)",
                "text/html": "<p>words</p>",
            },
            "words",
        ),
        ({"text/plain": "<class 'a.SimpleTable'>", "text/html": "<p>R2"}, "R2"),
        ({"text/plain": " \n", "text/html": "<p>words"}, "words"),
        ({"text/plain": "x " * 8500, "text/html": "<table><tr><td>1<td>2</table>"}, "1 | 2"),
        ({"text/plain": "x " * 8500, "text/html": "<TABLE><tr><td>one"}, "one"),
        ({"text/plain": "<Own: 3 rows>", "application/x-own": "abc"}, "<Own: 3 rows>"),
        ({"text/plain": "<Own>\nrows", "text/html": "<p>x"}, "<Own>\nrows"),
        ({"application/x-own": "abc"}, "[application/x-own, 3 characters]"),
        ({"text/plain": "\x1b[31mred\x1b[0m \u202e"}, "red \\u202e"),
        (
            {"text/plain": "<IPython.core.display.HTML object>"},
            "<IPython.core.display.HTML object>",
        ),
        ({}, ""),
    ],
)
def test_the_readable_form_is_what_tells_a_reader_most(
    tmp_path: Path, data: dict[str, Any], shown: str
) -> None:
    assert text_of(data, tmp_path) == shown


def test_pictures_of_a_page_are_found_up_to_a_bound_and_the_others_named(tmp_path: Path) -> None:
    page = "".join(f"<img src='data:image/png;base64,AAA{n}' alt='plot {n}'>" for n in range(10))
    parts = shelf_in(tmp_path).put(1, {"text/html": page})
    found, remark = embedded(parts)
    assert [part.text for part in found] == [f"AAA{n}" for n in range(8)]
    assert "2 more pictures" in remark
    assert "plot 8" in remark
    assert "plot 9" in remark
    drawing = {"text/html": "<img src='data:image/svg+xml;base64,PHN2Zy8+'>"}
    assert "image/svg+xml" in embedded(shelf_in(tmp_path).put(2, drawing))[1]


def test_pictures_of_a_page_are_no_others_than_that_of_its_bundle(tmp_path: Path) -> None:
    page = f"<img src='data:image/png;base64,{PNG}'><img src='data:image/png;base64,AAAA'>"
    shelf = shelf_in(tmp_path)
    found, _ = embedded(shelf.put(1, {"text/html": page, "image/png": PNG}))
    assert [part.text for part in found] == ["AAAA"]
    assert embedded(shelf.put(2, {"text/html": page, "image/png": "BBBB"})) == ([], "")
    words = "<IPython.core.display.HTML object>"
    scaled = {"text/html": page, "image/png": "BBBB", "text/plain": words}
    assert [part.text for part in embedded(shelf.put(3, scaled))[0]] == [PNG, "AAAA"]


def test_a_long_readable_form_keeps_both_ends(tmp_path: Path) -> None:
    text = "begin" + "x" * 5000 + "end"
    ends = readable(shelf_in(tmp_path).put(1, {"text/plain": text}), 100)
    assert ends.head.startswith("begin")
    assert ends.tail.endswith("end")
    assert len(ends.head) + ends.omitted + len(ends.tail) == len(text)


def test_file_endings_follow_the_type() -> None:
    assert extension("image/png") == "png"
    assert extension("application/vnd.plotly.v1+json") == "json"
    assert extension("video/mp4") == "bin"
    assert extension("text/x-own") == "txt"
