"""Outputs of a notebook, as a model reads them."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

from PIL import Image

from kernel_mcp.notebooks.views import AnswerBudget, full_cell
from kernel_mcp.output.images import Picture

TABLE = [
    "<table><thead><tr><th>city</th><th>year</th><th>n</th></tr></thead>\n",
    "<tr><th rowspan='2'>A</th><th>1</th><td>2</td></tr>\n",
    "<tr><th>2</th><td>3</td></tr></table>",
]


def shown(**data: Any) -> list[str | Picture]:
    mimes = {name.replace("_", "/", 1): value for name, value in data.items()}
    output = {"output_type": "display_data", "data": mimes}
    cell: Any = SimpleNamespace(source="source", outputs=[output])
    return list(full_cell(cell, AnswerBudget(10_000)))[1:]


def test_a_table_says_more_than_the_name_of_its_object() -> None:
    styler = "<pandas.io.formats.style.Styler at 0x7f26>"
    rows = "city | year | n\nA | 1 | 2\nA | 2 | 3"
    assert shown(text_plain=[styler], text_html=TABLE) == [rows]
    assert shown(text_html=TABLE) == [rows]
    assert shown(text_plain="  n\n0 1", text_html=TABLE) == ["  n\n0 1"]
    assert shown(application_javascript="f()" * 100) == [
        "[JavaScript, 300 characters, which is not run here]"
    ]


def test_all_pictures_of_a_page_are_shown_with_its_words() -> None:
    written = io.BytesIO()
    Image.new("RGB", (3, 2)).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    page = f"<p>words</p><img src='data:image/png;base64,{data}'>" * 2
    first, second, words = shown(text_html=page)
    assert isinstance(first, Picture)
    assert isinstance(second, Picture)
    assert words == "words\nwords"
    (alone,) = shown(image_png=f"{data}\n", text_plain="<Figure>", text_html="<p>x")
    assert isinstance(alone, Picture)
