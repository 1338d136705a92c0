"""Builtins that the policy takes away from user code: the strict profile's files and `eval`.

Cells and modules of the workspace get a builtins module of their own, in which these functions
refuse; libraries keep Python's, so what is allowed goes on working inside. A guard rail, like the
import guard: the sandbox is what holds.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kernel_specs.restricted.guard import ImportGuard
from kernel_specs.restricted.tracebacks import IMPORT_GUARD

_INSTEAD = {
    "__import__": "write an import statement",
    "breakpoint": "print what you want to see",
    "input": "pass what the code needs as variables",
    "open": "files go in and out by the tools write_file and read_file",
}


class BuiltinNotAllowedError(PermissionError):
    """User code called a builtin that the policy takes away."""

    __module__ = "builtins"  # shown to the user without the name of this file

    def __init__(self, name: str, profile: str) -> None:
        """`name` is the builtin that was called."""
        way = _INSTEAD.get(name, f"the {profile} profile does without it")
        super().__init__(
            f"{name} is not allowed in this session; {way}. "
            "Start the server with --profile default to permit it."
        )


def without(names: Iterable[str], profile: str, guard: ImportGuard) -> ModuleType:
    """A builtins module in which each of `names` refuses; `guard` has to be installed already."""
    module = ModuleType("builtins", builtins.__doc__)
    content = vars(module)
    content.update(vars(builtins))
    for name in names:
        statement = name == "__import__"
        content[name] = _statements_only(guard, profile) if statement else _refusing(name, profile)
    return module


def give_to_modules_in(folders: tuple[str, ...], own_builtins: ModuleType) -> None:
    """Run modules whose files lie below `folders`, each ending in a slash, with `own_builtins`."""
    loaders: tuple[Any, ...] = (
        importlib.machinery.SourceFileLoader,
        importlib.machinery.SourcelessFileLoader,
    )
    for loader in loaders:
        _wrap(loader, folders, own_builtins)


def _wrap(loader: Any, folders: tuple[str, ...], own_builtins: ModuleType) -> None:
    original: Callable[[Any, ModuleType], None] = loader.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        """Execute the module."""
        if self.path.startswith(folders):
            vars(module)["__builtins__"] = own_builtins
        original(self, module)

    exec_module.__code__ = exec_module.__code__.replace(co_filename=IMPORT_GUARD)
    loader.exec_module = exec_module


def _refusing(name: str, profile: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BuiltinNotAllowedError(name, profile)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Not allowed in this session."
    refuse.__code__ = refuse.__code__.replace(co_filename=IMPORT_GUARD)
    return refuse


def _statements_only(guard: ImportGuard, profile: str) -> Callable[..., ModuleType]:
    """`__import__` as the import statement needs it, which refuses to be called as a function."""
    guarded: Callable[..., ModuleType] = builtins.__import__
    current_frame, check = sys._getframe, guard.check

    def imported(
        name: str,
        globals: Any = None,  # noqa: A002
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        if globals is None:  # a statement always passes them, and so does C code
            raise BuiltinNotAllowedError("__import__", profile)
        check(current_frame(1), name, globals, fromlist, level, locals)
        return guarded(name, globals, locals, fromlist, level)

    imported.__code__ = imported.__code__.replace(co_filename=IMPORT_GUARD)
    imported.__name__ = imported.__qualname__ = "__import__"
    return imported
