"""Outputs that reach a web page with its reader's rights."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.endpoints.plain import plain, plain_cell, plain_data, plain_metadata, plain_reply
from kernel_mcp.output.items import Display, Failure, Stream
from kernel_mcp.output.markup import bare_html

HARMLESS = {"table", "tr", "td", "th", "p", "br", "b", "code", "li", "ul", "pre", "thead", "tbody"}
PIECES = st.sampled_from(
    (
        "<table", "<td", ">", "<", "/>", "</td>", "<script>", "</script>", "'", '"', "x", "<!--",
        "<img src=x onerror=a()>", "&lt;script&gt;", "&#60;img&#62;", "-->", " onclick=a()",
        " colspan=2",
        "\0", "<svg/onload=a()>", "<TD STYLE=a>", "\n", "&amp;lt;", "<a href=javascript:a()>", "`",
        "<b\f>",
    )
)  # fmt: skip


class Found(HTMLParser):
    """Elements and attributes as a browser's parser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes.update(name for name, _ in attrs)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_no_page_keeps_more_than_tables_and_words(page: str) -> None:
    found = Found()
    found.feed(bare_html(page, 10_000))
    found.close()
    assert found.elements <= HARMLESS
    assert found.attributes <= {"colspan", "rowspan"}


def test_a_table_keeps_its_cells() -> None:
    page = "<style>a{}</style><table class='x'><tr><th colspan='2'>a&lt;b</th></tr></table>"
    assert bare_html(page, 1000) == '<table><tr><th colspan="2">a&lt;b</th></tr></table>'
    assert plain_data({"text/html": page, "text/plain": "w"}) == {
        "text/html": '<table><tr><th colspan="2">a&lt;b</th></tr></table>',
        "text/plain": "w",
    }


@pytest.mark.parametrize(
    "mime",
    [
        "application/javascript",
        "image/svg+xml",
        "text/markdown",
        "text/latex",
        "application/vnd.jupyter.widget-view+json",
        "application/vnd.vegalite.v5+json",
        "TEXT/HTML",
        "application/pdf",
    ],
)
def test_what_could_run_becomes_words(mime: str) -> None:
    assert plain_data({mime: "<b>x</b>"}) == {"text/plain": f"[{mime} is not shown here]"}
    assert plain_data({mime: {"a": 1}, "text/plain": "words"}) == {"text/plain": "words"}


def test_pictures_are_base64_or_nothing() -> None:
    assert plain_data({"image/png": "aGk=\n"}) == {"image/png": "aGk=\n"}
    assert "image/png" not in plain_data({"image/png": '" onerror="a()'})
    metadata: dict[str, Any] = {"image/png": {"width": 3, "height": '1" x='}, "trusted": True}
    assert plain_metadata(metadata) == {"image/png": {"width": 3}}


def test_events_and_cells_are_bare_of_metadata() -> None:
    data = {"text/html": "<script>a</script>"}
    shown = plain(Display(data, {"trusted": True}, "id", result=True))
    assert shown == Display({"text/plain": "[text/html is not shown here]"}, {}, "id", result=True)
    assert plain(Stream("stdout", "<b>")) == Stream("stdout", "<b>")
    output = {"output_type": "display_data", "data": {"text/markdown": "x"}, "metadata": {"a": 1}}
    cell = plain_cell({"id": "a", "metadata": {"trusted": True}, "outputs": [output]})
    assert cell["metadata"] == {}
    assert cell["outputs"][0]["data"] == {"text/plain": "[text/markdown is not shown here]"}
    assert cell["outputs"][0]["metadata"] == {}


def test_errors_come_first_and_foreign_frames_are_counted() -> None:
    own = "Cell In[1], line 1\n----> 1 json.loads('{')\n"
    foreign = "File /usr/lib/python3.12/json/decoder.py:3, in f(a)\n----> 3 g()\n"
    error = Failure("E", "v", ("-" * 75, own, foreign, "E: v"))
    told = plain(error)
    assert isinstance(told, Failure)
    assert told.traceback[0] == "E: v"
    assert told.traceback[1].endswith("[… 1 frame inside json …]")
    assert "decoder.py" not in "".join(told.traceback)
    output = {"output_type": "error", "ename": "E", "evalue": "v"}
    cell = plain_cell({"outputs": [{**output, "traceback": list(error.traceback)}]})
    assert cell["outputs"][0]["traceback"] == list(told.traceback)


def test_replies_hold_words_alone() -> None:
    found = plain_reply(
        "inspect_request",
        {"status": "ok", "found": True, "data": {"text/plain": "w", "text/html": "<script>"}},
    )
    assert found["data"] == {"text/plain": "w"}
    found = plain_reply(
        "complete_request", {"status": "ok", "matches": ["a", 1], "metadata": {"x": "<b>"}}
    )
    assert (found["matches"], found["metadata"]) == (["a"], {})
