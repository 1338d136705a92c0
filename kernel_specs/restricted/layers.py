"""Package layers: folders on sys.path that the host adds to while the kernel runs.

A layer holds generations, folders named 1, 2, 3 …, each complete once it has its name. The newest
comes first. Nothing in a generation ever changes, so what was imported from one goes on working.
Child processes find the same generations, and the programs in them, through the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_SITES = ("site-packages", "dist-packages")
_modules: dict[str, Any] = sys.modules
_own_flags: Callable[[], list[str]] = vars(subprocess)["_args_from_interpreter_flags"]


def entries(layers: Iterable[str]) -> list[str]:
    """The sys.path entries of layers: their generations, newest first, and each folder itself."""
    found: list[str] = []
    for layer in layers:
        found += [f"{layer}/{number}" for number in sorted(_generations(layer), reverse=True)]
        found.append(layer)
    return found


def refresh(layers: Sequence[str]) -> None:
    """Bring sys.path up to date, at the place where the layers are."""
    own = tuple(f"{layer}/" for layer in layers)
    rest = [path for path in sys.path if path not in layers and not path.startswith(own)]
    place = next((at for at, path in enumerate(sys.path) if path in layers), None)
    if place is None:
        place = before_sites(rest)
    else:
        kept = [path for path in sys.path[:place] if path in rest]
        place = len(kept)
    rest[place:place] = entries(layers)
    sys.path[:] = rest


def export(layers: Sequence[str]) -> None:
    """Bring PYTHONPATH and PATH up to date for child processes: generations first."""
    own = tuple(f"{layer}/" for layer in layers)
    found = [path for path in entries(layers) if path not in layers]
    _lead("PYTHONPATH", found, own)
    if found and sys.version_info >= (3, 11):
        _let_look()
    _lead("PATH", [path for path in (f"{each}/bin" for each in found) if Path(path).is_dir()], own)


def before_sites(paths: Sequence[str]) -> int:
    """Where layers belong: between the standard library and site-packages."""
    return next((at for at, path in enumerate(paths) if path.endswith(_SITES)), len(paths))


def _let_look() -> None:
    """Have workers of multiprocessing and joblib read PYTHONPATH, as far as Python hands on -I."""
    for name in ("subprocess", "multiprocessing.util"):
        if name in _modules:
            _modules[name]._args_from_interpreter_flags = _worker_flags


def _worker_flags() -> list[str]:
    """The options of this interpreter, the environment not ignored; the current folder still is."""
    flags: list[str] = []
    for flag in _own_flags():
        flags += ("-s", "-P") if flag == "-I" else (flag,)
    return flags


def _lead(name: str, paths: Sequence[str], own: tuple[str, ...]) -> None:
    """Put `paths` first in a variable, in place of those that begin with one of `own`."""
    before = os.environ.get(name, "")
    kept = [path for path in before.split(os.pathsep) if path and not path.startswith(own)]
    after = os.pathsep.join([*paths, *kept])
    if after:
        os.environ[name] = after
    elif before:
        del os.environ[name]


def _generations(layer: str) -> list[int]:
    try:
        names = [entry.name for entry in Path(layer).iterdir()]
    except OSError:
        return []
    return [int(name) for name in names if name.isascii() and name.isdigit()]
