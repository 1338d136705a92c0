from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.output.markup import bare_html, html_outline, html_to_text, pictures_in

FRAME = """<div><style scoped>.x {color: red}</style>
<table border="1" class="dataframe">
  <thead><tr style="text-align: right;"><th></th><th>city</th><th>n</th></tr></thead>
  <tbody><tr><th>0</th><td>K&ouml;ln</td><td>1</td></tr></tbody>
</table></div>"""


def test_a_table_is_read_row_by_row() -> None:
    assert html_to_text(FRAME, 10_000).splitlines() == ["| city | n", "0 | Köln | 1"]


def test_blocks_are_lines_and_scripts_are_not_read() -> None:
    page = "<h1>Title</h1><p>one <b>two</b>.</p><script>x='<p>no</p>'</script><ul><li>a<li>b</ul>"
    assert html_to_text(page, 10_000) == "Title\none two.\n- a\n- b"


def test_preformatted_text_keeps_its_lines() -> None:
    assert html_to_text("<pre>a\n  b &lt;\n</pre>after", 1000) == "a\n  b <\nafter"


def test_pictures_are_read_by_their_alternative_text() -> None:
    assert html_to_text('<img src="x" alt="A plot &amp; more">', 1000) == "[A plot & more]"


def test_comments_and_upper_case_tags_are_understood() -> None:
    assert html_to_text("a<!-- <p>no --><STYLE>no</STYLE >b<BR>c", 1000) == "ab\nc"


def test_a_page_without_words_tells_its_first_elements_and_their_addresses() -> None:
    assert html_outline("<div><script src='a.js'></script><DIV>", 1000) == (
        "[HTML without words, 38 characters: div, script a.js]"
    )
    source = "<source src='data:audio/wav;base64,AAAA'>no sound</audio>"
    assert html_to_text(f"<audio>{source}", 1000) == ""
    assert "source data:audio/wav]" in html_outline(f"<audio>{source}", 1000)
    crowd = html_outline("".join(f"<img src=x{n}>" for n in range(99)), 10_000)
    assert crowd.endswith("img x7, …]")
    assert html_outline("plain", 1000) == ""


def test_no_more_than_the_limit_is_read_and_that_is_said() -> None:
    remark = "[… 53 more characters of HTML are not read …]"
    assert html_to_text("<p>" + "x" * 100, 50) == f"{'x' * 47}\n{remark}"


def test_a_picture_in_a_page_takes_no_room_of_its_words() -> None:
    page = f"<p>a<img src='data:image/png;base64,{'A' * 5000}' alt='plot'><p>b"
    assert html_to_text(page, 100) == "a[plot]\nb"
    assert pictures_in(page) == [("image/png", "A" * 5000, "plot")]


def test_a_tag_ends_outside_of_its_quoted_attributes() -> None:
    page = """<p title="a > b" class='x>y'>words<img alt='x>0' src=a><a href=x>y</a>"""
    assert html_to_text(page, 1000) == "words[x>0]y"
    assert html_to_text("a < b<p>c", 1000) == "a < b\nc"
    assert html_to_text('words<p class="unfinished', 1000) == "words"


@pytest.mark.parametrize(
    "unit", ["<", "<!--", "<a ", "<a b='", "</", "<script>", "&#", "<p", "<img alt="]
)
def test_time_stays_linear_on_hostile_markup(unit: str) -> None:
    start = time.process_time()
    html_to_text(unit * 100_000, 256 * 1024)
    html_outline(unit * 100_000, 256 * 1024)
    assert time.process_time() - start < 0.5


@given(st.text(alphabet="<>/!-abc &;\"'=\n", max_size=200))
def test_anything_can_be_read(source: str) -> None:
    html_to_text(source, 1000)


@pytest.mark.parametrize("source", ["<" + "a" * 262_000, "<a" * 131_000, "</" + "b " * 131_000])
def test_a_tag_that_never_ends_is_read_once(source: str) -> None:
    start = time.process_time()
    html_to_text(source, 256 * 1024)
    html_outline(source, 256 * 1024)
    bare_html(source, 256 * 1024)
    assert time.process_time() - start < 0.5
