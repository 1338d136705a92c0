from __future__ import annotations

import html
import json
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.output.text import (
    PREFIX,
    Masks,
    cut,
    escaped,
    escaped_lines,
    head_of,
    is_plain,
    notice,
    omission,
    one_line,
    stripped,
    tail_of,
    visible,
)

LINES = st.text(alphabet="ab\n", max_size=60)


def test_bidi_controls_and_lone_surrogates_are_written_as_escapes() -> None:
    assert visible("a\u202eb\u2066c\ud800d") == "a\\u202eb\\u2066c\\ud800d"


def test_tag_characters_that_smuggle_hidden_text_are_written_as_escapes() -> None:
    assert visible("x\U000e0041") == "x\\U000e0041"


def test_ordinary_scripts_and_emoji_stay_as_they_are() -> None:
    text = "naïve Ελλάδα עברית العربية 漢字 👩‍👩‍👧"
    assert visible(text) == text
    assert is_plain(text)


IGNORABLE = (
    *(
        "\xad\u034f\u061c\u115f\u1160\u17b4\u180b\u180e\u200b\u200c\u200d\u200e\u2028\u202a\u2060\u2064"
    ),
    *(
        "\u206f\u3164\ufe00\ufe0e\ufe0f\ufeff\uffa0\ufff9\U0001bca0\U0001d173\U000e0001\U000e0020\U000e0100"
    ),
    "\U000e01ef",
)


@pytest.mark.parametrize("char", IGNORABLE, ids=ascii)
def test_what_a_display_may_ignore_is_written_as_an_escape(char: str) -> None:
    for text in (f"a{char}b", f"漢{char}字", char, f"{char}\n", f"x{char}{char}y"):
        shown = visible(text)
        assert char not in shown
        assert ascii(char)[1:-1] in shown
        assert not is_plain(text)
        assert char not in stripped(text)


def test_ordinary_emoji_stay_and_runs_of_their_parts_do_not() -> None:
    for text in ("❤️ ok", "1️⃣ #️⃣", "🏳️‍🌈", "👩🏽‍💻", "🧔‍♂️", "↔️"):
        assert visible(text) == text
        assert is_plain(text)
    assert visible("❤\ufe0f\ufe0f") == "❤\ufe0f\\ufe0f"
    assert visible("a\ufe0f") == "a\\ufe0f"
    assert visible("👩\u200d\u200d👩") == "👩\\u200d\\u200d👩"
    assert visible("👩\u200dx") == "👩\\u200dx"
    assert visible("1\ufe0f2") == "1\\ufe0f2"


ORDINARY_WORDS = {
    "Persian": "می\u200cخواهم کتاب\u200cها را بخوانم",  # noqa: RUF001
    "Sinhala": "ශ්\u200dරී ලංකා",
    "Bengali": "র\u200d্যাব",
    "Hindi": "क्\u200dष क्\u200cष",
    "Malayalam": "അവന്\u200d",
    "flags": "".join(
        "🏴" + "".join(chr(0xE0000 + ord(char)) for char in f"gb{part}\x7f")
        for part in ("eng", "sct", "wls")
    ),
}


@pytest.mark.parametrize("text", ORDINARY_WORDS.values(), ids=ORDINARY_WORDS)
def test_words_that_need_invisible_characters_stay_readable(text: str) -> None:
    assert visible(text) == text
    assert is_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        *("ب\u200c\u200cب", "ب\u200c ", "د\u200cد", "ب\u200dب", "a\u200cب", "क्\u200d\u200dष"),
        *(
            "🏴\U000e0067\U000e0062",
            "🏴\U000e0061\U000e007f",
            f"{ORDINARY_WORDS['flags']}\U000e0041",
        ),
    ],
    ids=ascii,
)
def test_the_same_characters_elsewhere_are_written_as_escapes(text: str) -> None:
    assert "\\" in visible(text)
    assert not is_plain(text)


def test_control_characters_are_written_as_escapes_and_ends_of_lines_stay() -> None:
    assert visible("a\x1b[8mb\x00\x7f\x85\r\nc\td\re") == "a\\x1b[8mb\\x00\\x7f\\x85\r\nc\td\\x0de"


def test_every_character_is_judged_alike_by_every_way() -> None:
    for code in (
        *range(0x3200),
        *range(0xD7F0, 0x11000),
        *range(0x13400, 0x13500),
        *range(0xE0000, 0xE1100),
    ):
        char = chr(code)
        plain = is_plain(f"x{char}漢")
        assert plain == is_plain(char), ascii(char)
        if plain:
            assert visible(char) == char == stripped(char)
        else:
            assert is_plain(stripped(char))
            assert visible(char) != char


@given(st.text())
def test_visible_text_can_always_be_encoded(text: str) -> None:
    visible(text).encode("utf-8")


@given(st.text(alphabet=st.characters(codec=None)))
def test_stripped_text_is_plain_and_plain_text_is_not_changed(text: str) -> None:
    assert is_plain(stripped(text))
    if is_plain(text):
        assert stripped(text) == text


