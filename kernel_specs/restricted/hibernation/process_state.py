"""State that code changes and no variable holds: the current folder, random numbers, options.

What differs from the kernel's start is saved with the variables, and restored in the next kernel.
Settings of a library are read only once that is imported.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_specs.restricted.hibernation.attempt_limits import MAX_REASON_CHARS
from kernel_specs.restricted.policy import imports

MAX_BYTES = 1024 * 1024
"""Largest pickle of one setting that is saved."""
_NOTHING = object()

Changes = tuple[dict[str, str], dict[str, str]]
"""Changed settings by name, as text to save, and reasons by name for those that are lost."""


@dataclass(frozen=True)
class Setting:
    """A setting: its name for people, the module that has it, how to read and to write it.

    Both functions get the module. Of a dict only the items that have changed are saved and written,
    None for one that is gone. Those that decide about imports are restored `early`, before the
    variables.
    """

    name: str
    module: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    early: bool = False


class ProcessState:
    """The settings of a kernel, and what they were when it started."""

    def __init__(self, layers: Sequence[str]) -> None:
        """Read them; `layers` are the folders of the session's packages, which are no setting."""
        paths = _Paths(layers)
        self._settings = (
            Setting("os.environ", "os", paths.environment, paths.set_environment, early=True),
            Setting("sys.path", "sys", paths.search_path, paths.set_search_path, early=True),
            *_SETTINGS,
        )
        self._start = {setting.name: _value(setting) for setting in self._settings}

    def changes(self) -> Changes:
        """Return the settings that differ from those at the start."""
        saved: dict[str, str] = {}
        lost: dict[str, str] = {}
        for setting in self._settings:
            try:
                value = _change(self._start[setting.name], _value(setting))
                data = pickle.dumps(value, 5) if value is not _NOTHING else b""
            except Exception as error:  # noqa: BLE001  # it may hold an object of a cell
                lost[setting.name] = type(error).__name__
                continue
            if len(data) > MAX_BYTES:
                lost[setting.name] = "too large"
            elif data:
                saved[setting.name] = base64.b64encode(data).decode()
        return saved, lost

    def restore(self, saved: Mapping[str, str], *, early: bool) -> dict[str, str]:
        """Write settings that `changes` has returned, the early ones or the others.

        Returns reasons by name for those that failed.
        """
        lost: dict[str, str] = {}
        for setting in self._settings:
            if setting.early is not early or setting.name not in saved:
                continue
            try:
                __import__(setting.module)
                value = pickle.loads(base64.b64decode(saved[setting.name]))
                setting.write(sys.modules[setting.module], value)
            except Exception as error:  # noqa: BLE001  # the others are restored all the same
                lost[setting.name] = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        return lost


def _value(setting: Setting) -> Any:
    """Return the value now; nothing where its module is not imported or has none."""
    module = sys.modules.get(setting.module)
    if module is None:
        return _NOTHING
    try:
        return setting.read(module)
    except (AttributeError, LookupError, OSError, TypeError, ValueError):  # another version has it
        return _NOTHING


def _change(before: Any, now: Any) -> Any:
    """Return what of a value has changed; nothing where all is as before."""
    if type(now) is not dict:
        return _NOTHING if type(before) is type(now) and before == now else now
    before = before if type(before) is dict else {}
    changed = {name: value for name, value in now.items() if before.get(name, _NOTHING) != value}
    changed |= dict.fromkeys(before.keys() - now.keys())
    return changed or _NOTHING


