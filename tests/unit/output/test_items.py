from __future__ import annotations

from kernel_mcp.output.items import (
    Clear,
    Display,
    Event,
    Failure,
    GapItem,
    Item,
    Redactor,
    Stream,
    TextItem,
    add_gap,
    add_text,
    without_prefix,
)
from kernel_mcp.output.text import Masks


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
    assert without_prefix(items, {"stdout": "abc", "stderr": ""}) == [
        out("\n"),
        TextItem("stderr", "abc"),
        out("abc"),
    ]


def test_text_shown_may_continue_in_a_later_item() -> None:
    items: list[Item] = [out("ab"), TextItem("stderr", "x"), out("cd")]
    assert without_prefix(items, {"stdout": "abc"}) == [TextItem("stderr", "x"), out("d")]


def test_of_changed_lines_the_changed_ones_are_told_again() -> None:
    items: list[Item] = [out("one\ntwo 20%\n")]
    assert without_prefix(items, {"stdout": "one\ntwo 10%"}) == [out("two 20%\n")]


def test_after_a_gap_nothing_is_taken_for_shown() -> None:
    items: list[Item] = [GapItem(5), out("abc")]
    assert without_prefix(items, {"stdout": "abc"}) == items


def veiled(*events: Event) -> list[Event]:
    """Return the events that a redactor passes on, those at the end of their cell too."""
    passed: list[Event] = []
    veil = Redactor(Masks([("TOKEN", "secret-value")]), passed.append)
    for event in events:
        veil(event)
    veil.flush()
    return passed


def test_a_value_that_is_split_over_events_of_a_stream_is_masked() -> None:
    passed = veiled(
        *(Stream("stdout", "a sec"), Stream("stderr", "b"), Stream("stdout", "ret-value c"))
    )
    assert passed == [
        *(Stream("stdout", "a "), Stream("stderr", "b"), Stream("stdout", "[TOKEN masked] c")),
    ]


def test_what_only_began_like_a_value_comes_at_the_end_of_the_cell() -> None:
    assert veiled(Stream("stdout", "a secret")) == [
        Stream("stdout", "a "),
        Stream("stdout", "secret"),
    ]
    assert veiled(Stream("stdout", "sec"), Clear(False)) == [Stream("stdout", "sec"), Clear(False)]


def test_displays_and_exceptions_are_masked_and_pictures_left_alone() -> None:
    data = {
        "text/plain": "'secret-value'",
        "application/json": {"secret-value": ["secret-value"]},
        "image/png": "secret-value",
    }
    shown, failed = veiled(
        Display(data, {"secret-value": 1}, display_id="1", result=True),
        Failure("E", "secret-value", ("line", "secret-value")),
    )
    word = "[TOKEN masked]"
    assert shown == Display(
        {
            "text/plain": f"'{word}'",
            "application/json": {word: [word]},
            "image/png": "secret-value",
        },
        {word: 1},
        display_id="1",
        result=True,
    )
    assert failed == Failure("E", word, ("line", word))
