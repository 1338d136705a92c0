"""Access rights to the mounted folder itself."""

from __future__ import annotations

import os
import stat

_ACCESS_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
"""Extended attributes with the access control lists of a file."""


class Rights:
    """Access rights to the folder of a mount, which sessions must not grant to others."""

    def __init__(self, root: int) -> None:
        self._place = f"/proc/self/fd/{root}"
        self._mode = stat.S_IMODE(os.stat(self._place).st_mode)  # noqa: PTH116
        self._lists = {name: self._list(name) for name in _ACCESS_LISTS}

    def restore(self) -> bool:
        """Revoke rights that users other than the owner were granted since the start.

        Return True if there were any. Raises OSError.
        """
        given = False
        for name, before in self._lists.items():
            if self._list(name) == before:
                continue
            given = True
            if before:
                os.setxattr(self._place, name, before)
            else:
                os.removexattr(self._place, name)
        mode = stat.S_IMODE(os.stat(self._place).st_mode)  # noqa: PTH116
        if more := mode & ~self._mode & ~stat.S_IRWXU:
            os.chmod(self._place, mode & ~more)  # noqa: PTH101
        return given or more != 0

    def _list(self, name: str) -> bytes:
        try:
            return os.getxattr(self._place, name)
        except OSError:  # no list, or none in this file system
            return b""
