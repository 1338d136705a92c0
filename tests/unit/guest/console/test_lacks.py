"""Missing modules by an exception's objects, so that text from data shows nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernel_specs.restricted.config import FILE, HOST, NETWORK, NO_LOOP, READ_ONLY, TOO_LARGE
from kernel_specs.restricted.console.lacks import lacking

SAID = "\"No module named 'evil'\", name='evil'"
RAISED = f"raise ModuleNotFoundError({SAID})"
BEHIND = "try:\n    import missing_one\nexcept ImportError as error:\n    "

OPTIONAL = (
    "import importlib\n"
    "def optional(name):\n"
    "    try:\n"
    "        importlib.import_module(name)\n"
    "    except ImportError as error:\n"
    "        raise ImportError(f'Use pip or conda to install {name}.') from error\n"
)
"""As pandas imports what it can do without."""


def found(code: str) -> str:
    """Return what is missing by the exception that ends a cell with this code."""
    names = {"__name__": "__main__"}
    try:
        exec(compile(code, "<ipython-input-1-x>", "exec"), names)
    except BaseException as error:  # noqa: BLE001
        return lacking(error)
    raise AssertionError("it has not failed")


@pytest.mark.parametrize(
    "code",
    [
        "import missing_one",
        "from missing_one.part import x",
        "import importlib\nimportlib.import_module('missing_one')",
        "__import__('missing_one')",
        "def f():\n    import missing_one\nf()",
        "def g():\n    import missing_one\n    yield\nlist(g())",
        f"{BEHIND}raise",
        f"{OPTIONAL}def table():\n    optional('missing_one')\ntable()",
        f"{BEHIND}raise error",
        f"{BEHIND}raise RuntimeError('no plots') from error",
        f"{BEHIND}raise RuntimeError('no plots') from None",
        f"{BEHIND}error.__traceback__.tb_frame\n    1 / 0",
        f"{BEHIND}later = error\nwrap = ValueError()\nwrap.exceptions = (later,)\nraise wrap",
    ],
)
def test_an_import_that_fails_shows_its_module(code: str) -> None:
    assert found(code) == "missing_one"


def test_a_file_that_reaches_the_limit_is_told_from_one_that_code_says_so(tmp_path: Path) -> None:
    code = f"""
import resource
before = resource.getrlimit(resource.RLIMIT_FSIZE)
file = open({str(tmp_path / "large")!r}, "wb", buffering=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
try:
    file.write(b"x" * 1000)
    file.write(b"x")
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.close()
"""
    assert found(code) == TOO_LARGE
    assert found("raise OSError(27, 'File too large')") == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_shows_that_of_its_members() -> None:
    assert found(f"{BEHIND}raise ExceptionGroup('two', [ValueError(), error])") == "missing_one"
    assert found(f"raise ExceptionGroup('one', [ModuleNotFoundError({SAID})])") == ""


def test_a_part_of_a_package_is_named_whole() -> None:
    assert found("import xml.nothing.below") == "xml.nothing"


@pytest.mark.parametrize(
    "code",
    [
        RAISED,
        f"def f():\n    {RAISED}\nf()",
        f"raise ValueError({SAID.partition(',')[0]})",
        f"raise ImportError({SAID})",
        f"raise ImportError('pip install evil') from ModuleNotFoundError({SAID})",
        (
            "class ModuleNotFoundError(Exception):\n    name = 'evil'\n"
            "raise ModuleNotFoundError(\"No module named 'evil'\")"
        ),
        f"class Own(ModuleNotFoundError):\n    pass\nraise Own({SAID})",
        f"def g():\n    yield\nx = g(); next(x)\nx.throw(ModuleNotFoundError({SAID}))",
        (
            "from concurrent.futures import Future\n"
            f"f = Future(); f.set_exception(ModuleNotFoundError({SAID})); f.result()"
        ),
        "import pickle\npickle.loads(b'c' + bytes([101, 118, 105, 108]) + b'\\nx\\n.')",
        "import importlib\nimportlib.import_module(''.join(['ev', 'il']))",
        "__import__(bytes([101, 118, 105, 108]).decode())",
        (f"class Text(str):\n    pass\n{BEHIND}error.name = Text('evil'); raise"),
        f"{OPTIONAL}optional(''.join(['ev', 'il']))",
        "1 / 0",
        "error = ValueError(); error.__cause__ = error\nraise error",
        "error = KeyError(); error.exceptions = [1]\nraise error",
    ],
)
def test_what_only_says_so_shows_nothing(code: str) -> None:
    assert found(code) == ""


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("open('/home/nobody-at-all/sales.csv')", FILE),
        ("open('/workspace-of-others/x')", FILE),
        ("open('/tmp/not/there')", ""),
        ("open('not-there.csv')", ""),
        ("raise FileNotFoundError(2, 'No such file', '/home/me/x.csv')", ""),
        ("raise OSError(30, 'Read-only file system', '/mnt/x')", ""),
        ("import socket\nsocket.getaddrinfo('no', 80, flags=socket.AI_NUMERICHOST)", NETWORK),
        ("import socket\nraise socket.gaierror(-2, 'Name or service not known')", ""),
        ("raise OSError(101, 'Network is unreachable')", ""),
        ("import asyncio\nasyncio.get_running_loop()", NO_LOOP),
        ("raise RuntimeError('no running event loop')", ""),
        ('raise OSError("the operator\'s --network does not permit x")', ""),
        (
            (
                "import threading, unittest.mock\n"
                'refusal = OSError("403 the operator\'s --network does not permit a.b:443 here")\n'
                "unittest.mock.Mock(side_effect=refusal)()"
            ),
            HOST,
        ),
        (
            (
                "import unittest.mock\n"
                "unittest.mock.Mock(side_effect=OSError(30, 'Read-only file system', '/mnt/x'))()"
            ),
            READ_ONLY,
        ),
    ],
)
def test_paths_and_machines_are_shown_by_what_the_system_said(code: str, lacks: str) -> None:
    assert found(code) == lacks


def test_long_chains_and_deep_frames_are_bounded() -> None:
    code = (
        "error = None\n"
        "for _ in range(5000):\n"
        "    fresh = ValueError(); fresh.__cause__ = error; error = fresh\n"
        "raise error"
    )
    assert found(code) == ""
    assert found("def f(n):\n    f(n - 1) if n else __import__('missing_one')\nf(300)") == (
        "missing_one"
    )
