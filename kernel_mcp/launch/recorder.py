"""The end of a kernel's output in shared memory: what a sudden death keeps from the channels."""

from __future__ import annotations

import fcntl
import os
import struct

HEADER_BYTES = 64
RING_BYTES = 64 * 1024 - HEADER_BYTES
"""As much as the kernel collects before it sends a message."""
_COUNTERS = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Recorder:
    """Memory that the kernel writes and this side reads; its size cannot be changed."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("recorder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, HEADER_BYTES + RING_BYTES)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self._fd)
            raise

    def guest_fd(self) -> int:
        """A further descriptor of the memory, to be passed to the kernel and closed here."""
        return os.dup(self._fd)

    def unheard(self, characters: int) -> str:
        """The text after the first `characters`, as far as it is still there.

        The kernel may have written anything: the answer is text of at most the ring's size.
        """
        if self._fd < 0:
            return ""
        written, size = _COUNTERS.unpack(os.pread(self._fd, _COUNTERS.size, 0))
        missing = written - characters
        if missing <= 0:
            return ""
        ring = os.pread(self._fd, RING_BYTES, HEADER_BYTES)
        end = size % RING_BYTES
        data = ring[:end] if size < RING_BYTES else ring[end:] + ring[:end]
        text = data.decode("utf-8", "replace")
        return text[-missing:] if missing < len(text) else text

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
