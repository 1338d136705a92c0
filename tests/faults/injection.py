"""Makes single calls of kernel_mcp fail: its modules are loaded with every seam's call wrapped."""

from __future__ import annotations

import ast
import builtins
import errno
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.faults.seams import PACKAGE, SEAMS, Names, place_of

WRAPPER = "__kernel_mcp_seam__"

FAILURES: dict[str, Callable[[], Exception]] = {
    "EMFILE": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "ENOENT": lambda: OSError(errno.ENOENT, os.strerror(errno.ENOENT)),
    "RuntimeError": lambda: RuntimeError("can't start new thread"),
    "MemoryError": MemoryError,
}
DONE_ALL_THE_SAME = ("os.close", "kernel_specs.linux.close_all")
"""Calls that report a failure after they have done their work: close(2) on Linux."""


class Faults:
    """Which calls were made since `listen`, and the one that fails next."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.fired = False
        self._heard: dict[str, None] = {}
        self._place = ""
        self._failure: Callable[[], Exception] = MemoryError

    def install(self) -> None:
        """Wrap the calls of every module of kernel_mcp that is imported from now on."""
        setattr(builtins, WRAPPER, self._call)
        sys.meta_path.insert(0, _Finder(self))

    def listen(self) -> None:
        """Forget the calls so far."""
        self._heard = {}

    @property
    def heard(self) -> list[str]:
        """The places of calls since then, in order."""
        return list(self._heard)

    def arm(self, place: str, failure: Callable[[], Exception]) -> None:
        """Let the next call at this place fail."""
        self.fired = False
        self._place, self._failure = place, failure

    def disarm(self) -> None:
        """Let no call fail."""
        self._place = ""

    def _call(self, place: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._heard[place] = None
        if place == self._place:
            self._place, self.fired = "", True
            if self.names[place] in DONE_ALL_THE_SAME:
                function(*args, **kwargs)
            raise self._failure()
        return function(*args, **kwargs)


class _Wrapping(ast.NodeTransformer):
    def __init__(self, path: Path, names: Names, faults: Faults) -> None:
        self._path = path
        self._names = names
        self._faults = faults

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self._names.of(node.func)
        place = place_of(self._path, node)
        self.generic_visit(node)
        if name not in SEAMS:
            return node
        self._faults.names[place] = name
        wrapper = ast.Name(WRAPPER, ast.Load())
        wrapped = ast.Call(wrapper, [ast.Constant(place), node.func, *node.args], node.keywords)
        return ast.copy_location(wrapped, node)


class _Loader(importlib.machinery.SourceFileLoader):
    faults: Faults

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree = _Wrapping(path, Names(tree), self.faults).visit(tree)
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec")
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            loader = _Loader(fullname, spec.origin)
            loader.faults = self._faults
            spec.loader = loader
        return spec