class _Paths:
    """Reads and writes the environment and `sys.path`, apart from the session's packages."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._own = tuple(f"{layer}/" for layer in layers)

    def environment(self, _: Any) -> dict[str, str]:
        found = dict(os.environ)
        for name in imports.LISTS:
            if name in found:
                entries = found[name].split(os.pathsep)
                found[name] = os.pathsep.join(each for each in entries if not self._is_own(each))
        return found

    def set_environment(self, _: Any, changed: dict[str, str | None]) -> None:
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        imports.export(self._layers)

    def search_path(self, _: Any) -> dict[Any, bool]:
        """Return the entries, each with True if it comes before the standard library."""
        library = os.path.dirname(os.__file__)  # noqa: PTH120  # as it stands in the list
        place = sys.path.index(library) if library in sys.path else 0
        return {each: at < place for at, each in enumerate(sys.path) if not self._is_own(str(each))}

    def set_search_path(self, _: Any, changed: dict[Any, bool | None]) -> None:
        first = [each for each, first in changed.items() if first]
        last = [each for each, first in changed.items() if first is False]
        rest = [each for each in sys.path if each not in changed]
        sys.path[:] = [*first, *rest, *last]

    def _is_own(self, path: str) -> bool:
        return path in self._layers or path.startswith(self._own)


def _filters(warnings: Any) -> list[tuple[Any, ...]]:
    return [
        (action, getattr(text, "pattern", text), kind, getattr(module, "pattern", module), line)
        for action, text, kind, module, line in warnings.filters
    ]


def _set_filters(warnings: Any, filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, text, kind, module, line in filters:
        warnings.filterwarnings(action, text or "", kind, module or "", line, append=True)


def _levels(logging: Any) -> dict[str, int]:
    known = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: each.level for name, each in known.items() if isinstance(each, logging.Logger)}


def _set_levels(logging: Any, levels: dict[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _numbers(random: Any) -> tuple[Any, ...]:
    name, keys, *rest = random.get_state()
    return name, keys.tolist(), *rest


def _options(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of the options of pandas below a group."""
    for name in dir(group):
        value = getattr(group, name)
        if type(value) is type(group):
            yield from _options(value, f"{before}{name}.")
        else:
            yield before + name, value


def _all_options(pandas: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that are deprecated
        return dict(_options(pandas.options))


def _set_options(pandas: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if pandas.get_option(name) != value:
            pandas.set_option(name, value)


def _parameters(matplotlib: Any) -> dict[str, Any]:
    """Return `rcParams` without the back-end, which is the kernel's."""
    parameters = matplotlib.rcParams
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are deprecated
        return {name: parameters[name] for name in parameters if not name.startswith("backend")}


def _set_parameters(matplotlib: Any, parameters: dict[str, Any]) -> None:
    for name, value in parameters.items():
        if matplotlib.rcParams[name] != value:
            matplotlib.rcParams[name] = value


_SETTINGS = (
    Setting("the current folder", "os", lambda os: os.getcwd(), lambda os, path: os.chdir(path)),
    Setting(
        "the recursion limit",
        "sys",
        lambda sys: sys.getrecursionlimit(),
        lambda sys, limit: sys.setrecursionlimit(limit),
    ),
    Setting("the filters of warnings", "warnings", _filters, _set_filters),
    Setting("the levels of loggers", "logging", _levels, _set_levels),
    Setting(
        "the context of decimal",
        "decimal",
        lambda decimal: decimal.getcontext().__reduce__()[1],
        lambda decimal, parts: decimal.setcontext(decimal.Context(*parts)),
    ),
    Setting(
        "the state of random",
        "random",
        lambda random: random.getstate(),
        lambda random, state: random.setstate(state),
    ),
    Setting(
        "the state of numpy.random",
        "numpy.random",
        _numbers,
        lambda random, state: random.set_state(state),
    ),
    Setting(
        "the print options of numpy",
        "numpy",
        lambda numpy: numpy.get_printoptions(),
        lambda numpy, options: numpy.set_printoptions(**options),
    ),
    Setting(
        "the error handling of numpy",
        "numpy",
        lambda numpy: numpy.geterr(),
        lambda numpy, kinds: numpy.seterr(**kinds),
    ),
    Setting(
        "the options of pandas",
        "pandas",
        _all_options,
        _set_options,
    ),
    Setting("the rcParams of matplotlib", "matplotlib", _parameters, _set_parameters),
    Setting(
        "the random numbers of torch",
        "torch",
        lambda torch: torch.get_rng_state().tolist(),
        lambda torch, state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
)
