"""Refuse user code modules outside the policy, and builtins (`without`).

A guard rail for well-meaning code; the security boundary is the sandbox. Code under the read-only
runtime may import anything and keeps Python's builtins, so libraries work.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.console.tracebacks import IMPORT_GUARD

CELL_PREFIX = "<ipython-input-"
"""Prefix of file names of cells: user code, though they look like other generated code."""
IMPLICIT = frozenset({"__future__", "__main__", "_codecs", "_strptime", "builtins", "copyreg"})
"""Modules that C code imports from the caller's frame, as `datetime.strptime` does."""
LISTED = 80


class ModuleNotAllowedError(ImportError):
    """User code has imported a module outside the policy."""

    __module__ = "builtins"  # shown to the user without the name of this file

    def __init__(self, name: str, allowed: Iterable[str]) -> None:
        names = sorted(allowed)
        listed = ", ".join(names[:LISTED])
        if len(names) > LISTED:
            listed += f" and {len(names) - LISTED} more"
        root = name.partition(".")[0]
        super().__init__(
            f"import of {name!r} is not allowed in this session. Allowed: {listed or 'nothing'}. "
            f"Start the server with --allow {root} (or --allow '*') to permit it.",
            name=name,
        )


class ImportGuard:
    """Wraps `__import__` and `importlib.import_module`.

    The caller is judged by the file its code was compiled from: `__name__` can be forged with
    `exec`, a file name needs `compile`.
    """

    def __init__(self, boot: BootConfig) -> None:
        """Read policy and trusted prefixes from boot.json."""
        self._allowed: frozenset[str] = frozenset()
        self._parents: frozenset[str] = frozenset()
        self._trusted_folders = _folders([*boot.runtime, *boot.layers, *_interpreter_folders()])
        self._own_folders = _folders({boot.workspace, boot.start} - {""})
        self._others_inside = tuple(
            each for each in self._trusted_folders if each.startswith(self._own_folders)
        )
        implicit = IMPLICIT - {"builtins"} if boot.policy.deny_builtins else IMPLICIT
        self._open_names: dict[str, bool] = dict.fromkeys(implicit, True)
        self._trusted_files: dict[str, bool | None] = {}
        self.allow(boot.policy.modules)

    def allow(self, names: Iterable[str]) -> None:
        """Add modules to those that user code may import; safe from any thread."""
        added = frozenset(names)
        self._parents |= {
            name.rsplit(".", depth)[0] for name in added for depth in range(1, name.count(".") + 1)
        }
        self._allowed |= added
        for name in [name for name, known in list(self._open_names.items()) if not known]:
            self._open_names.pop(name, None)
        self._open_names.update(dict.fromkeys(added, True))

    def install(self) -> None:
        """Replace the import functions of this process."""
        open_names, trusted_files = self._open_names, self._trusted_files
        original: Callable[..., ModuleType] = builtins.__import__
        original_import_module = importlib.import_module
        current_frame = sys._getframe
        check = self.check

        def guarded_import(
            name: str,
            globals: Any = None,  # noqa: A002
            locals: Any = None,  # noqa: A002
            fromlist: Sequence[str] = (),
            level: int = 0,
        ) -> ModuleType:
            if level or not open_names.get(name):
                frame = current_frame(1)
                if not trusted_files.get(frame.f_code.co_filename):
                    check(frame, name, globals, fromlist, level, locals)
            return original(name, globals, locals, fromlist, level)

        def import_module(name: str, package: str | None = None) -> ModuleType:
            """Import a module, as importlib.import_module."""
            full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
            check(current_frame(1), full, None, (), 0)
            return original_import_module(name, package)

        for function in (guarded_import, import_module):
            function.__code__ = function.__code__.replace(co_filename=IMPORT_GUARD)
        guarded_import.__name__ = guarded_import.__qualname__ = "__import__"
        builtins.__import__ = importlib.__import__ = guarded_import  # type: ignore[assignment]
        importlib.import_module = import_module

    def check(
        self,
        frame: FrameType,
        name: str,
        namespace: dict[str, Any] | None,
        fromlist: Sequence[str] | None,
        level: int,
        local: Any = None,
    ) -> None:
        """Raise ModuleNotAllowedError unless the code of `frame` may import this.

        The parameters after `name` are arguments of `__import__`.
        """
        if self._is_trusted(frame, namespace):
            return
        if namespace is not None and local is namespace and _is_by_c_code(frame, fromlist, level):
            return
        if level:
            package = (namespace or {}).get("__package__") or ""
            name = importlib.util.resolve_name("." * level + name, package)
        if self._is_open(name):
            return
        if name in self._parents:
            for item in fromlist or ():
                full = f"{name}.{item}"
                if not (item.startswith("__") or full in self._parents or self._is_open(full)):
                    raise ModuleNotAllowedError(full, self._allowed)
        elif not self._is_own(name.partition(".")[0]):
            raise ModuleNotAllowedError(name, self._allowed)

    def _is_open(self, name: str) -> bool:
        known = self._open_names.get(name)
        if known is None:
            parts = name.split(".")
            known = any(".".join(parts[:end]) in self._allowed for end in range(1, len(parts) + 1))
            self._open_names[name] = known
        return known

    def _is_trusted(self, frame: FrameType | None, namespace: dict[str, Any] | None) -> bool:
        """Return True if the runtime imports, not user code; the nearest frame with a file decides.

        Extension modules have no frame: they are recognised by their globals, `namespace`.
        """
        if (
            frame is not None
            and namespace is not None
            and namespace is not frame.f_globals
            and self._is_runtime_module(namespace)
        ):
            return True  # an extension module, whose own code has no frame
        while frame is not None:
            verdict = self._judge(frame.f_code.co_filename)
            if verdict is not None:
                return verdict
            frame = frame.f_back
        return False

    def _judge(self, filename: str) -> bool | None:
        """Return True for a file of the runtime, False for user code, None for generated code."""
        try:
            return self._trusted_files[filename]
        except KeyError:
            pass
        verdict: bool | None
        if filename.startswith(CELL_PREFIX):
            verdict = False
        elif filename.startswith("<frozen "):
            verdict = True
        elif filename.startswith("<") or not filename:
            verdict = None
        else:
            verdict = filename.startswith(self._trusted_folders) and not self.owns(filename)
        self._trusted_files[filename] = verdict
        return verdict

    def _is_runtime_module(self, namespace: dict[str, Any]) -> bool:
        module = sys.modules.get(str(namespace.get("__name__")))
        return (
            module is not None
            and vars(module) is namespace
            and self._judge(str(namespace.get("__file__"))) is True
        )

    def owns(self, path: str) -> bool:
        """Return True for a path in the session's own folders, apart from environments in them."""
        return path.startswith(self._own_folders) and not path.startswith(self._others_inside)

    def _is_own(self, root: str) -> bool:
        """Return True if the module's files are all in the session's own folders."""
        if not self._own_folders:
            return False
        module = sys.modules.get(root)
        if module is not None:
            places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        elif root in sys.builtin_module_names:
            return False
        else:
            spec = importlib.machinery.PathFinder.find_spec(root)
            if spec is None:
                return False
            places = [spec.origin, *(spec.submodule_search_locations or ())]
        places = [f"{place}/" for place in places if place]
        return bool(places) and all(map(self.owns, places))


