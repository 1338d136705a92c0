"""What the kernel printed last, where the host can read it after a sudden death.

Text waits a moment before it becomes a message, and a process may be killed in that moment. The
text of the streams is therefore also written into memory shared with the host: a header of two
counters, then a ring of the last bytes.
"""

from __future__ import annotations

import mmap
import os
import struct

HEADER_BYTES = 64
_COUNTERS = struct.Struct("<QQ")


class Recorder:
    """Keeps the end of all stream text in the memory behind a file descriptor.

    The counters are characters and UTF-8 bytes since the start; byte n of the text lies at n modulo
    the size of the ring.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory and close the descriptor; with -1 nothing is kept."""
        self._memory: mmap.mmap | None = None
        self._characters = self._bytes = 0
        if fd >= 0:
            self._memory = mmap.mmap(fd, 0)
            self._size = len(self._memory) - HEADER_BYTES
            os.close(fd)

    def add(self, text: str) -> None:
        """Append text; the counters are written last, so that what they count is there."""
        if self._memory is None:
            return
        data = text.encode("utf-8", "replace")
        self._characters += len(text)
        kept = data[-self._size :]
        start = (self._bytes + len(data) - len(kept)) % self._size
        first = min(len(kept), self._size - start)
        at = HEADER_BYTES + start
        self._memory[at : at + first] = kept[:first]
        self._memory[HEADER_BYTES : HEADER_BYTES + len(kept) - first] = kept[first:]
        self._bytes += len(data)
        _COUNTERS.pack_into(self._memory, 0, self._characters, self._bytes)
