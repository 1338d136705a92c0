"""Functions and classes of cells, for code that looks for them in the file of `__main__`."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import linecache
import os
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_CELL = "<ipython-input-"
_FOLDER = ".definitions"
"""Folder below that of temporary files; a hidden one counts as a cache."""
_MAIN = """\
import cloudpickle as _cloudpickle
_lacks, _why = {lacks!r}, "it was defined after this process had started"
try:
    with open({path!r}, "rb") as _file:
        globals().update(_cloudpickle.load(_file))
except Exception as _error:
    _why = repr(_error)
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def lacking(*_, **__):
        raise AttributeError(f"{{name}} of the main module is not here: {{_lacks.get(name, _why)}}")
    return lacking
"""
"""The main module of a process. One that lacks a function must raise an error where that is called:
a pool would replace a process that fails before, without end."""


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
        data, main = original(name), sys.modules["__main__"]
        if "init_main_from_name" not in data and not _is_program(main):
            with contextlib.suppress(Exception):  # the process then reports what it lacks
                data["init_main_from_path"] = _write(vars(main))
        return data

    spawn.get_preparation_data = get_preparation_data


def _is_of_a_cell(value: Any) -> bool:
    return value.__module__ == "__main__" and not _is_program(sys.modules["__main__"])


def _is_program(main: ModuleType) -> bool:
    """Return True if the main module has a file of its own, which code alone may only claim."""
    file = getattr(main, "__file__", None)
    return file is not None and sys.argv[:1] == [file] and Path(file).is_file()


def _cell_of(kind: type) -> str:
    """Return the name of the cell that has defined a class, as far as it is known; or "".

    Its methods tell it. Without them it is the latest cell with a class of this name.
    """
    for value in vars(kind).values():
        method = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(method, FunctionType) and method.__qualname__.startswith(
            f"{kind.__qualname__}."
        ):
            file = method.__code__.co_filename
            if file.startswith(_CELL) and file in linecache.cache:
                return file
    cells = [name for name in linecache.cache if name.startswith(_CELL)]
    return next((name for name in reversed(cells) if _defines(name, kind.__name__)), "")


def _defines(cell: str, name: str) -> bool:
    text = "".join(linecache.getlines(cell))
    if "class" not in text or name not in text:
        return False
    try:
        nodes = ast.walk(ast.parse(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # a cell that has not run
        return False
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in nodes)


def _write(namespace: Mapping[str, Any]) -> str:
    """Write a main module with the functions and classes of cells; return its path."""
    kinds = FunctionType, type, _CACHED
    found = {
        name: value
        for name, value in namespace.copy().items()  # type: ignore[attr-defined]
        if isinstance(value, kinds) and _is_of_a_cell(value)
    }
    lacks: dict[str, str] = {}
    try:
        dump = _pickled(found)
    except Exception:  # noqa: BLE001  # whatever values raise that they refer to
        lacks = {name: why for name, value in found.items() if (why := _refusal(value))}
        dump = _pickled({name: value for name, value in found.items() if name not in lacks})
    folder = Path(tempfile.gettempdir()) / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid()}.pickle"
    _replace(path, dump)
    main = path.with_suffix(".py")
    _replace(main, _MAIN.format(path=str(path), lacks=lacks).encode("utf-8", "backslashreplace"))
    return str(main)


def _refusal(value: object) -> str:
    """Return the error that pickling a value raises; empty for none."""
    try:
        _pickled(value)
    except Exception as error:  # noqa: BLE001  # whatever its values raise
        return repr(error)
    return ""


_CACHED = type(functools.lru_cache(len))


def _pickled(value: object) -> bytes:
    """Pickle functions and classes by value. Raises what values raise that they refer to."""
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles what `__main__` has by value; a new process has nothing of it yet."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _CACHED):
                size, typed = obj.cache_parameters().values()
                parts = obj.__wrapped__, size, typed, functools._CacheInfo
                return _CACHED, parts, vars(obj)
            if isinstance(obj, typing.NewType) and obj.__module__ == "__main__":
                return typing.NewType, (obj.__name__, obj.__supertype__)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _replace(path: Path, data: bytes) -> None:
    """Write a file at once: a process that starts meanwhile reads the old one or the new one."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
