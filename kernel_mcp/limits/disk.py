"""How much the files of a kernel hold, measured while hostile code changes them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_mcp.files.openat2 import open_beneath
from kernel_mcp.limits.unnamed import BLOCK, File
from kernel_mcp.settings import MIB

_FOLDER = os.O_RDONLY | os.O_DIRECTORY
LARGE = MIB
"""Files from this size on are told one by one."""
MOST_STEPS = 2_000_000
"""Path components that one scan resolves at most: some 2 000 folders within each other."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes on disk and number of files and folders; `complete` unless the scan gave up.

    `crowded` when processes hold more files than can be looked at.
    """

    bytes: int = 0
    entries: int = 0
    complete: bool = True
    crowded: bool = False


def measure(
    root: int, *, most_entries: int, most_bytes: int, large: dict[File, int] | None = None
) -> Holding:
    """Add up what the open folder `root` holds; links to one file count once. Blocks.

    The scan ends early once there is more than either limit. Sizes of `LARGE` files are put into
    `large`.
    """
    size = entries = steps = 0
    seen: set[tuple[int, int]] = set()
    pending: list[_Branch | None] = [None]
    while pending:
        branch = pending.pop()
        steps += branch.depth if branch is not None else 0
        if steps > MOST_STEPS:
            return Holding(size, entries, complete=False)
        try:
            folder = _opened(root, branch)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                continue  # it has been moved or replaced meanwhile
            return Holding(size, entries, complete=False)
        try:
            for name, info in _scan(folder):
                entries += 1
                if stat.S_ISDIR(info.st_mode):
                    pending.append(_Branch(branch, name, 1 + (branch.depth if branch else 0)))
                elif info.st_nlink > 1:
                    key = (info.st_dev, info.st_ino)
                    if key in seen:
                        continue
                    seen.add(key)
                held = info.st_blocks * BLOCK
                size += held
                if large is not None and held >= LARGE:
                    large[info.st_dev, info.st_ino] = held
                if entries > most_entries or size > most_bytes:
                    return Holding(size, entries, complete=False)
        finally:
            os.close(folder)
    return Holding(size, entries)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A folder in a tree of any depth."""

    above: _Branch | None
    name: str
    depth: int


def _opened(root: int, branch: _Branch | None) -> int:
    names: list[str] = []
    while branch is not None:
        names.append(branch.name)
        branch = branch.above
    names.reverse()
    try:
        return open_beneath(root, names, _FOLDER)
    except PermissionError:
        _make_readable(root, names)
        return open_beneath(root, names, _FOLDER)


def _make_readable(root: int, names: list[str]) -> None:
    """Give a folder of this user's its rights back: what cannot be read cannot be counted."""
    for depth in range(len(names) + 1):
        handle = open_beneath(root, names[:depth], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                Path(f"/proc/self/fd/{handle}").chmod(mode | stat.S_IRWXU)
        finally:
            os.close(handle)


def _scan(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry.name, entry.stat(follow_symlinks=False)
