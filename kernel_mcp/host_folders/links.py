"""Resolve paths of the host link by link, even if nothing exists there."""

from __future__ import annotations

import os
from collections.abc import Callable

_MOST_LINKS = 40
"""Symlinks that Linux follows in one path."""


def links_on(
    path: str, passable: Callable[[str], bool] = lambda _link: True
) -> tuple[list[str], str]:
    """Return the symlinks on an absolute path, and the resolved path.

    Nothing needs to exist at that path. It is empty after more than 40 links, as in a loop. Links
    that are not `passable` are not followed.
    """
    links: list[str] = []
    pending = path.split("/")[::-1]
    place = ""
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            place = place.rpartition("/")[0]
            continue
        here = f"{place}/{name}"
        try:
            goal = os.readlink(here)  # noqa: PTH115  # names may be of any bytes
        except OSError:
            place = here
            continue
        if not passable(here):
            place = here
            continue
        links.append(here)
        if len(links) > _MOST_LINKS:
            return links, ""
        if goal.startswith("/"):
            place = ""
        pending += goal.split("/")[::-1]
    return links, place or "/"


def below(path: str, top: str) -> tuple[str, ...] | None:
    """Return the parts of a path below `top`, () for that itself, None for one elsewhere."""
    if path == top:
        return ()
    prefix = f"{top.rstrip('/')}/"
    return tuple(path[len(prefix) :].split("/")) if path.startswith(prefix) else None
