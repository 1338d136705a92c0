"""The covers below one mount: what is hidden, read-only, or kept in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kernel_mcp.host_folders.secrets import FIXED, HIDING, KEPT, Parts, around, executed

MOST_COVERS = 1000
"""Maximal number of covers below one mount; each delays the start of a kernel by some 20 µs."""


class TooManySecrets(Exception):
    """A mount needs more than `MOST_COVERS` covers."""


class Covers:
    """Kinds of covers by path below a mount (`kinds`), at most `MOST_COVERS`.

    The folders above a read-only path are `KEPT`, so that it cannot be moved away with them.
    `above` is the path of the mount itself.
    """

    def __init__(self, root: int, above: Parts) -> None:
        """`root` is the open folder of the mount."""
        self._root = root
        self._above_all = above
        self.kinds: dict[Parts, str] = {}
        self.done = False
        """True after the first walk: from now on code may have made what is found."""
        self.removed: list[Parts] = []
        """Read-only paths that were removed since the last report."""
        self.over_limit: list[Parts] = []
        """Paths that hosts execute, beyond the maximum number of covers."""
        self.writable_links = 0
        """Number of hard links of read-only files that stay writable, as there are too many."""
        self._fresh: dict[Parts, None] = {}

    def take_fresh(self) -> list[Parts]:
        """Return the paths covered since the last call."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh)

    def add(self, parts: Parts, kind: str) -> None:
        """Cover a path. Raises TooManySecrets.

        After the first walk, paths beyond the limit that hosts execute are only recorded.
        """
        if len(self.kinds) >= MOST_COVERS and parts not in self.kinds:
            self._forget_the_gone()
            if len(self.kinds) >= MOST_COVERS:
                if not (self.done and (kind in (FIXED, KEPT) or executed(parts))):
                    raise TooManySecrets
                if kind != KEPT:
                    self.over_limit.append(parts)
                return
        self.kinds[parts] = kind
        self._fresh[parts] = None

    def keep(self, parts: Parts) -> None:
        """Keep a folder and those above it from being moved away."""
        for path in _with_above(parts):
            self.add(path, self.kinds.get(path, KEPT))

    def fix(self, parts: Parts) -> None:
        """Make a path read-only and keep the folders above it in place; a hidden one stays so."""
        self.keep(parts[:-1])
        if self.kinds.get(parts) not in HIDING:
            self.add(parts, FIXED)

    def fix_link(self, parts: Parts) -> None:
        """Cover a further name of a read-only file; beyond half of the limit only count it."""
        if self.fixes(parts):
            return
        if len(self.kinds) < MOST_COVERS // 2:
            self.fix(parts)
        else:
            self.writable_links += 1

    def fixes(self, parts: Parts) -> bool:
        """Return True if a path, or a folder above it, is read-only."""
        return any(self.kinds.get(path) == FIXED for path in _with_above(parts))

    def hides_above(self, parts: Parts) -> bool:
        """Return True if a path lies in a hidden folder."""
        return any(self.kinds.get(path) in HIDING for path in _with_above(parts[:-1]))

    def end(self, gone: Iterable[Parts], folder: Parts) -> None:
        """End the covers of paths that have left `folder`, and those that kept folders for them."""
        removed = [path for path in gone if self.kinds.pop(path) in (FIXED, KEPT)]
        fixed = around({path: FIXED for path in self.kinds if self._keeps(path)})
        for path in _with_above(folder):
            if path not in fixed and self.kinds.get(path) == KEPT:
                del self.kinds[path]
                removed.append(path)
            elif path in fixed and path not in self.kinds:
                self.kinds[path] = KEPT
        self.removed += removed

    def _keeps(self, parts: Parts) -> bool:
        """Return True if the folders above a covered path must not be moved away."""
        kind = self.kinds[parts]
        return kind == FIXED or (kind in HIDING and executed((*self._above_all, *parts)))

    def _forget_the_gone(self) -> None:
        top = f"/proc/self/fd/{self._root}"
        for parts in list(self.kinds):
            if not os.path.lexists("/".join((top, *parts))):
                del self.kinds[parts]


def _with_above(parts: Parts) -> list[Parts]:
    """Return a path and the folders above it, the outermost first."""
    return [parts[:end] for end in range(1, len(parts) + 1)]
