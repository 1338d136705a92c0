"""User namespaces that map the ids of a mount's files, for id-mapped mounts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from kernel_specs import linux


class IdMaps:
    """A user namespace for each map; they stay open as long as this process runs."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, ...], int] = {}

    def namespace(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the namespace for a map; `rows` have user and group, on disk and as seen.

        Raises OSError.
        """
        key = tuple(number for row in rows for number in row)
        if key in self._maps:
            return self._maps[key]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                linux.unshare(linux.CLONE_NEWUSER)
                os.write(write, b"1")
                signal.pause()
            os._exit(1)
        try:
            os.close(write)
            if not os.read(read, 1):
                raise OSError("Linux gives no user namespace, which an id-map takes")
            for name, (disk, seen) in zip(("uid_map", "gid_map"), rows, strict=True):
                with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
                    file.write(f"{disk} {seen} 1\n")
            self._maps[key] = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(read)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return self._maps[key]
