"""List folders in another order, for replays: code that depends on the order is found by it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

_listdir, _scandir = os.listdir, os.scandir


class Entries:
    """The entries of a folder in another order: what `os.scandir` returns."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the entries that are left."""
        self._entries = iter(())


def shuffle(seed: int) -> None:
    """Replace the functions that list folders by such that shuffle the entries by `seed`."""
    generator = random.Random(seed)

    def listdir(path: Any = ".") -> list[Any]:
        names = sorted(_listdir(path))
        generator.shuffle(names)
        return names

    def scandir(path: Any = ".") -> Entries:
        with _scandir(path) as found:
            entries = sorted(found, key=lambda each: each.name)
        generator.shuffle(entries)
        return Entries(iter(entries))

    os.listdir, os.scandir = listdir, scandir  # type: ignore[assignment]
    accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps them there
    if accessor is not None:
        with contextlib.suppress(AttributeError):
            accessor.listdir, accessor.scandir = staticmethod(listdir), staticmethod(scandir)
