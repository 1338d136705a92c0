"""Loads a dump into a kernel, at once or step by step, and lists files that end with a kernel."""

# The shell is a traitlets class.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import builtins
import io
import linecache
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_specs.restricted.hibernation.attempt_limits import Attempts, Watch
from kernel_specs.restricted.hibernation.dumps import RESULT, Arrival
from kernel_specs.restricted.hibernation.pickles import IMPORT

SHARED_MEMORY = "/dev/shm"
MAX_FILES = 100
MAX_ENTRIES = 20_000
MAX_PATH_CHARS = 200


def left_files(tmp: str) -> list[str]:
    """Paths of files below `tmp` and in shared memory, at most `MAX_FILES`.

    Reads at most `MAX_ENTRIES` entries. Folders of `tmp` with a dot hold caches, see `confine`.
    """
    found: list[str] = []
    looked = 0
    for root in (tmp, SHARED_MEMORY):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if folder != tmp or name[0] != ".")
            for path in (f"{folder}/{name}" for name in sorted(names)):
                looked += 1
                if len(found) == MAX_FILES or looked > MAX_ENTRIES:
                    return found
                if _is_file(path) and len(path) <= MAX_PATH_CHARS:
                    found.append(path)
    return found


def _is_file(path: str) -> bool:
    try:
        path.encode()
        return Path(path).is_file()
    except (OSError, UnicodeError):
        return False


class Loading:
    """Loads an arrived dump into `shell`, the history first, in one step or in several."""

    def __init__(self, shell: Any, arrival: Arrival) -> None:
        self._shell = shell
        self._header = arrival.header
        self._segments = list(zip(arrival.header["segments"], arrival.segments, strict=True))
        arrival.segments = []
        self._unpickler: pickle.Unpickler | None = None
        self._names: list[str] = []
        self._modules: Mapping[str, list[str]] = {}
        self._values: dict[str, Any] = {}
        self._behind: list[str] = []
        self._leave: set[str] = set()
        _restore_history(shell, self._header)

    def step(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Load `count` variables, or all with 0, except those that a step named in `leave`.

        `seconds` of processor time are for all of them, and as many again for their imports. The
        reply has `names` loaded, `lost` with reasons, `behind` stored after an unreadable one, the
        number `left`, and of the paths in `files` those `missing` here. Raises KeyboardInterrupt.
        """
        self._leave |= set(content["leave"])
        before = set(self._values)
        done = len(self._behind)
        with Watch() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempts = Attempts(watch, content["seconds"])
            imports = Attempts(watch, content["seconds"])
            count = content["count"] or sys.maxsize
            while count and (name := self._next()) is not None:
                for module in self._modules.get(name, ()):
                    if module not in sys.modules:
                        imports.do(module, partial(_import, module))
                if not attempts.do(name, partial(self._load, name)):
                    self._behind += self._names
                    self._names = []
                count -= 1
        order = [name for name in self._header["order"] if name in self._values]
        if not self._left:
            self._finish(order)
        return {
            "names": [name for name in order if name not in before],
            "lost": attempts.lost,
            "behind": self._behind[done:],
            "left": self._left,
            "missing": [path for path in content["files"] if not os.path.lexists(path)],
        }

    @property
    def _left(self) -> int:
        return len(self._names) + sum(len(segment["names"]) for segment, _ in self._segments)

    def _next(self) -> str | None:
        """The next name; opens the next segment when one is read."""
        while not self._names and self._segments:
            segment, (pickles, buffers) = self._segments.pop(0)
            self._names = [name for name in segment["names"] if name not in self._leave]
            self._modules = segment["modules"]
            file = io.BytesIO(pickles)
            pickles.clear()
            self._unpickler = pickle.Unpickler(file, buffers=buffers)
        return self._names.pop(0) if self._names else None

    def _load(self, name: str) -> None:
        assert self._unpickler is not None
        self._values[name] = value = self._unpickler.load()[0]
        if not RESULT.fullmatch(name):
            self._shell.user_ns[name] = value

    def _finish(self, order: list[str]) -> None:
        """Order the names, and put results into IPython's."""
        names = self._shell.user_ns
        for name in order:
            if name in names:
                names[name] = names.pop(name)
        _restore_results(self._shell, self._values)


def _import(name: str) -> None:
    """Import as a cell would: the import policy applies."""
    eval(IMPORT, {"__builtins__": builtins, "name": name})


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