def _is_by_c_code(frame: FrameType, fromlist: Sequence[str] | None, level: int) -> bool:
    """Return True if `PyImport_Import` calls: C code has no frame, so its caller's is seen.

    It passes an empty list, and the caller's globals twice. A statement passes None or a tuple; a
    call of `__import__` by name is never taken for C code.
    """
    empty_list = type(fromlist) is list and not fromlist and level == 0
    return empty_list and "__import__" not in frame.f_code.co_names


def _interpreter_folders() -> list[str]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [*(paths[name] for name in names), str(Path(__file__).parent.parent)]


def _folders(paths: Iterable[str]) -> tuple[str, ...]:
    """Return prefixes with a final slash, of the paths as given and resolved."""
    found = {str(Path(path)) for path in paths}
    found |= {str(Path(path).resolve()) for path in found}
    return tuple(sorted(path.rstrip("/") + "/" for path in found))


_INSTEAD = {
    "__import__": "write an import statement",
    "breakpoint": "print what you want to see",
    "input": "pass what the code needs as variables",
}


class BuiltinNotAllowedError(PermissionError):
    """User code called a builtin that the policy denies."""

    __module__ = "builtins"  # shown to the user without the name of this file

    def __init__(self, name: str, profile: str) -> None:
        way = _INSTEAD.get(name, f"the {profile} profile does without it")
        super().__init__(
            f"{name} is not allowed in this session; {way}. "
            "Start the server with --profile default to permit it."
        )


def without(names: Iterable[str], profile: str, guard: ImportGuard) -> ModuleType:
    """Return a builtins module in which each of `names` raises; requires an installed `guard`."""
    module = ModuleType("builtins", builtins.__doc__)
    content = vars(module)
    content.update(vars(builtins))
    for name in names:
        statement = name == "__import__"
        content[name] = _statements_only(guard, profile) if statement else _refusing(name, profile)
    return module


def give_to_modules(owns: Callable[[str], bool], own_builtins: ModuleType) -> None:
    """Run modules for whose files `owns` is true with `own_builtins`."""
    loaders: tuple[Any, ...] = (
        importlib.machinery.SourceFileLoader,
        importlib.machinery.SourcelessFileLoader,
    )
    for loader in loaders:
        _wrap(loader, owns, own_builtins)


def _wrap(loader: Any, owns: Callable[[str], bool], own_builtins: ModuleType) -> None:
    original: Callable[[Any, ModuleType], None] = loader.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        """Execute the module."""
        if owns(self.path):
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
    """Return an `__import__` for import statements that raises if it is called as a function."""
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
