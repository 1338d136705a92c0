"""Findings of a walk through a mounted folder, and the identity of files."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import field

from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.records import dataclass
from kernel_specs import linux

MOST_COVERS = 1000
"""Maximal number of covers below one mount; each delays the start of a kernel by some 20 µs."""


@dataclass
class WalkFindings:
    """Findings of a walk below a mount.

    covers   kinds of covers by path below the mount
    inodes   device and inode of every covered file and folder, with its birth time (`born`)
    fresh    inodes found since the last report; `gone`: those reused by another file since
    removed  read-only paths removed since the last report
    surplus  paths that hosts execute, beyond the maximal number of covers
    unfixed  number of hard links of read-only files that stay writable, as there are too many
    named    paths found since the last report that hosts execute through a link
    git      folders that Git recognises as repositories
    asks     True if settings have appeared since the server was last asked to read them
    linked   True if a covered file has hard links that no walk has searched for
    folders  number of folders walked
    """

    covers: dict[Parts, str] = field(default_factory=dict)
    inodes: dict[tuple[int, int], int] = field(default_factory=dict)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)
    removed: list[Parts] = field(default_factory=list)
    surplus: list[Parts] = field(default_factory=list)
    unfixed: int = 0
    named: list[Parts] = field(default_factory=list)
    git: dict[Parts, None] = field(default_factory=dict)
    asks: bool = False
    linked: bool = False
    folders: int = 0


class TooManySecrets(Exception):
    """A mount needs more than `MOST_COVERS` covers."""


def born(fd: int) -> int:
    """Return the birth time of an open file in nanoseconds; 0 if it is not known."""
    with suppress(OSError):
        return linux.birth_time(fd)
    return 0


def status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
