"""Files that cells have read and written, by their records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernel_mcp.verification.steps import Log, Step
from kernel_specs.restricted.record import digest


def opened(step: Step) -> Iterator[tuple[str, str, str]]:
    """Yield path, mode (r, w, rw, or d for a new folder) and digest of files that a cell opened.

    Records are made beside code that can forge them: malformed ones are left out.
    """
    found = step.record.get("files")
    for each in found if isinstance(found, list) else ():
        if isinstance(each, list) and len(each) == 3 and all(isinstance(one, str) for one in each):
            yield each[0], each[1], each[2]


def made_by(log: Log) -> frozenset[str]:
    """Return the files of the workspace that cells wrote before any cell read them."""
    known: set[str] = set()
    made = set()
    for step in log.steps:
        for path, mode, then in opened(step):
            if path not in known and mode != "r" and not then:
                made.add(path)
            known.add(path)
    return frozenset(made)


def changed(steps: Sequence[Step], made: frozenset[str], root: Path) -> dict[str, str]:
    """Return the files of the workspace that differ from what cells have read, and how. Blocking.

    Files that the cells have `made` themselves are left out.
    """
    found = {}
    for step in steps:
        for path, mode, then in opened(step):
            if mode == "w" or path in made or path.startswith(("/", "..")) or not then:
                continue
            now = _digest(root, path)
            if now != then:
                found[path] = "has changed" if now else "is gone"
    return found


def _digest(root: Path, path: str) -> str:
    """Return the digest of a file; empty if there is none, or a symlink in its place."""
    place = root / path
    if place.resolve().is_relative_to(root.resolve()) and place.is_file():
        try:
            fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            return digest(fd)
        finally:
            os.close(fd)
    return ""
