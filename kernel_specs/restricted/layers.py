"""Package layers: folders on sys.path that the host adds to while the kernel runs.

A layer holds generations, folders named 1, 2, 3 …, each complete once it has its name. The newest
comes first. Nothing in a generation ever changes, so what was imported from one goes on working.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_SITES = ("site-packages", "dist-packages")


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


def before_sites(paths: Sequence[str]) -> int:
    """Where layers belong: between the standard library and site-packages."""
    return next((at for at, path in enumerate(paths) if path.endswith(_SITES)), len(paths))


def _generations(layer: str) -> list[int]:
    try:
        names = [entry.name for entry in Path(layer).iterdir()]
    except OSError:
        return []
    return [int(name) for name in names if name.isascii() and name.isdigit()]
