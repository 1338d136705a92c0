"""The descriptors of a command that is being put together."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType


class Passed:
    """What a command will inherit; closed at the end of the context unless `keep` was called."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._fds: list[int] = []
        self._undo = ExitStack()

    def __enter__(self) -> Passed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def file(self, content: bytes) -> str:
        """Memory with this content to read from its beginning: the descriptor, as an option."""
        fd = self.add(os.memfd_create("kernel-mcp", os.MFD_CLOEXEC))
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return str(fd)

    def status(self) -> tuple[int, str]:
        """A pipe: the end that the server reads without waiting, and the other as an option."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._undo.callback(os.close, read)
        return read, str(self.add(write))

    def add(self, fd: int) -> int:
        """Take over a descriptor."""
        self._undo.callback(os.close, fd)
        self._fds.append(fd)
        return fd

    def keep(self) -> list[int]:
        """All of them but reading ends, for whoever closes them from now on."""
        self._undo.pop_all()
        return self._fds
