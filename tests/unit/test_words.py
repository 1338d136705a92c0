"""The check of words: what it reports, what it skips, and that nothing is left to report."""

from __future__ import annotations

import pytest

from tests.words import MOST_WORDS, faults, of_docstring, of_module, of_names, of_page

LONG = " ".join(["word"] * (MOST_WORDS + 1))


@pytest.mark.parametrize("first", ["Have", "What", "Whether", "Who"])
def test_a_docstring_says_first_what_something_is_or_does(first: str) -> None:
    assert len(list(of_docstring(f"{first} it is."))) == 1
    assert list(of_docstring(f"Return {first.lower()} it is.")) == []


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}.",
        f"Short. {LONG}. Short.",
        f"Return it.\n\n{LONG}.",
        f"Return these:\n\n- short\n- {LONG}",
    ],
)
def test_a_long_sentence_is_reported(text: str) -> None:
    (fault,) = of_docstring(text)
    assert "words in one sentence" in fault


@pytest.mark.parametrize(
    "text",
    [
        f"Return it. {LONG.replace('word word', 'word. Word')}.",
        f"Return it.\n\nname    {LONG}",
        f"Return `{LONG}`.",
    ],
)
def test_short_sentences_tables_and_code_are_not_reported(text: str) -> None:
    assert list(of_docstring(text)) == []


def test_a_private_word_is_reported_with_the_usual_one() -> None:
    (fault,) = of_docstring("Return the shelf.")
    assert fault == "'shelf': say dump"
    assert list(of_docstring("Return `shelf`.")) == []


def test_a_private_word_in_a_name_is_reported() -> None:
    source = "class Shelf:\n    def f(self):\n        self._told_of = shelf = 1"
    assert [line for line, _ in of_names(source)] == [1, 3]


def test_a_module_is_read_by_its_docstrings_only() -> None:
    source = f'x = """What {LONG}."""\n\n\ndef f():\n    """Whether so."""\n'
    assert [line for line, _ in of_module(source)] == [5]


def test_a_page_is_read_without_code_tables_and_generated_parts() -> None:
    generated = f"<!-- flags -->\n{LONG}\n<!-- end of flags -->"
    page = f"# {LONG}\n\n```text\n{LONG}\n```\n\n| {LONG} |\n\n{generated}\n\n{LONG}\n"
    assert [line for line, _ in of_page(page)] == [13]


def test_nothing_is_left_to_report() -> None:
    assert list(faults()) == []
