"""stdout of the C library, which keeps text back that does not go to a terminal."""

from __future__ import annotations

import ctypes
from contextlib import suppress


class CStdout:
    """Flushes it; not all streams, which would wait for a thread that reads stdin."""

    def __init__(self) -> None:
        """Find `stdout` where the C library has it, which is not everywhere by that name."""
        library = ctypes.CDLL(None)
        self._flush = library.fflush
        self._stream: ctypes.c_void_p | None = None
        with suppress(ValueError):
            self._stream = ctypes.c_void_p.in_dll(library, "stdout")

    def flush(self) -> None:
        """Have it write what it holds to file descriptor 1."""
        if self._stream is not None:
            self._flush(self._stream)
