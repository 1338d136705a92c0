"""State that code changes and no variable holds: the current folder, random numbers, options.

Settings that differ from the kernel's start are saved beside the variables, within the same limits,
under names such as `setting os.environ`. The next kernel restores them. Settings of a library are
read only if it is imported.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kernel_specs.restricted.hibernation.settings import SETTINGS, Setting, handlers, set_handlers
from kernel_specs.restricted.policy import imports

NAME = re.compile(r"setting .+")
"""Names of settings; no variable can be saved under one."""
_NOTHING, _UNKNOWN = object(), object()
_PLAIN = (str, int, float, bool, bytes, type(None))
_random_state = random.getstate
"""The original function: user code may replace it, and the kernel itself calls it."""


class ProcessState:
    """The settings of a kernel, and what they were when it started."""

    def __init__(self, layers: Sequence[str]) -> None:
        """Read the settings; `layers` are folders of the session's packages, which are excluded."""
        paths = _Paths(layers)
        self._random: Any = None
        self._handlers: dict[str, Any] = {}
        self._settings = (
            Setting("os.environ", "os", paths.environment, paths.set_environment, early=True),
            Setting("sys.path", "sys", paths.search_path, paths.set_search_path, early=True),
            Setting("random", "random", self._random_state, lambda random, x: random.setstate(x)),
            Setting("handlers of signals", "signal", lambda _: self._handlers, set_handlers),
            *SETTINGS,
        )
        self.hold()
        self._start = {setting.name: _at_start(setting) for setting in self._settings}

    def hold(self) -> None:
        """Record the state of `random`, and signal handlers, before saving changes them."""
        self._random = _random_state()
        self._handlers = handlers()

    def changes(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield each setting's name, and a function that returns the parts of it that have changed.

        Values are of plain types; parts of other types have names of their own. The functions raise
        whatever code in a setting raises.
        """
        for setting in self._settings:
            if setting.module in sys.modules and self._start[setting.name] is not _UNKNOWN:
                yield f"setting {setting.name}", partial(self._change, setting)

    def write(self, name: str, value: Any) -> None:
        """Write what was saved under a name. Raises whatever the library does."""
        setting = self._named(name)
        part = name.removeprefix(f"setting {setting.name}").removeprefix(": ")
        __import__(setting.module)
        setting.write(sys.modules[setting.module], {part: value} if part else value)

    def is_early(self, name: str) -> bool:
        """Return True for a setting that is written before variables are loaded."""
        return self._named(name).early

    def _named(self, name: str) -> Setting:
        for setting in self._settings:
            if name == f"setting {setting.name}" or name.startswith(f"setting {setting.name}: "):
                return setting
        raise LookupError("this version does not know it")

    def _change(self, setting: Setting) -> dict[str, Any]:
        name, before = f"setting {setting.name}", self._start[setting.name]
        now = setting.read(sys.modules[setting.module])
        if type(now) is not dict:
            return {} if type(before) is type(now) and before == now else {name: now}
        before = before if type(before) is dict else {}
        changed = {
            key: each for key, each in now.items() if not _is(before.get(key, _NOTHING), each)
        }
        changed |= dict.fromkeys(before.keys() - now.keys())
        plain = {key: value for key, value in changed.items() if _is_plain(value)}
        apart = {f"{name}: {key}": changed[key] for key in changed.keys() - plain.keys()}
        return {**({name: plain} if plain else {}), **apart}

    def _random_state(self, _: Any) -> Any:
        return self._random


def _at_start(setting: Setting) -> Any:
    """Return the current value; `_NOTHING` without its module, `_UNKNOWN` if it cannot be read."""
    module = sys.modules.get(setting.module)
    if module is None:
        return _NOTHING
    try:
        return setting.read(module)
    except Exception:  # noqa: BLE001  # another version of a library has none
        return _UNKNOWN


def _is(before: Any, now: Any) -> bool:
    return type(before) is type(now) and bool(before == now)


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN


class _Paths:
    """Reads and writes the environment and `sys.path`, apart from the session's packages."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._own = tuple(f"{layer}/" for layer in layers)
        self._first = self._others(sys.path)

    def environment(self, _: Any) -> dict[str, str]:
        """Return the variables, without folders of packages in those that list folders."""
        found = dict(os.environ)
        for name in imports.LISTS:
            if name in found:
                found[name] = os.pathsep.join(self._others(found[name].split(os.pathsep)))
        return found

    def set_environment(self, _: Any, changed: dict[str, str | None]) -> None:
        """Set variables, and remove those that are None."""
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        imports.export(self._layers)

    def search_path(self, _: Any) -> tuple[list[str], list[str]]:
        """Return the entries at the kernel's start and now. Raises TypeError unless all are str."""
        now = self._others(sys.path)
        if odd := [type(each).__name__ for each in now if type(each) is not str]:
            raise TypeError(f"{odd[0]} stands in it")
        return self._first, now

    def set_search_path(self, _: Any, both: tuple[list[str], list[str]]) -> None:
        """Set the entries; those of the old kernel's start are replaced by this kernel's own."""
        before, then = both
        own = self._others(sys.path)
        kept = [each for each in then if each in own or each not in before]
        sys.path[:] = [*kept, *(each for each in own if each not in before and each not in kept)]
        imports.refresh(self._layers)

    def _others(self, paths: Iterable[Any]) -> list[Any]:
        return [
            each
            for each in paths
            if type(each) is not str or not (each in self._layers or each.startswith(self._own))
        ]
