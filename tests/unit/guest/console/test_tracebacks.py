"""Plain tracebacks of user frames."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.console import tracebacks

CELL = "<ipython-input-7-abc>"


def formatted(code: str, filename: str = CELL) -> list[str]:
    """The traceback of code that raises."""
    try:
        exec(compile(code, filename, "exec"), {})
    except BaseException as error:  # noqa: BLE001  # whatever the code under test raises
        return tracebacks.format_exception(type(error), error, error.__traceback__, label)
    raise AssertionError("nothing was raised")


def label(filename: str) -> str | None:
    """The label of the only cell there is."""
    return "Cell In[7]" if filename == CELL else None


def test_each_frame_is_an_entry_and_the_exception_comes_last() -> None:
    parts = formatted("def f():\n    raise ValueError('why')\nf()")
    assert parts[0] == "Traceback (most recent call last):"
    assert parts[-3].startswith("  Cell In[7], line 3, in <module>")
    assert parts[-2].startswith("  Cell In[7], line 2, in f")
    assert parts[-1] == "ValueError: why"


def test_frames_of_the_kernel_are_left_out() -> None:
    def refuse() -> None:
        raise ImportError("refused")

    refuse.__code__ = refuse.__code__.replace(co_filename=tracebacks.IMPORT_GUARD)
    try:
        refuse()
    except ImportError as error:
        parts = tracebacks.format_exception(ImportError, error, error.__traceback__, label)
    assert tracebacks.IMPORT_GUARD not in "".join(parts)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("try:\n    1/0\nexcept Exception as e:\n    raise KeyError from e", "direct cause"),
        ("try:\n    1/0\nexcept Exception:\n    raise KeyError", "During handling"),
    ],
)
def test_causes_and_contexts_come_first(code: str, said: str) -> None:
    text = "\n".join(formatted(code))
    assert text.index("ZeroDivisionError") < text.index(said) < text.index("KeyError")


def test_suppressed_contexts_stay_away() -> None:
    text = "\n".join(formatted("try:\n    1/0\nexcept Exception:\n    raise KeyError from None"))
    assert "ZeroDivisionError" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_groups_are_drawn_with_their_members() -> None:
    text = "\n".join(formatted("raise ExceptionGroup('g', [ValueError(1), KeyError(2)])"))
    assert "Cell In[7]" in text
    assert "ValueError: 1" in text
    assert "KeyError: 2" in text


def test_deep_recursion_keeps_both_ends() -> None:
    parts = formatted("def a(n): b(n)\ndef b(n): a(n)\na(0)")
    assert len(parts) < tracebacks.MAX_FRAMES + 5
    assert any("frames left out" in part for part in parts)
    assert parts[1].startswith(("  File", "  Cell"))


@pytest.mark.parametrize("shorten", [tracebacks.shorten, tracebacks.safe_str])
def test_long_texts_lose_their_middle(shorten: Callable[[str], str]) -> None:
    text = shorten("a" * 100_000 + "b" * 100_000)
    assert len(text) < tracebacks.MAX_CHARS + 100
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "characters left out" in text


def test_an_exception_that_cannot_be_shown_is_named() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "BrokenError" in tracebacks.safe_str(BrokenError())
    assert "BrokenError" in tracebacks.exception_only(BrokenError, BrokenError())[0]


@pytest.mark.parametrize("code", [None, 0, False])
def test_these_exit_codes_are_success(code: object) -> None:
    assert tracebacks.is_success(SystemExit(code))


@pytest.mark.parametrize("error", [None, ValueError(), SystemExit(1), SystemExit("0")])
def test_all_else_is_none(error: BaseException | None) -> None:
    assert not tracebacks.is_success(error)


def test_printed_stacks_end_at_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traceback, "walk_stack", traceback.walk_stack)
    tracebacks.hide_callers()
    names: dict[str, Any] = {"traceback": traceback}
    file, name = tracebacks._RUNNER
    exec(compile(f"def {name}(code): exec(code, globals())", file, "exec"), names)
    code = "def f(): return traceback.extract_stack()\nstack = f()"
    names[name](compile(code, CELL, "exec"))
    assert [(frame.filename, frame.name) for frame in names["stack"]] == [
        (CELL, "<module>"),
        (CELL, "f"),
    ]
    assert list(traceback.walk_stack(None))


def test_frames_above_a_cell_are_left_out_of_tracebacks_of_loguru() -> None:
    above = [("/usr/lib/runpy.py", 1, "run", ""), (tracebacks.__file__, 2, "serve", "")]
    runner = (tracebacks._RUNNER[0], 3, tracebacks._RUNNER[1], "")
    own = [(CELL, 4, "<module>", "f()"), ("/usr/lib/json.py", 5, "loads", "x")]

    found = {"frames": [*above, runner, *own]}

    class ExceptionFormatter:
        """As loguru's."""

        def _extract_frames(self) -> Any:
            return found["frames"], "source"

    tracebacks.follow_loguru(SimpleNamespace(ExceptionFormatter=ExceptionFormatter))
    assert ExceptionFormatter()._extract_frames() == (own, "source")
    found["frames"] = own  # in a thread
    assert ExceptionFormatter()._extract_frames() == (own, "source")


def test_another_release_of_loguru_gets_its_own_frames_back() -> None:
    class ExceptionFormatter:
        """As that of a release whose method returns something else."""

        def _extract_frames(self) -> list[str]:
            return ["frame"]

    tracebacks.follow_loguru(SimpleNamespace(ExceptionFormatter=ExceptionFormatter))
    assert ExceptionFormatter()._extract_frames() == ["frame"]
