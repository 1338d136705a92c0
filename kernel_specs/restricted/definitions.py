"""Functions and classes of cells, for code that looks for them in the file of `__main__`."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

_CELL = "<ipython-input-"
_NAME = re.compile(r"\w*")
_FOLDER = ".definitions"
"""Folder below that of temporary files; a hidden one counts as a cache."""
_MAIN = """\
import cloudpickle
with open({path!r}, "rb") as _file:
    globals().update(cloudpickle.load(_file))
"""


def find_sources() -> None:
    """Make `inspect.getsource` find classes of cells, as it finds functions."""
    original = inspect.getfile

    def getfile(object: Any) -> str:  # noqa: A002  # its name in `inspect`
        """Return the file that defines an object, or the name of the cell."""
        name = _cell_of(object) if isinstance(object, type) and _is_of_a_cell(object) else ""
        return name or original(object)

    inspect.getfile = getfile


def follow_spawn(spawn: Any) -> None:
    """Let processes that are not forked find what cells define: they import the main module."""
    original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        """Return what a new process needs, with a main module that has the definitions."""
        data = original(name)
        if not data.keys() & {"init_main_from_name", "init_main_from_path"}:
            with contextlib.suppress(Exception):  # the process then reports what it lacks
                data["init_main_from_path"] = _write(vars(sys.modules["__main__"]))
        return data

    spawn.get_preparation_data = get_preparation_data


def _is_of_a_cell(value: Any) -> bool:
    return value.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _cell_of(kind: type) -> str:
    """Return the name of the latest cell with a class of this name; empty for none."""
    for name in reversed([name for name in linecache.cache if name.startswith(_CELL)]):
        for line in linecache.getlines(name):
            word, _, rest = line.strip().partition(" ")
            if word == "class" and _NAME.match(rest.lstrip())[0] == kind.__name__:  # type: ignore[index]
                return name
    return ""


def _write(namespace: Mapping[str, Any]) -> str:
    """Write a main module with the functions and classes of cells; return its path."""
    import cloudpickle  # type: ignore[import-untyped]

    found = {
        name: value
        for name, value in namespace.copy().items()  # type: ignore[attr-defined]
        if isinstance(value, FunctionType | type) and _is_of_a_cell(value)
    }
    try:
        dump = cloudpickle.dumps(found)
    except Exception:  # noqa: BLE001  # whatever values raise that they refer to
        dump = cloudpickle.dumps({name: each for name, each in found.items() if _pickles(each)})
    folder = Path(tempfile.gettempdir()) / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid()}.pickle"
    _replace(path, dump)
    _replace(main := path.with_suffix(".py"), _MAIN.format(path=str(path)).encode())
    return str(main)


def _pickles(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001  # whatever its values raise
        return False
    return True


def _replace(path: Path, data: bytes) -> None:
    """Write a file at once: a process that starts meanwhile reads the old one or the new one."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
