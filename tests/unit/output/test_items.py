from __future__ import annotations

from kernel_mcp.output.items import GapItem, Item, TextItem, add_gap, add_text, without_shown


def out(text: str) -> TextItem:
    return TextItem("stdout", text)


def test_text_of_one_stream_is_joined_and_gaps_add_up() -> None:
    items: list[Item] = []
    for text in ("a", "", "b"):
        add_text(items, "stdout", text)
    add_text(items, "stderr", "c")
    for characters in (3, 0, -1, 4):
        add_gap(items, characters)
    assert items == [out("ab"), TextItem("stderr", "c"), GapItem(7)]


def test_what_was_shown_is_left_out_once() -> None:
    items: list[Item] = [out("abc\n"), TextItem("stderr", "abc"), out("abc")]
    assert without_shown(items, {"stdout": "abc", "stderr": ""}) == [
        out("\n"),
        TextItem("stderr", "abc"),
        out("abc"),
    ]


def test_text_shown_may_continue_in_a_later_item() -> None:
    items: list[Item] = [out("ab"), TextItem("stderr", "x"), out("cd")]
    assert without_shown(items, {"stdout": "abc"}) == [TextItem("stderr", "x"), out("d")]


def test_of_changed_lines_the_changed_ones_are_told_again() -> None:
    items: list[Item] = [out("one\ntwo 20%\n")]
    assert without_shown(items, {"stdout": "one\ntwo 10%"}) == [out("two 20%\n")]


def test_after_a_gap_nothing_is_taken_for_shown() -> None:
    items: list[Item] = [GapItem(5), out("abc")]
    assert without_shown(items, {"stdout": "abc"}) == items
