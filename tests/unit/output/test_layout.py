from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from kernel_mcp.output.items import Failure
from kernel_mcp.output.layout import TITLE, shortened


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance(colors="neutral")
    InteractiveShell.clear_instance()


def raised(shell: InteractiveShell, code: str) -> Failure:
    """Return the message of IPython for the exception that `code` raises, with colours."""
    sent: list[Failure] = []

    def record(kind: Any, value: Any, frames: list[str]) -> None:
        sent.append(Failure(kind.__name__, str(value), tuple(frames)))

    untyped: Any = shell
    untyped._showtraceback = record
    untyped.run_cell(code)
    return sent[-1]


def told(shell: InteractiveShell, code: str) -> str:
    frames, message = shortened(raised(shell, code))
    return f"{frames}\n{message}" if frames else message


def test_the_failing_line_and_the_exception_are_told(shell: InteractiveShell) -> None:
    lines = told(shell, "x = 1\n1/0").splitlines()
    assert lines[0] == TITLE
    assert lines[1].startswith("Cell In[")
    assert lines[1].endswith("line 2")
    assert lines[2:] == ["    1/0", "ZeroDivisionError: division by zero"]


def test_library_frames_are_counted_and_named(shell: InteractiveShell) -> None:
    text = told(shell, "import json\ndef f(x):\n    return json.loads(x)\nf('{')")
    assert "    f('{')" in text
    assert "    return json.loads(x)" in text
    assert "[… 3 frames inside json …]" in text
    assert "decoder.py" not in text
    assert text.splitlines()[-1].startswith("JSONDecodeError: Expecting")


def test_frames_of_files_in_the_workspace_are_kept() -> None:
    frames, _ = shortened(
        Failure(
            "KeyError",
            "'a'",
            (
                "-" * 75,
                "KeyError                                  Traceback (most recent call last)",
                "Cell In[3], line 1\n----> 1 helper.f()\n",
                "File /workspace/helper.py:7, in f()\n      5 def f():\n----> 7   return x['a']\n",
                "File /env/lib/python3.12/site-packages/pandas/core/x.py:3, in g(a)\n----> 3 g()\n",
                "File /workspace/.venv/lib/python3/site-packages/six.py:3, in h()\n----> 3 h()\n",
                "KeyError: 'a'",
            ),
        )
    )
    assert frames.splitlines() == [
        TITLE,
        "Cell In[3], line 1",
        "    helper.f()",
        "File /workspace/helper.py:7, in f()",
        "    return x['a']",
        "[… 2 frames inside pandas, six …]",
    ]


def test_a_syntax_error_shows_where(shell: InteractiveShell) -> None:
    lines = told(shell, "x = (1 +\ny = 2").splitlines()
    assert lines[-1].startswith("SyntaxError")
    assert any(line.strip("^ ") == "" and "^" in line for line in lines)


def test_chained_exceptions_keep_both_messages(shell: InteractiveShell) -> None:
    code = "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('why') from e"
    text = told(shell, code)
    assert "ZeroDivisionError: division by zero" in text
    assert "direct cause" in text
    assert text.splitlines()[-1] == "ValueError: why"
    assert text.count(TITLE) == 1


def test_a_message_that_looks_like_a_frame_is_kept(shell: InteractiveShell) -> None:
    text = told(shell, r"""raise ValueError('bad\n  File "x", line 3, in y')""")
    assert text.endswith('ValueError: bad\n  File "x", line 3, in y')


@pytest.mark.skipif(not hasattr(ValueError, "add_note"), reason="notes came with Python 3.11")
def test_notes_are_kept(shell: InteractiveShell) -> None:
    text = told(shell, "e = ValueError('m')\ne.add_note('a hint')\nraise e")
    assert text.endswith("ValueError: m\na hint")


def test_deep_recursion_is_short(shell: InteractiveShell) -> None:
    text = told(shell, "def r(n):\n    return r(n + 1)\nr(0)")
    assert len(text.splitlines()) < 20
    assert "RecursionError" in text.splitlines()[-1]


def test_frames_of_compiled_modules_are_counted_and_own_ones_kept() -> None:
    frames = (
        "Cell In[1], line 1\n----> 1 f()\n",
        'File "pandas/_libs/index.pyx", line 167, in pandas._libs.index.get_loc',
        'File "pandas/_libs/hashtable_class_helper.pxi", line 7081, in get_item',
        'File "src/lxml/etree.pyx", line 3, in lxml.etree.fromstring',
        'File "<stringsource>", line 1, in init',
        'File "own.pyx", line 2, in own.f',
    )
    text, _ = shortened(Failure("KeyError", "'a'", (*frames, "KeyError: 'a'")))
    assert text.splitlines()[3:] == [
        "[… 4 frames inside pandas, lxml …]",
        'File "own.pyx", line 2, in own.f',
    ]


def test_many_own_frames_are_cut_in_the_middle() -> None:
    frames = tuple(f"Cell In[1], line {n}, in f{n}()\n----> {n} f{n}()\n" for n in range(50))
    text, _ = shortened(Failure("E", "v", (*frames, "E: v")))
    assert "in f0()" in text
    assert "in f49()" in text
    assert "[… 30 frames …]" in text


def test_plain_python_tracebacks_are_read_too() -> None:
    code = "def f():\n    import json\n    json.loads('{')\nf()"
    with pytest.raises(ValueError, match="Expecting") as raising:
        exec(compile(code, "<string>", "exec"))
    title, _, *parts = traceback.format_exception(raising.value)
    for frames in ((title, *parts), ("".join((title, *parts)),)):
        text, message = shortened(Failure("JSONDecodeError", "x", frames))
        assert 'File "<string>", line 4, in <module>' in text
        assert "inside json" in text
        assert message.startswith("json.decoder.JSONDecodeError: Expecting")


@pytest.mark.parametrize("frames", [(), ("",), ("nothing of the kind",), ("-" * 75,)])
def test_the_exception_is_told_even_without_a_traceback(frames: tuple[str, ...]) -> None:
    _, message = shortened(Failure("ValueError", "the value", frames))
    assert message.startswith("ValueError: the value")


def test_hidden_characters_in_names_are_shown() -> None:
    _, message = shortened(Failure("E\u202e", "v\x1b[31m", ()))
    assert message == "E\\u202e: v"
