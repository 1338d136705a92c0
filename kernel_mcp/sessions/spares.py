"""Where the folders of kernels in reserve are while no session has them.

They have to lie on the file system of the sessions' folders, as they take their places by renames.
Where that is a folder of the operator's, they are kept together in a hidden one, which goes with
the server; what a killed server has left of it is removed by the next that uses the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kernel_mcp.errors import ConfigError
from kernel_mcp.linux.safe_tree import remove_tree

logger = logging.getLogger(__name__)

NAME_BYTES = 8
"""Of the random names of spares."""
_HIDDEN = ".kernel-mcp-"
_OURS = re.compile(rf"{re.escape(_HIDDEN)}[0-9a-f]{{8}}")
_LOCK = "lock"
_SPARE = re.compile(rf"\.?[0-9a-f]{{{2 * NAME_BYTES}}}(-\d+)?")
"""With the names that a removal gives to what it has not got to."""


@contextlib.contextmanager
def spare_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder of this server alone in the operator's `parent`. Raises ConfigError."""
    path = parent / f"{_HIDDEN}{secrets.token_hex(4)}"
    try:
        sweep_spares(parent)
        path.mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        lock = os.open(path / _LOCK, flags, 0o600)
    except OSError as reason:
        raise ConfigError(
            f"cannot keep files in {parent}: {reason}; choose another folder with --workspace"
        ) from reason
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        _remove(path)
        os.close(lock)


def sweep_spares(parent: Path) -> None:
    """Remove what killed servers have left in `parent`, as far as it is surely theirs."""
    for path in parent.glob(f"{_HIDDEN}*"):
        if _OURS.fullmatch(path.name):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    try:
        if _holds_spares(path):
            _remove_unlocked(path)
    except OSError as reason:
        logger.warning("could not look at %s: %s", path, reason)


def _holds_spares(path: Path) -> bool:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    names = {entry.name for entry in path.iterdir()}
    return _LOCK in names and all(_SPARE.fullmatch(name) for name in names - {_LOCK})


def _remove_unlocked(path: Path) -> None:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its server lives
    else:
        _remove(path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as reason:
        logger.warning("could not remove %s: %s", path, reason)
