"""Files that cells have read and written, by their records."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.units import MIB
from kernel_mcp.verification.steps import Log, Step
from kernel_specs import linux
from kernel_specs.restricted.record import digest

MOST_HASHED_BYTES = 1024 * MIB
"""Bytes of files whose digests are taken, all together; others are left out."""
MOST_DIGESTS = 1000
_CHUNK = MIB
_SLACK_S = 0.01
"""Seconds by which the clock of file systems may be behind: a tick of the slowest kernels."""


class Recorded(Protocol):
    """A cell with the record that its kernel made of it."""

    @property
    def record(self) -> Mapping[str, Any]:
        """The record, as JSON values."""


def opened(step: Recorded) -> Iterator[tuple[str, str, str]]:
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


def born_in(log: Log, workspace: Workspace) -> frozenset[str]:
    """Return entries of the workspace that came into being while a cell ran. Blocking.

    Cells make these without Python's `open`: by programs, as databases, as links. A file that a
    cell has read before is none of them, as it was replaced, nor one that a tool has written.
    """
    root = workspace.root
    spans: list[tuple[float, float]] = []
    read: dict[str, float] = {}
    for step in log.steps:
        began, took = step.record.get("time"), step.record.get("took")
        if not isinstance(began, (int, float)) or not isinstance(took, (int, float)):
            continue
        spans.append((began - _SLACK_S, began + took + _SLACK_S))
        for path, mode, then in opened(step):
            if then and mode != "w":
                read.setdefault(path, began + took)
    found = set()
    for folder, names, files, fd in os.fwalk(root, follow_symlinks=False):
        for name in (*names, *files):
            path = os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118
            birth = _birth(name, fd)
            is_new = any(first <= birth <= last for first, last in spans)
            if is_new and path not in workspace.written and read.get(path, birth) >= birth:
                found.add(path)
    return frozenset(found)


def _birth(name: str, folder: int) -> float:
    """Return the Unix time in seconds at which an entry was made; 0 if that is unknown."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return 0.0
    try:
        return linux.birth_time(fd) / 1e9
    except OSError:
        return 0.0
    finally:
        os.close(fd)


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


def digests_of(workspace: Workspace, paths: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files that are there, of at most `MOST_HASHED_BYTES`. Blocking."""
    found: dict[str, str] = {}
    left = MOST_HASHED_BYTES
    for path in paths[:MOST_DIGESTS]:
        with contextlib.suppress(WorkspaceError, OSError):
            file = workspace.open_file(path)
            with contextlib.closing(file):
                left -= file.info.st_size
                if left < 0:
                    return found
                digest, at = hashlib.sha256(), 0
                while at < file.info.st_size and (piece := file.read(at, _CHUNK)):
                    digest.update(piece)
                    at += len(piece)
                found[path] = digest.hexdigest()
    return found
