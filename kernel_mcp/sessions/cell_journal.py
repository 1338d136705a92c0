"""The cell journal: cells since the last save, in a mapped file that survives a killed server.

A line is a checksum, followed by a JSON list of the number and code of a cell. An empty line
follows, so that damage to a line end does not join two lines.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

from kernel_mcp.linux.pipes import checksum
from kernel_mcp.units import KIB

JOURNAL_BYTES = 256 * KIB
MOST_CODE_CHARS = 20_000
"""Maximum characters of one cell's code that are written."""
NUMBERS_BYTES = 64 * KIB
"""Bytes reserved for some 2,000 cells without code, once there is no room for code."""
LEAST_CHARS = 9
"""Characters below which a line is a fragment of another: complete lines have a checksum, a blank
and a list."""
_NO_ROOM = "# not kept"
DAMAGED = "# damaged on the disk"


def mapped(path: Path, size: int) -> mmap.mmap:
    """Map the first `size` bytes of a file, which is created if missing. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # else a full disk raises SIGBUS on a write
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class CellJournal:
    """The journal of one session, in a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it; existing lines stay until `forget`. Raises OSError."""
        self._memory = mapped(path, JOURNAL_BYTES)
        self._cells: dict[int, bytes] = {}
        self._end = len(self._memory[:].rstrip(b"\0"))

    def add(self, number: int, code: str) -> None:
        """Add a cell that is about to run."""
        cell = _line(number, code[:MOST_CODE_CHARS])
        if self._end + len(cell) > JOURNAL_BYTES - NUMBERS_BYTES:
            cell = _line(number, _NO_ROOM)
        self._cells[number] = cell
        if self._end + len(cell) < JOURNAL_BYTES:
            self._memory[self._end : self._end + len(cell)] = cell
            self._end += len(cell)

    def forget(self, last: int) -> None:
        """Remove cells up to this number, which have been saved."""
        cells = [cell for number, cell in self._cells.items() if number > last]
        self._cells = {number: cell for number, cell in self._cells.items() if number > last}
        text = b"".join(cells)[: JOURNAL_BYTES - 1]
        self._memory[: max(self._end, len(text))] = text.ljust(max(self._end, len(text)), b"\0")
        self._end = len(text)

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._memory.close()


def read_journal(path: Path, after: int = 0) -> dict[int, str]:
    """Return the code of cells in a journal by their numbers. Raises OSError.

    `after` is the last cell of the save. A damaged line is read as the next cell in number, with
    `DAMAGED` as code.
    """
    try:
        data = path.read_bytes().rstrip(b"\0")
    except FileNotFoundError:
        return {}
    found: dict[int, str] = {}
    damaged = 0
    for line in filter(None, data.split(b"\n")):
        if (cell := _read(line)) is None:
            damaged += len(line) >= LEAST_CHARS
            continue
        first = max(found) + 1 if found else cell[0] - damaged
        found |= dict.fromkeys(range(first, first + damaged), DAMAGED)
        found[cell[0]], damaged = cell[1], 0
    first = max(found, default=after) + 1
    return found | dict.fromkeys(range(first, first + damaged), DAMAGED)


def is_intact(path: Path) -> bool:
    """Return False for a journal that was cut short or does not exist. Raises OSError."""
    try:
        return path.stat().st_size >= JOURNAL_BYTES
    except FileNotFoundError:
        return False


def _line(number: int, code: str) -> bytes:
    text = json.dumps([number, code]).encode()
    return checksum(text).encode() + b" " + text + b"\n\n"


def _read(line: bytes) -> tuple[int, str] | None:
    """Return the cell of a line; None for a damaged line. Lines of format 1 have no checksums."""
    given, _, text = line.partition(b" ")
    if line[:1] == b"[":
        text = line
    elif given != checksum(text).encode():
        return None
    try:
        number, code = json.loads(text)
        return int(number), str(code)
    except (ValueError, TypeError, RecursionError):
        return None
