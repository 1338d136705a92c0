"""Paths below one mount that hosts execute although no rule for names matches them."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence

from kernel_mcp.host_folders.secrets import Parts

MOST_NAMED = 300
"""Maximum number of paths below one mount that settings name, and likewise of link targets."""


class NamedPaths:
    """Paths that settings of the host name, and the targets of links that hosts execute."""

    def __init__(self) -> None:
        self._from_settings: dict[Parts, None] = {}
        self._from_links: dict[Parts, None] = {}
        self._above: set[Parts] = set()
        self.new_names = False
        """True if there are paths to report."""
        self.lacking = False
        """True if more than `MOST_NAMED` paths were found."""

    @property
    def all(self) -> list[Parts]:
        """Every path."""
        return [*self._from_settings, *self._from_links]

    def executes(self, parts: Parts, mode: int) -> bool:
        """Return True if hosts execute a file at this path, or through a link at it."""
        if parts in self._from_settings or parts in self._from_links:
            return True
        return stat.S_ISLNK(mode) and parts in self._above

    def replace_from_settings(self, paths: Iterable[Parts]) -> list[Parts]:
        """Replace the paths that settings name; return the new ones."""
        before, self._from_settings = self._from_settings, {}
        self._note(self._from_settings, paths)
        return [each for each in self._from_settings if each not in before]

    def add_link_targets(self, paths: Iterable[Parts | None]) -> None:
        """Add the targets of links."""
        self._note(self._from_links, (each for each in paths if each))

    def add(self, paths: Iterable[Parts]) -> bool:
        """Add paths of a repository at the top of the mount; return True if any is new."""
        count = len(self._from_links)
        self._note(self._from_links, paths)
        return len(self._from_links) > count

    def _note(self, known: dict[Parts, None], paths: Iterable[Parts]) -> None:
        for parts in paths:
            if parts in known:
                continue
            if len(known) >= MOST_NAMED:
                self.lacking = True
                return
            known[parts] = None
            self.new_names = True
        self._above = {path[:end] for path in self.all for end in range(1, len(path))}


def last_names(paths: Sequence[Parts]) -> set[str]:
    """Return the names of all components of these paths."""
    return {name for path in paths for name in path}