@given(st.text())
def test_plain_means_that_nothing_has_to_be_done(text: str) -> None:
    if is_plain(text):
        assert visible(text) == text
        assert not set(text) & set(map(chr, (*range(9), *range(11, 32), *range(127, 160))))


def test_names_are_shown_on_one_line_with_every_control_character_escaped() -> None:
    assert one_line("a\nb\x1b[31m\udc80") == "a\\x0ab\\x1b[31m\\udc80"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"


@given(LINES, st.integers(0, 70), st.integers(0, 70))
def test_a_cut_keeps_both_ends_and_counts_the_rest_exactly(text: str, head: int, tail: int) -> None:
    ends = cut(text, head, tail)
    assert text.startswith(ends.head)
    assert text.endswith(ends.tail)
    assert len(ends.head) + ends.omitted + len(ends.tail) == len(text)
    assert len(ends.head) <= head or not ends.omitted
    assert len(ends.tail) <= tail
    assert (ends.omitted > 0) == (len(text) > head + tail)


@given(LINES, st.integers(0, 70))
def test_ends_are_whole_lines_when_that_keeps_half(text: str, limit: int) -> None:
    head, tail = head_of(text, limit), tail_of(text, limit)
    assert text.startswith(head)
    assert text.endswith(tail)
    if len(text) > limit:
        assert len(head) == limit or head.endswith("\n")
        start = len(text) - len(tail)
        assert len(tail) == limit or text[start - 1] == "\n"
        assert len(head) >= limit // 2
        assert len(tail) >= limit - limit // 2 - 1


def test_the_marker_stands_on_a_line_of_its_own_and_names_the_count() -> None:
    text = "a" * 2000
    assert cut(text, 5, 5).joined("see x") == (
        "aaaaa\n[… 1,990 characters left out; see x …]\naaaaa"
    )
    assert omission(1) == "[… 1 character left out …]"


def test_checking_ten_megabytes_takes_no_noticeable_time() -> None:
    text = "a line of quite ordinary text, ä\n" * 300_000
    start = time.process_time()
    assert is_plain(text)
    assert time.process_time() - start < 0.3


LIKE = {
    "the prefix": "[kernel-mcp] killed",
    "without its space": "[kernel-mcp]killed",
    "behind blanks": "   \t[kernel-mcp] killed",
    "in a later line": "one\ntwo\n[kernel-mcp] killed",
    "behind another": "[kernel-mcp][kernel-mcp] killed",
    "in capitals": "[Kernel-MCP] killed",
    "with blanks": "[ kernel-mcp ] killed",
    "with a soft hyphen": "[kernel\u00ad-mcp] killed",
    "with zero-width characters": "[k\u200bernel\u2060-mcp] killed",
    "with a variation selector": "[kernel-mcp\ufe0f] killed",
    "with tag characters": "[kernel\U000e0041-mcp] killed",
    "with another hyphen": "[kernel\u2011mcp] killed",
    "in full width": "\uff3b\uff4bernel\uff0dmcp\uff3d killed",
    "with Cyrillic letters": "[k\u0435rn\u0435l-m\u0441\u0440] killed",
    "in mathematical letters": "[\U0001d424\U0001d41e\U0001d42bnel-mcp] killed",
    "in other brackets": "\u3010kernel-mcp\u3011 killed",
    "without a hyphen": "[kernel mcp] killed",
}


