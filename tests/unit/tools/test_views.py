"""Outputs for the view of a cell: tables with their true counts, errors, pictures of pages."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from kernel_mcp.output.bundles import TABLE, representations
from kernel_mcp.output.items import DisplayItem, Failure, FailureItem
from kernel_mcp.tools.views import MOST_BYTES, MOST_ROWS, _drawn_item, _stated_rows


def drawn(data: dict[str, Any], left: int = MOST_BYTES) -> list[dict[str, Any]]:
    item = DisplayItem(1, 1, representations(data), {})
    return [output for output, _ in _drawn_item(item, left)]


def frame(rows: int, dots: str = "...", before: str = "", after: str = "") -> str:
    lines = [f"<tr><th>{n}</th><td>{n * n}</td></tr>" for n in range(rows)]
    if dots:
        lines.insert(rows // 2, f"<tr><th>{dots}</th><td>{dots}</td></tr>")
    head = "<thead><tr><th></th><th>a</th></tr></thead>"
    return f"<div>{before}<table>{head}<tbody>{''.join(lines)}</tbody></table>{after}</div>"


def test_rows_that_are_left_out_are_no_row_and_counted() -> None:
    page = frame(10, after="<p>300 rows &times; 1 columns</p>")
    assert drawn({"text/html": page, "text/plain": "x"}) == [
        {
            "kind": "table",
            "names": ["", "a"],
            "numeric": [True, True],
            "rows": [[str(n), str(n * n)] for n in range(10)],
            "gap": 5,
            "count": "10 of 300 rows",
            "left": "290 rows are left out here",
        }
    ]
    (polars,) = drawn({"text/html": frame(8, "&hellip;", "<small>shape: (1_200, 2)</small>")})
    assert (polars["count"], polars["gap"], len(polars["rows"])) == ("8 of 1200 rows", 4, 8)
    (untold,) = drawn({"text/html": frame(4)})
    assert (untold["count"], untold["gap"], untold["left"]) == ("4 of more rows", 2, "[…]")
    (whole,) = drawn({"text/html": frame(4, "")})
    assert (whole["count"], whole["gap"]) == ("4 rows", -1)


def test_the_longer_table_of_a_frame_is_shown() -> None:
    (table,) = drawn({"text/html": frame(10), TABLE: frame(300, ""), "text/plain": "x"})
    assert (table["count"], len(table["rows"])) == ("300 rows", 300)


def test_a_table_that_is_too_large_is_cut_after_a_row_and_tells_its_length() -> None:
    (table,) = drawn({"text/html": frame(2000, "")})
    assert (table["count"], table["gap"]) == ("500 of 2000 rows", MOST_ROWS)
    (table,) = drawn({"text/html": frame(400, "")}, 5000)
    assert 50 < len(table["rows"]) < 200
    assert table["count"] == f"{len(table['rows'])} of 400 rows"
    (table,) = drawn({"text/html": frame(30_000, "")})
    assert table["count"] == "500 of 30000 rows"


def test_names_of_several_rows_are_joined_over_their_columns() -> None:
    page = (
        "<table><thead><tr><th></th><th colspan=2>v</th></tr><tr><th></th><th>mean</th>"
        "<th>sum</th></tr><tr><th>city</th><th></th><th></th></tr></thead>"
        "<tr><th rowspan=2>A</th><td>1</td><td>2</td></tr><tr><td>3</td><td>4</td></tr></table>"
    )
    (table,) = drawn({"text/html": page})
    assert table["names"] == ["city", "v / mean", "v / sum"]
    assert table["rows"] == [["A", "1", "2"], ["A", "3", "4"]]


def test_all_tables_of_a_page_are_shown_with_the_words_between() -> None:
    table = "<table><tr><td>1<td>2</table>"
    found = drawn({"text/html": f"<h1>First</h1>{table}<p>between</p>{table}<p>after</p>"})
    assert [each["kind"] for each in found] == ["text", "table", "text", "table", "text"]
    assert [each.get("text") for each in found[::2]] == ["First", "between", "after"]
    assert found[1]["names"] == ["", ""]


def test_all_pictures_of_a_page_are_shown() -> None:
    written = io.BytesIO()
    Image.new("RGB", (3, 2)).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    page = f"<p>words</p><img src='data:image/png;base64,{data}'>" * 3
    found = drawn({"text/html": page, "image/png": data, "text/plain": "<HTML object>"})
    assert [each["kind"] for each in found] == ["image"] * 3 + ["text"]
    alone = drawn({"text/html": "<p>a", "image/png": data, "text/plain": "b"})
    assert [each["kind"] for each in alone] == ["image"]


def test_of_an_error_the_message_comes_first() -> None:
    traceback = ("-" * 75, "Cell In[1], line 1\n----> 1 f()\n", "KeyError: 'a'\nmore")
    ((error, _),) = _drawn_item(FailureItem(Failure("KeyError", "'a'", traceback)), MOST_BYTES)
    assert (error["kind"], error["text"]) == ("error", "KeyError: 'a'\nmore")
    assert "f()" in error["frames"]


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("300 rows \N{MULTIPLICATION SIGN} 2 columns", 300),
        ("shape: (1_000, 2)", 1000),
        ("shape: (7,)", 7),
        ("12 rows", 12),
        ("12 rows were changed", 0),
        ("shape: (x, 2)", 0),
        ("\N{SUPERSCRIPT TWO} rows", 0),
        ("", 0),
    ],
)
def test_only_a_count_of_rows_is_taken_for_one(line: str, rows: int) -> None:
    assert _stated_rows(line) == rows
