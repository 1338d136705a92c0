"""Files that a kernel has left in its private folders, which end with it."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
MAX_FILES = 100
"""Paths that are named."""
MAX_ENTRIES = 20_000
"""Directory entries that are looked at."""
MAX_PATH_CHARS = 200


def left_files(tmp: str) -> list[str]:
    """Paths of files below `tmp` and in shared memory, at most `MAX_FILES`.

    Folders of `tmp` whose names begin with a dot hold what libraries cache, see `confine`.
    """
    found: list[str] = []
    looked = 0
    for root in (tmp, SHARED_MEMORY):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if folder != tmp or name[0] != ".")
            for path in (f"{folder}/{name}" for name in sorted(names)):
                looked += 1
                if len(found) == MAX_FILES or looked > MAX_ENTRIES:
                    return found
                if _is_file(path) and len(path) <= MAX_PATH_CHARS:
                    found.append(path)
    return found


def _is_file(path: str) -> bool:
    try:
        path.encode()
        return Path(path).is_file()
    except (OSError, UnicodeError):
        return False
