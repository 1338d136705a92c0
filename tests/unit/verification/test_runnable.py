from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status
from kernel_mcp.sessions.checking import LONG_CODE_CHARS
from kernel_mcp.verification.runnable import RunnableScript, runnable_script


def script_of(folder: Path, *codes: str) -> RunnableScript:
    ended = [
        Cell.ended(number, code, OutputLog(folder, number), CellOutcome(Status.OK), 0.1)
        for number, code in enumerate(codes, 1)
    ]
    return runnable_script(ended)


def printed(script: RunnableScript) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(compile(script.code, "script.py", "exec"), {"__name__": "__main__"})
    return written.getvalue().splitlines()


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("1 + 1", ["2"]),
        ("x = 1", []),
        ("None", []),
        ("'text'", ["'text'"]),
        ("'a'; 'b'", ["'b'"]),
        ("1;", []),
        ("1 ;  # quiet", []),
        ("1  # loud", ["1"]),
        ("print(5)", ["5"]),
        ("display(5, 'a')", ["5", "'a'"]),
        ("1, 2", ["(1, 2)"]),
        ("{3, 1, 2}, 1", ["({1, 2, 3}, 1)"]),
        ("{'b', 'a', 'c'}", ["{'a', 'b', 'c'}"]),
        ("{1, 'a'} - {'a'}", ["{1}"]),
        ("set()", ["set()"]),
        ("*range(3), 4", ["(0, 1, 2, 4)"]),
        ("(n for n in range(2))\n[n for n in range(2)]", ["[0, 1]"]),
        ("[\n  1,\n  2,\n]", ["[1, 2]"]),
        ('"""two\nlines"""', ["'two\\nlines'"]),
        ("caf\xe9 = 1; caf\xe9, '\xe9'", ["(1, '\xe9')"]),
        ("if True:\n    5", []),
        ("x = 3\nx if x else 4", ["3"]),
        ("lambda: 1\nsum(n for n in (1, 2))", ["3"]),
        ("%matplotlib inline\n4", ["4"]),
        ("if True:\n    !ls\n5", ["5"]),
        ("%%time\n6", ["6"]),
        ("%time 7", ["7"]),
        ("names = !ls\nnames", []),
        ("%%bash\necho 8", []),
        ("not python at all", []),
        ("import os.path as p; p.sep", ["'/'"]),
        ("async def f():\n    await g()\n9", ["9"]),
    ],
)
def test_a_cell_prints_what_it_showed(tmp_path: Path, code: str, lines: list[str]) -> None:
    assert printed(script_of(tmp_path, code)) == lines


def test_commands_of_ipython_are_comments(tmp_path: Path) -> None:
    made = script_of(tmp_path, "x = 1\n%config a\nif x:\n    !ls -l\nx", "x", "%%bash\necho 1", "=")
    assert made.replaced == (1, 3, 4)
    assert "pass  # %config a\n" in made.code
    assert "    pass  # !ls -l\n" in made.code
    assert "# =" in made.code


def test_modules_of_all_cells_are_found(tmp_path: Path) -> None:
    made = script_of(
        tmp_path,
        "import numpy as np, os.path",
        "def f():\n    from google.cloud import storage",
        "from . import own\nfrom .other import x\nfrom a.b import c",
        f"import long_one\n{'x = 1' + chr(10)}" * (LONG_CODE_CHARS // 20),
    )
    assert made.modules == {
        "numpy",
        "os.path",
        "google.cloud.storage",
        "a.b.c",
        "long_one",
    }


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("await f()", True),
        ("async with a: pass", True),
        ("x = [n async for n in a]", True),
        ("async def f():\n    await g()", False),
        ("f(await g())", True),
        ("lambda: 1", False),
    ],
)
def test_a_wait_outside_of_functions_is_told(tmp_path: Path, code: str, waits: bool) -> None:
    assert script_of(tmp_path, code).waits == ((1,) if waits else ())


def test_cells_that_failed_or_were_undone_are_left_out(tmp_path: Path) -> None:
    ended = [
        Cell.ended(number, f"{number}", OutputLog(tmp_path, number), CellOutcome(status), 0.1)
        for number, status in enumerate((Status.OK, Status.ERROR, Status.KILLED, Status.OK), 1)
    ]
    made = runnable_script(ended, {4})
    assert (made.cells, made.left) == (1, (2, 3, 4))
    assert printed(made) == ["1"]


def test_helpers_are_there_only_where_they_are_used(tmp_path: Path) -> None:
    assert "def " not in script_of(tmp_path, "x = 1").code
    assert "def display" not in script_of(tmp_path, "from x import display\ndisplay(1)").code
    assert script_of(tmp_path).code == ""


def test_metadata_of_a_cell_is_none_of_the_script(tmp_path: Path) -> None:
    made = script_of(tmp_path, '# /// script\n# dependencies = ["x"]\n# ///\n1')
    assert "\n# /// " not in f"\n{made.code}"
    assert printed(made) == ["1"]
