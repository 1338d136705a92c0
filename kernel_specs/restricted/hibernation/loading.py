"""Load the variables of a dump into a shell, within limits of time for each.

Every variable succeeds or fails by itself; a failed one is named with a reason.
"""

# The shell is a traitlets class.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kernel_specs.restricted.hibernation.attempt_limits import Attempts, Watch
from kernel_specs.restricted.hibernation.dumps import RESULT, Arrival
from kernel_specs.restricted.hibernation.notebook_pickler import NotebookUnpickler
from kernel_specs.restricted.hibernation.objects import import_module
from kernel_specs.restricted.hibernation.process_state import NAME as SETTING
from kernel_specs.restricted.originals import os, warnings


class Loading:
    """Loads an arrived dump into `shell`, the history first, in one step or in several."""

    def __init__(self, shell: Any, arrival: Arrival) -> None:
        self._shell = shell
        self._arrival = arrival
        self._header = arrival.header
        self._hidden = set(arrival.header.get("hidden", ()))  # none in a dump of an earlier version
        self._segments: list[dict[str, Any]] = list(arrival.header["segments"])
        self._unpickler: NotebookUnpickler | None = None
        self._nans: dict[int, float] = {}
        self._classes: list[type] = []
        self._names: list[str] = []
        self._modules: Mapping[str, list[str]] = {}
        self._values: dict[str, Any] = {}
        self._behind: list[str] = []
        self._leave: set[str] = set()
        self._ask: Callable[[], object] = bool
        """The `ask` of the current step's watch."""
        self._settings: list[str] = []
        """Names of settings that are loaded, to be written last."""
        _restore_history(shell, self._header)

    def step(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Load `count` variables (0 for all), except those named in `leave` of any step so far.

        `seconds` of processor time are for all of them, and as many again for their imports. The
        reply has the `names` loaded, and `lost` ones with reasons. Further fields are names stored
        `behind` an unreadable one, the number `left`, and paths in `files` that are `missing`.
        Raises StoppedError. Raises ValueError or OSError for an incomplete dump: then no variable
        of it stays.
        """
        self._leave |= set(content["leave"])
        before = set(self._values)
        done = len(self._behind)
        with Watch() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._ask = watch.ask
            attempts = Attempts(watch, content["seconds"])
            imports = Attempts(watch, content["seconds"])
            count = content["count"] or sys.maxsize
            while count and (name := self._next()) is not None:
                for module in self._modules.get(name, ()):
                    if module not in sys.modules:
                        imports.do(module, partial(import_module, module, []))
                if not attempts.do(name, partial(self._load, name)):
                    self._behind += self._names
                    self._names = []
                count -= 1
        order = [name for name in self._header["order"] if name in self._values]
        lost = dict(attempts.lost)
        if not self._left:
            lost |= self._finish(order, content["seconds"])
        return {
            "names": [name for name in order if name not in before],
            "lost": lost,
            "behind": self._behind[done:],
            "left": self._left,
            "missing": [path for path in content["files"] if not os.path.lexists(path)],
        }

    @property
    def _left(self) -> int:
        return len(self._names) + sum(len(segment["names"]) for segment in self._segments)

    def close(self) -> None:
        """Close the dump and drop loaded values: pandas counts references to its blocks."""
        self._arrival.close()
        self._unpickler = None
        self._values = {}

    def _next(self) -> str | None:
        """Return the next name, or None at the end; open the next segment when one is finished.

        Raises ValueError, OSError, MemoryError, and removes all loaded variables then.
        """
        while not self._names and self._segments:
            segment = self._segments.pop(0)
            self._names = [name for name in segment["names"] if name not in self._leave]
            self._modules = segment["modules"]
            self._unpickler = None  # its memory is free before the next is read
            try:
                pickles, buffers = self._arrival.segment(segment)
            except (ValueError, OSError, MemoryError):
                self._forget()
                raise
            self._unpickler = NotebookUnpickler(
                pickles,
                iter(buffers),
                nans=self._nans,
                classes=self._classes,
                ask=lambda: self._ask(),
            )
        return self._names.pop(0) if self._names else None

    def _forget(self) -> None:
        self._shell.drop_by_id(self._values)
        self._values.clear()

    def _load(self, name: str) -> None:
        assert self._unpickler is not None
        self._values[name] = value = self._unpickler.load()[0]
        if SETTING.fullmatch(name):
            if self._shell.process_state.is_early(name):
                self._shell.process_state.write(name, value)
            else:
                self._settings.append(name)
        elif not RESULT.fullmatch(name):
            self._shell.push({name: value}, interactive=name not in self._hidden)

    def _finish(self, order: list[str], seconds: float) -> dict[str, str]:
        """Restore the order of the names, IPython's `Out`, and the settings of the process.

        Returns reasons by name for settings that cannot be written.
        """
        names = self._shell.user_ns
        for name in order:
            if name in names:
                names[name] = names.pop(name)
        _restore_results(self._shell, self._values)
        with Watch() as watch:
            attempts = Attempts(watch, seconds)
            for name in self._settings:
                write = partial(self._shell.process_state.write, name, self._values[name])
                attempts.do(name, write)
        return attempts.lost


def _restore_results(shell: Any, values: Mapping[str, Any]) -> None:
    found = {int(name[4:-1]): value for name, value in values.items() if RESULT.fullmatch(name)}
    shell.user_ns["_oh"].update(found)
    names = {f"_{number}": value for number, value in found.items()}
    for name, number in zip(("_", "__", "___"), sorted(found, reverse=True), strict=False):
        if name not in values:  # code has given it another meaning, which IPython respects
            names[name] = found[number]
            setattr(shell.displayhook, name, found[number])
    shell.push(names, interactive=False)


def _restore_history(shell: Any, header: Mapping[str, Any]) -> None:
    for name, number, text in header["sources"]:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        if number is not None:
            shell.compile._filename_map[name] = number
    manager = shell.history_manager
    manager.input_hist_parsed[:], manager.input_hist_raw[:] = header["inputs"]
    shell.execution_count = header["execution_count"]
