"""Tables of HTML, as libraries write them: a value stays in its column."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.endpoints.plain import plain_data
from kernel_mcp.output.markup import MOST_DEPTH, html_to_text, read_html
from kernel_mcp.output.tables import MOST_FILLED

STYLE = """<style>#T td {}</style><table id="T"><thead>
<tr><th class="blank level0" >&nbsp;</th><th id="T_0" colspan="2">v</th><th>w</th></tr>
<tr><th class="blank level1" >&nbsp;</th><th>mean</th><th>sum</th><th>max</th></tr>
<tr><th class="index_name" >city</th><th>&nbsp;</th><th>&nbsp;</th><th>&nbsp;</th></tr>
</thead><tbody>
<tr><th id="T_r0">A</th><td>1.5</td><td>3</td><td>2</td></tr>
</tbody></table>"""
INDEX = """<table border="1"><thead><tr><th></th><th></th><th>n</th></tr></thead><tbody>
<tr><th rowspan="2" valign="top">A</th><th>2020</th><td>1</td></tr>
<tr><th>2021</th><td>2</td></tr>
<tr><th>B</th><th>2020</th><td>3</td></tr></tbody></table>"""


def lines(page: str) -> list[str]:
    return html_to_text(page, 256 * 1024).split("\n")


def test_a_name_that_spans_columns_is_over_each_of_them() -> None:
    assert lines(STYLE) == ["| v | v | w", "| mean | sum | max", "city | | |", "A | 1.5 | 3 | 2"]
    (grid,) = read_html(STYLE, 10_000).tables
    assert grid.heads == 3


def test_names_in_a_foot_are_no_heads() -> None:
    page = "<table><thead><tr><th>h<tfoot><tr><th>sum<tbody><tr><td>a</table>"
    (grid,) = read_html(page, 1000).tables
    assert (grid.heads, grid.rows()) == (1, [["h"], ["a"], ["sum"]])


def test_a_name_that_spans_rows_is_in_each_of_them() -> None:
    assert lines(INDEX) == ["| | n", "A | 2020 | 1", "A | 2021 | 2", "B | 2020 | 3"]


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ("<tr><td rowspan=2>a<td>b<td rowspan=2>c<tr><td>d<tr><td>e<td>f<td>g",
         ["a | b | c", "a | d | c", "e | f | g"]),
        ("<tr><td rowspan=2 colspan=2>a<td>b<tr><td>c<tr><td>d<td>e<td>f",
         ["a | a | b", "a | a | c", "d | e | f"]),
        ("<tr><td>a<td ROWSPAN='0'>b<tr><td>c<tr><td>d", ["a | b", "c | b", "d | b"]),
        ("<tr><td rowspan=x>a<td rowspan=-1>b<td rowspan=1.5>c<tr><td>d<td>e",
         ["a | b | c", "d | e"]),
        ("<tr><td rowspan=2>a<td>b<tr></tr><tr><td>c<td>d", ["a | b", "c | d"]),
        ("<thead><tr><th rowspan=9>a<th>b<tbody><tr><td>c<td>d", ["a | b", "c | d"]),
        ("<tr><td data-colspan=3 title='rowspan=2'>a<td>b<tr><td>c<td>d", ["a | b", "c | d"]),
        ("<tr><td title='x > y' rowspan=2>a<td>b<tr><td>c", ["a | b", "a | c"]),
        ("<tr><td colspan=2>a<td>b<tr><td colspan=2>c<td>d", ["a | b", "c | d"]),
        ("<tr><td>a<td>b<tr><td colspan=2>all", ["a | b", "all"]),
        ("<tr><td>a<br>b<td><p>c</p><p>d</p>", ["a b | c d"]),
        ("<tr><td><td>b<td>", ["| b |"]),
        ("<thead><tr><th>h<th>v<tfoot><tr><th>sum<td>3<tbody><tr><td rowspan=2>a<td>1<tr><td>2",
         ["h | v", "a | 1", "a | 2", "sum | 3"]),
        ("<tfoot><tr><td>sum<td>1</tfoot><tr><td>a<td>1", ["a | 1", "sum | 1"]),
    ],
)  # fmt: skip
def test_spans_are_those_of_browsers(rows: str, shown: list[str]) -> None:
    assert lines(f"<table>{rows}</table>") == shown


def test_a_table_within_a_table_keeps_its_rows() -> None:
    inner = "<table><tr><td>1<td>2<tr><td>3<td>4</table>"
    assert lines(f"<table><tr><td>{inner}<td>{inner}</table>after") == [
        *["1 | 2", "3 | 4", "1 | 2", "3 | 4"],
        "after",
    ]
    assert lines("<table><tr><td><pre>1\n2</pre><td><pre>a = 1\n  b</pre></table>") == [
        *["1", "2", "a = 1", "  b"],
    ]


def test_what_spans_many_rows_is_repeated_in_short() -> None:
    page = f"<table><tr><td rowspan=3>{'x' * 1000}<td>1<tr><td>2<tr><td>3</table>"
    first, second, third = lines(page)
    assert first == f"{'x' * 1000} | 1"
    assert second == f"{'x' * 40}… | 2"
    assert third == f"{'x' * 40}… | 3"


def test_rows_that_cost_too_much_are_counted() -> None:
    page = "<table><tr>" + "<td rowspan=9999>x" * 1000 + "<tr><td>y" * 1000 + "</table>end"
    shown = lines(page)
    assert len("".join(shown)) < 10 * MOST_FILLED
    assert "more rows, whose cells span too much" in shown[-2]
    assert shown[-1] == "end"


@pytest.mark.parametrize(
    "page",
    [
        "<table><tr><td rowspan=1000000 colspan=1000000>x" + "<tr><td>y" * 1000,
        "<table><tr>" + "<td rowspan=65534>x" * 1000 + "<tr><td>y" * 20_000,
        "<table><tr>" + "<td colspan=1000>a" * 14_000,
        "<table><tr><td>" * 15_000 + "x" * 10_000,
        "<table>" + "<tr>" * 60_000,
        "<td a=' '" * 28_000,
        "<td a ' ='" * 25_000,
        "<td " + "a " * 130_000,
    ],
)
def test_time_stays_linear_on_hostile_tables(page: str) -> None:
    start = time.process_time()
    html_to_text(page, 256 * 1024)
    assert time.process_time() - start < 2


def test_tables_deep_within_each_other_are_one() -> None:
    page = "<table><tr><td>" * (MOST_DEPTH + 5) + "x" + "</table>" * (MOST_DEPTH + 5) + "after"
    assert lines(page) == ["x", "after"]


PIECES = st.sampled_from(
    (
        *("<table>", "</table>", "<tr>", "</tr>", "<td>", "</td>", "<th rowspan=2>", "<td "),
        *("colspan=3>", "rowspan=0>", "<thead>", "</thead>", "<pre>", "</pre>", "a", "\n", "<p>"),
    )
)


@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_table_can_be_read(page: str) -> None:
    html_to_text(page, 10_000)


def test_lab_gets_the_spans_within_the_limits_of_browsers() -> None:
    cell = "<td rowspan=1000000 colspan='99999' data-rowspan=5>x"
    shown = plain_data({"text/html": f"<table><tr>{cell}</table>"})["text/html"]
    assert shown == '<table><tr><td colspan="1000" rowspan="65534">x</table>'
