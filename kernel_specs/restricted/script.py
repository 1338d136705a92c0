"""Run a cell as a whole script, which begins and ends as `python script.py` does."""

from __future__ import annotations

import ast
import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kernel_specs.restricted.console import tracebacks

ExitCall = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


class Script:
    """Runs the next cell of `shell` as a script, and restores what that changes afterwards."""

    def __init__(self, shell: Any, file: Path) -> None:
        """`file` becomes `__file__`; the script is written there."""
        self._shell = shell
        self._file = file
        self._exits = _ExitCalls(shell._cell_name)
        self._threads: frozenset[threading.Thread] = frozenset()
        self._begun = False

    def expect(self) -> None:
        """Register for the begin and end of the next cell."""
        self._shell.events.register("pre_run_cell", self._begin)
        self._shell.events.register("post_run_cell", self._end)

    def _begin(self, cell: Any) -> None:
        self._begun = True
        with contextlib.suppress(OSError):  # needed by child processes alone
            self._file.write_text(cell.raw_cell, encoding="utf-8")
        sys.argv = [str(self._file)]
        self._shell.user_ns.update(
            __file__=str(self._file), __doc__=_docstring(cell.raw_cell), exit=_leave, quit=_leave
        )
        self._threads = frozenset(threading.enumerate())
        self._exits.record()

    def _end(self, result: Any) -> None:
        """Run the steps of Python's exit in their order: threads, then exit functions."""
        self._shell.events.unregister("pre_run_cell", self._begin)
        self._shell.events.unregister("post_run_cell", self._end)
        if not self._begun:
            return
        try:
            if not isinstance(result.error_in_exec, KeyboardInterrupt):
                for call in reversed(getattr(threading, "_threading_atexits", ())):
                    self._exits.call(call)  # executors end their idle threads
                _wait_for_threads(self._threads)
                self._exits.run()
        except KeyboardInterrupt as interrupt:
            result.error_in_exec = interrupt
            self._shell.showtraceback()
        finally:
            self._exits.restore()
            sys.argv = [""]


class _ExitCalls:
    """The exit functions of a script, and other work that Python does at exit."""

    def __init__(self, cell_name: tracebacks.CellName) -> None:
        self._cell_name = cell_name
        self._calls: list[ExitCall] = []
        self._module: Any = atexit
        self._original = atexit.register, atexit.unregister
        self._finalizers: frozenset[Any] = frozenset()
        self._workers = False

    def record(self) -> None:
        """Record the functions that are registered from here on."""
        self._module.register, self._module.unregister = self._register, self._unregister
        self._finalizers = frozenset(_finalizers())
        self._workers = "multiprocessing.util" in sys.modules

    def restore(self) -> None:
        """Restore the functions of `atexit`."""
        self._module.register, self._module.unregister = self._original

    def run(self) -> None:
        """Call all recorded functions, the last first; then end, or wait for, child processes."""
        while self._calls:
            function, args, options = self._calls.pop()
            self.call(partial(function, *args, **options))
        for finalizer in _finalizers():
            if finalizer not in self._finalizers:
                self.call(finalizer)
        if self._workers:  # its exit function was registered before `record`
            self.call(sys.modules["multiprocessing.util"]._exit_function)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function; print its exception instead of raising it."""
        try:
            function()
        except SystemExit:
            return
        except Exception as error:  # noqa: BLE001  # as Python, which goes on with the next one
            lines = tracebacks.format_exception(
                type(error), error, error.__traceback__, self._cell_name
            )
            print("Exception ignored at the end of the script:", *lines, sep="\n", file=sys.stderr)

    def _register(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Register a function to be called when the script ends, as atexit.register."""
        self._calls.append((func, args, kwargs))
        return func

    def _unregister(self, func: Callable[..., object], /) -> None:
        """Remove a registered function, as atexit.unregister."""
        self._calls[:] = [call for call in self._calls if call[0] != func]
        self._original[1](func)


def _leave(code: object = None) -> NoReturn:
    raise SystemExit(code)


def _wait_for_threads(before: Iterable[threading.Thread]) -> None:
    known = {*before, threading.current_thread()}
    while left := [each for each in threading.enumerate() if not (each.daemon or each in known)]:
        for thread in left:
            thread.join()


def _finalizers() -> list[Any]:
    registry = vars(weakref.finalize)["_registry"]
    return [finalizer for finalizer in reversed(list(registry)) if finalizer.atexit]


def _docstring(source: str) -> str | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.get_docstring(ast.parse(source), clean=False)
    return None


def place(workspace: str, name: str) -> Path:
    """Return the path of a script of this name."""
    return Path(workspace or os.getcwd()) / name  # noqa: PTH109