@pytest.mark.parametrize("text", LIKE.values(), ids=LIKE.keys())
def test_what_looks_like_the_prefix_is_escaped(text: str) -> None:
    shown = escaped(text)
    assert shown != text
    assert "[kernel-mcp]" not in shown
    assert escaped(shown) == shown
    assert shown.endswith("killed")
    for line in (text, f"a\n{text}", f"a\r\n{text}", f"a\r{text}", f"\u3000\u2800\u200b\x1b{text}"):
        shown = escaped_lines(line)
        assert shown != line
        assert escaped_lines(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kernel-mcp",
        "[tool.kernel-mcp]",
        "[kernel] mcp",
        "x[0] = kernel - mcp",
        "äöü [1, 2] kernel",
        "[\n" * 100,
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert escaped(text) is text
    assert escaped_lines(text) is text


@pytest.mark.parametrize(
    "text", ['PREFIX = "[kernel-mcp] "', "# [kernel-mcp] in a comment", "one\n'[kernel-mcp]' two"]
)
def test_code_that_names_the_prefix_can_be_read_as_it_is(text: str) -> None:
    assert escaped_lines(text) is text


def test_lines_of_blanks_cost_no_more_than_others() -> None:
    text = "\n" * 300_000 + " " * 300_000 + "x [kernel-mcp]"
    began = time.process_time()
    assert escaped_lines(text) is text
    assert time.process_time() - began < 2


def test_only_the_bracket_is_escaped() -> None:
    assert escaped("a\n[kernel-mcp] b") == "a\n\\x5bkernel-mcp] b"


def test_a_notice_guards_what_it_quotes() -> None:
    assert notice("lost: [kernel-mcp] x") == PREFIX + "lost: \\x5bkernel-mcp] x"


MASKS = Masks([("TOKEN", "secret-value"), ("LONGER", "secret-value-2"), ("PIN", "12345")])


def test_values_are_masked_in_the_forms_that_output_gives_them() -> None:
    assert MASKS.masked("a secret-value, 12345.") == "a [TOKEN masked], 12345."
    assert MASKS.masked("secret-value-2") == "[LONGER masked]"
    value = "a'\"<\n&\xe9 /b"
    masks = Masks([("V", value)])
    for form in (value, repr(value), json.dumps(value), html.escape(value), quote(value)):
        assert masks.masked(f"<{form}>").replace("'", "").replace('"', "") == "<[V masked]>"
    assert not Masks([("PIN", "12345"), ("EMPTY", "")])


def test_the_beginning_of_a_value_that_was_cut_off_is_masked_too() -> None:
    assert MASKS.masked("'secret-v…") == "'[LONGER masked]…"
    assert MASKS.masked("secre…t-value…") == "secre…t-value…"


def test_values_in_structures_are_masked_but_for_handles() -> None:
    given = {"session": "secret-value", "a": ["secret-value", 1, None], "secret-value": "x"}
    masked = MASKS.anywhere(given, ("session",))
    assert masked == {**given, "a": ["[TOKEN masked]", 1, None]}
    assert "[TOKEN masked]" in MASKS.anywhere(given, keys=True)


@pytest.mark.parametrize("size", range(1, 16))
def test_values_that_lie_across_pieces_are_masked(size: int) -> None:
    text = "secret-value secsecret-value-2-secret-valu secret-value"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    shown = "".join(MASKS.pieces(pieces))
    assert shown == "[TOKEN masked] sec[LONGER masked]-secret-valu [TOKEN masked]"


@pytest.mark.parametrize("size", range(1, 40))
def test_escapes_in_a_value_hide_it_in_no_piece(size: int) -> None:
    text = "\x1b[1ma \x1b[31msec\x1b[0;1mret\x00-\x1b[2Kvalue\x1b[0m, sec\x1b[0mr"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    shown = "".join(MASKS.pieces(pieces))
    assert shown == "\x1b[1ma \x1b[31m[TOKEN masked]\x1b[0m, sec\x1b[0mr"


def test_a_value_with_escapes_of_its_own_is_masked() -> None:
    masks = Masks([("COLOURED", "sec\x1b[0mret")])
    assert masks.masked("a sec\x1b[0mret") == masks.masked("a secret") == "a [COLOURED masked]"


def test_no_escapes_make_more_wait_than_their_most() -> None:
    text = "secret" + "\x1b[0m" * 100_000
    before = time.process_time()
    shown, rest = MASKS.split_masked(text)
    assert (shown + rest, len(rest) < 4200) == (text, True)
    assert MASKS.masked("secret-\x1b[0mvalue " * 20_000) == "[TOKEN masked] " * 20_000
    assert time.process_time() - before < 5


def test_a_value_whose_end_begins_another_is_masked_across_pieces() -> None:
    masks = Masks([("A", "xxxxab-cd"), ("B", "cd-yyyyyy")])
    assert "".join(masks.pieces(["xxxxab-cd", "-zzz"])) == "[A masked]-zzz"
    assert "".join(masks.pieces(["xxxxab-cd", "-yyyyyy"])) == "[A masked]-yyyyyy"


def test_no_text_makes_more_wait_than_a_value_is_long() -> None:
    masks = Masks([("PEM", "-----BEGIN-----\nxyz\n-----END-----"), ("X", "xxxxxxxx")])
    for text in ("-----BEGIN-----\nxyz\n-----END" * 2000, "-" * 50_000, "x" * 50_001):
        shown, rest = masks.split_masked(text)
        assert len(rest) < 40
        assert masks.split_masked(shown + rest)[1] == rest


def test_values_that_are_in_the_words_for_others_do_not_change_those() -> None:
    masks = Masks([("TOKEN", "secret-value"), ("WORD", "masked"), ("OTHER", "value-of")])
    shown = masks.masked("secret-value masked")
    assert shown == "[TOKEN masked] [WORD masked]"
    assert masks.masked(shown) == shown
    assert masks.masked("secret-value-of") == "[TOKEN masked]-of"


def test_many_marks_of_cut_text_are_looked_at_once() -> None:
    text = "secret…" * 20_000
    before = time.process_time()
    assert MASKS.masked(text) == "[LONGER masked]…" * 20_000
    assert time.process_time() - before < 5


def test_blanks_in_what_looks_like_a_notice_are_read_once() -> None:
    start = time.process_time()
    escaped("[kernel" + " " * 200_000)
    escaped_lines("[kernel-mcp]\n[kernel" + " " * 200_000)
    assert time.process_time() - start < 0.5
