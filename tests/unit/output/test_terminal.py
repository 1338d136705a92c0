from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.output.terminal import LIVE_CHARS, LIVE_ROWS, SEQUENCE_CHARS, Screen, clean

PRINTED = ("a", "bc", "\n", "\r", "\b", "\r\n", "   ", "ä", "\x00", "\x1b[31m", "\x1b]0;title\x07")
MOVES = ("\x1b[K", "\x1b[2K", "\x1b[A", "\x1b[B", "\x1b[3C", "\x1b[2D", "\x1b[1G", "\x1b[J")
TOKENS = st.lists(st.sampled_from(PRINTED + MOVES), max_size=25).map("".join)


def model(text: str) -> list[str]:
    """A terminal of endless height, one character at a time."""
    import re

    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\][^\x07]*\x07|.|\n", text, re.S):
        count = int("0" + "".join(re.findall(r"\d", token))) if token.startswith("\x1b[") else 0
        kind = token[-1] if token.startswith("\x1b") else token
        steps = max(1, count)
        if token.startswith("\x1b]") or token in "\x00" or kind == "m":
            continue
        if token == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
        elif token == "\r":
            column = 0
        elif token == "\b":
            column = max(0, column - 1)
        elif not token.startswith("\x1b"):
            rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
            column += 1
        elif kind == "A":
            row = max(0, row - steps)
        elif kind == "B":
            row = min(len(rows) - 1, row + steps)
        elif kind == "C":
            column += steps
        elif kind == "D":
            column = max(0, column - steps)
        elif kind == "G":
            column = steps - 1
        elif kind == "K":
            rows[row] = "" if count == 2 else rows[row][:column]
        elif kind == "J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
    return [line.rstrip() for line in rows]


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n")]


@given(TOKENS)
def test_text_ends_up_as_a_terminal_shows_it(text: str) -> None:
    assert lines_of(clean(text)) == model(text)


@given(st.lists(TOKENS, max_size=6))
def test_chunks_give_the_same_as_the_whole(chunks: list[str]) -> None:
    screen = Screen()
    shown = "".join(screen.feed(chunk) for chunk in chunks) + screen.flush()
    assert lines_of(shown) == lines_of(clean("".join(chunks)))


@given(st.text(alphabet=st.characters(codec=None)), st.data())
def test_any_text_cut_anywhere_is_safe_and_loses_no_letters(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    screen = Screen()
    shown = screen.feed(text[:at]) + screen.feed(text[at:]) + screen.flush()
    shown.encode("utf-8")
    assert not set(shown) & set(map(chr, (*range(9), *range(11, 32), *range(127, 160))))


def test_a_progress_bar_shows_its_last_state() -> None:
    bar = "".join(f"\r{n:3d}%|{'#' * (n // 10):10}| {n}/100" for n in range(101))
    assert clean(bar + "\ndone\n") == "100%|##########| 100/100\ndone\n"


def test_nested_progress_bars_show_their_last_states() -> None:
    screen = Screen()
    final = ""
    for outer in range(3):
        final += screen.feed(f"\router {outer}")
        for inner in range(5):
            final += screen.feed(f"\n\rinner {inner}\x1b[A")
    final += screen.feed("\n\n") + screen.flush()
    assert final.rstrip("\n") == "outer 2\ninner 4"


def test_a_bar_that_is_rubbed_out_leaves_nothing() -> None:
    assert clean("\r 50%|#####     |\r                \rnext") == "next"


def test_carriage_return_before_newline_is_a_newline() -> None:
    assert clean("a\r\nb\r\n") == "a\nb\n"


def test_backspaces_are_applied() -> None:
    assert clean("abc\b\bX\n") == "aXc\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;window title\x07text", "text"),
        ("\x1b(Btext\x1b7\x1b8", "text"),
        ("bell\x07 null\x00 delete\x7f c1\x9b", "bell null delete c1"),
        ("page\x0cnext", "page\nnext"),
        ("a\tb", "a\tb"),
        ("left\u202eright", "left\\u202eright"),
        ("half \ud83d pair", "half \\ud83d pair"),
    ],
)
def test_codes_for_terminals_vanish_and_hidden_characters_show(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_an_escape_sequence_that_never_ends_does_not_swallow_the_output() -> None:
    screen = Screen()
    shown = screen.feed("\x1b]") + screen.feed("secret line\n") + screen.feed("more\n")
    assert shown + screen.flush() == "secret line\nmore\n"
    endless = "\x1b]" + "x" * (2 * SEQUENCE_CHARS)
    assert clean(endless) == "x" * (2 * SEQUENCE_CHARS)


def test_sequences_split_between_chunks_are_still_removed() -> None:
    screen = Screen()
    shown = "".join(map(screen.feed, "a\x1b[1;3")) + screen.feed("1mb\x1b") + screen.feed("[0mc")
    assert shown + screen.flush() == "abc"


def test_only_rows_that_may_change_are_held_back() -> None:
    screen = Screen()
    final = screen.feed("".join(f"{n}\n" for n in range(100)))
    assert final.count("\n") == 100 - LIVE_ROWS + 1
    assert screen.live.count("\n") == LIVE_ROWS - 1


def test_a_line_without_end_is_not_held_back_for_ever() -> None:
    screen = Screen()
    held = 0
    for _ in range(100):
        screen.feed("x" * 5000)
        held = max(held, len(screen.live))
    assert held <= LIVE_CHARS


def test_settling_keeps_a_progress_bar_but_not_plain_text() -> None:
    screen = Screen()
    assert screen.feed("plain") + screen.settle() == "plain"
    assert screen.feed("line\n\r 10%") + screen.settle() == "line\n"
    assert screen.live == " 10%"
    assert screen.redrawing


HOSTILE = ("\rx", "x\b", "\x1b[Ax", "\x1b", "\x1b[0m", "\u202e", "\x1b[999Cx", "\x1b]", "\n\x1b[A")


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_costs_little_time_and_memory(unit: str) -> None:
    chunk = (unit * 65536)[:65536]
    screen = Screen()
    start = time.process_time()
    final = screen.feed(chunk)
    assert time.process_time() - start < 0.5
    assert len(final) + len(screen.live) < 20 * len(chunk)


def test_ten_megabytes_of_plain_text_pass_in_a_moment() -> None:
    text = "a line of quite ordinary text, ä\n" * 300_000
    start = time.process_time()
    assert clean(text) is text
    assert time.process_time() - start < 0.3
