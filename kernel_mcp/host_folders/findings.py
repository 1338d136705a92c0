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

    covers            kinds of covers by path below the mount
    inodes            device and inode of all that is covered, with its birth time (`born`)
    new_inodes        inodes found since the last report
    reused_inodes     inodes that another file has had since
    removed           read-only paths removed since the last report
    over_limit        paths that hosts execute, beyond the maximal number of covers
    writable_links    number of hard links of read-only files that stay writable, as too many
    link_targets      paths found since the last report that hosts execute through a link
    git               folders that Git recognises as repositories
    settings_changed  True if settings have appeared since the server was last asked to read them
    unsearched_links  True if a covered file has hard links that no walk has searched for
    folders           number of folders walked
    """

    covers: dict[Parts, str] = field(default_factory=dict)
    inodes: dict[tuple[int, int], int] = field(default_factory=dict)
    new_inodes: list[tuple[int, int]] = field(default_factory=list)
    reused_inodes: list[tuple[int, int]] = field(default_factory=list)
    removed: list[Parts] = field(default_factory=list)
    over_limit: list[Parts] = field(default_factory=list)
    writable_links: int = 0
    link_targets: list[Parts] = field(default_factory=list)
    git: dict[Parts, None] = field(default_factory=dict)
    settings_changed: bool = False
    unsearched_links: bool = False
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
