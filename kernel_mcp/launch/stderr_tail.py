"""The last output of a process: kept small however much it writes."""

from __future__ import annotations

import asyncio
import os

from kernel_mcp.barriers import Barrier

BUDGET_BYTES = 1024 * 1024
PAUSE_S = 0.05
"""After `BUDGET_BYTES` the reader pauses, so that a flood holds up its writer, not the server."""
KEPT_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
DRAIN_READS = 16
"""Reads at the end of a process: a pipe holds no more than 1 MiB by default."""


class StderrTail:
    """Reads a pipe on the event loop and keeps the last of it; owns the descriptor."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._kept = bytearray()
        os.set_blocking(fd, False)
        self._budget = BUDGET_BYTES
        self._pause: asyncio.TimerHandle | None = None
        loop.add_reader(fd, self._on_readable)

    def text(self) -> str:
        """What is kept, without control characters but line ends and tabs."""
        text = self._kept.decode("utf-8", "replace")
        return "".join(char for char in text if char.isprintable() or char in "\n\t")

    def drain(self) -> None:
        """Take what the pipe holds now."""
        for _ in range(DRAIN_READS):
            if not self._read():
                break

    def close(self) -> None:
        """Stop reading."""
        if self._pause is not None:
            self._pause.cancel()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _on_readable(self) -> None:
        more = False
        with Barrier("reading what a process writes") as barrier:
            more = self._read()
        if self._fd >= 0 and (barrier.failure is not None or (more and self._budget <= 0)):
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._budget = BUDGET_BYTES
        self._loop.add_reader(self._fd, self._on_readable)

    def _read(self) -> bool:
        """Read once; False when there is nothing more for now."""
        if self._fd < 0:
            return False
        try:
            piece = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
            return False
        self._budget -= len(piece)
        self._kept += piece
        del self._kept[:-KEPT_BYTES]
        return True
