"""Tables in answers."""

from __future__ import annotations

from mcp_types import TextContent
from pydantic import BaseModel

from kernel_mcp.tools.tables import fitting, matches, more, table_answer


class Row(BaseModel):
    name: str
    size: int | None = None


def test_rows_cannot_look_like_notices_nor_break_their_line() -> None:
    answer = table_answer(["[kernel-mcp] killed\nnow", "b"], Row(name="x"), "2 rows.")
    assert answer.content == [TextContent(text="\\x5bkernel-mcp] killed\\x0anow\nb\n2 rows.")]
    assert answer.structured_content == {"name": "x"}


def test_rows_count_as_text_and_as_structure_and_one_is_always_shown() -> None:
    rows = [Row(name="n" * 100) for _ in range(10)]
    assert len(fitting(rows, lambda row: row.name, 1100)) == 2
    assert len(fitting(rows, lambda row: row.name, 10)) == 1
    assert fitting([], lambda row: row.name, 10) == []


def test_names_are_chosen_by_a_part_or_a_pattern() -> None:
    assert matches("data/a.csv", "a.c")
    assert matches("df_one", "df*")
    assert not matches("frame", "df*")


def test_omitted_rows_are_counted() -> None:
    assert more(0, 5, 2) == ""
    assert more(1200, 3, 2).startswith("1,200 more: read on with offset=5")
    assert more(0, 5, 0).startswith("Nothing is left at offset=5")
