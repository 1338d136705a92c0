"""Rows of a session's record on disk: appended, read by their place, dropped by the segment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_mcp.config.settings import KIB, MIB

SEGMENT_BYTES = 4 * MIB
"""A file is full beyond this size. Files are dropped as a whole, so one is a small part of all."""
READ_BYTES = 4 * KIB
"""What is read of a row at first; most are shorter."""

_SPAN = 2**32
"""A place is the number of a segment times this, plus where the row begins in it."""


class RowFiles:
    """JSON rows in files `cells-<k>.jsonl` of `folder`; no file is held open.

    Any thread may read. Every method raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[int, int] = {}
        self._newest = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes in all files."""
        return sum(self._sizes.values())

    def append(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Write rows at the end; their places. A part that was written by a failed call is lost."""
        if self._sizes.get(self._newest, 0) >= SEGMENT_BYTES:
            self._newest += 1
        offset = self._sizes.get(self._newest, 0)
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        places = []
        for line in lines:
            places.append(self._newest * _SPAN + offset)
            offset += len(line)
        self._write(b"".join(lines))
        self._sizes[self._newest] = offset
        return places

    def read(self, place: int) -> dict[str, Any]:
        """The row at a place."""
        segment, offset = divmod(place, _SPAN)
        fd = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            line = os.pread(fd, READ_BYTES, offset)
            while b"\n" not in line[-READ_BYTES:] and (
                more := os.pread(fd, max(READ_BYTES, len(line)), offset + len(line))
            ):
                line += more
        finally:
            os.close(fd)
        try:
            row: dict[str, Any] = json.loads(line.partition(b"\n")[0])
        except ValueError as error:
            raise OSError(None, "its row is not whole") from error
        return row

    @property
    def oldest_end(self) -> int | None:
        """The place at which the oldest file ends; None when it is the one that is written."""
        oldest = min(self._sizes, default=self._newest)
        return None if oldest == self._newest else (oldest + 1) * _SPAN

    def drop_oldest(self) -> None:
        """Remove the oldest file."""
        oldest = min(self._sizes)
        self._path(oldest).unlink(missing_ok=True)
        del self._sizes[oldest]

    def _write(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(self._newest), flags, 0o600)
        try:
            start, done = self._sizes.get(self._newest, 0), 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], start + done)
        finally:
            os.close(fd)

    def _path(self, segment: int) -> Path:
        return self._folder / f"cells-{segment}.jsonl"
