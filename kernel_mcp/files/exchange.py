"""Put one folder in the place of another, for those who know the place by its name."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100  # <fcntl.h>
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""What renameat2(2) says on file systems without exchange, old systems and under filters."""
_libc = ctypes.CDLL(None, use_errno=True)


def take_place(newcomer: Path, place: Path) -> Path | None:
    """Move the folder `newcomer` to `place` in one step; where the folder that was there is now.

    They are exchanged, which takes a tenth of the time that replacing takes. Where that cannot be
    done, an empty folder is replaced: None. Raises OSError.
    """
    paths = os.fsencode(newcomer), os.fsencode(place)
    if not _renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        return newcomer
    reason = ctypes.get_errno()
    if reason not in _NOT_HERE:
        raise OSError(reason, os.strerror(reason), str(newcomer), None, str(place))
    newcomer.rename(place)
    return None


def _without(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_renameat2 = getattr(_libc, "renameat2", _without)
