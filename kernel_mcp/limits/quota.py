"""The quota of one folder, by repeated scans, and the deleted files that processes still hold.

A scan takes time in proportion to the number of files. So slow folders are scanned less often,
unless their disk fills up.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from threading import Lock

from kernel_mcp.barriers import ignore_missing
from kernel_mcp.linux.proc import threads
from kernel_mcp.linux.walk import BLOCK, File, TreeSize, entries_within, measure
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB, format_bytes

LEAST_PAUSE_S = 0.5
SHARE = 20
"""Scans of one folder use at most 1/`SHARE` of the time.

Those of all folders together use 1/`SHARE` of a processor, except when the disk fills up.
"""
LEAST_CPU_S = 0.003
"""Minimum CPU seconds that a scan counts as: the first read of a kernel's mappings takes that."""
HURRIED_SHARE = 2
SLACK_BYTES = 16 * MIB
SLACK_ENTRIES = 100
"""Bytes and entries that code may add to a full folder, so that it can free space there."""
SEVERE = 2
SEVERE_BYTES = 512 * MIB
"""A folder with this many times its limit, and this many bytes above it, blocks further cells."""


class FolderQuota:
    """Measures one folder through a descriptor, which survives renames. One thread at a time.

    `measured`, `full` and `severe` come from the last scan.
    """

    def __init__(
        self, folder: Path, name: str, size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` appears in messages, `size` is in bytes. Raises OSError without `folder`."""
        self._fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._name = name
        self._size = size
        self._entries = entries_within(size)
        self._far = max(SEVERE * size, size + SEVERE_BYTES)
        self._clock = clock
        self._begun = -math.inf
        self._took = self._took_cpu = 0.0
        self._free = 0
        self._lowest = TreeSize()
        self._known: dict[File, int] = {}
        """Large and deleted files of the last scan, with their sizes."""
        self._in_use = Lock()
        self.extra = 0
        """Bytes that a file of the server may take beyond the limit."""
        self.measured = TreeSize()

    @property
    def full(self) -> bool:
        """Return True if the folder is above its limit, or too large to be counted."""
        found = self.measured
        most, many = self._most
        return found.bytes > most or found.entries > many or not found.complete

    @property
    def severe(self) -> bool:
        """Return True if the folder is so far above its limit that it must be emptied."""
        found = self.measured
        return (
            found.bytes > self._far + self.extra
            or found.entries > SEVERE * self._entries
            or not found.complete
        )

    @property
    def growing(self) -> bool:
        """Return True if the folder is above its limit and has grown.

        Growth is relative to the smallest size since `start`. Up to `SLACK_BYTES` and
        `SLACK_ENTRIES` do not count.
        """
        found, lowest = self.measured, self._lowest
        most, many = self._most
        if lowest.bytes > most:
            most = lowest.bytes + SLACK_BYTES
        if lowest.entries > many:
            many = lowest.entries + SLACK_ENTRIES
        return found.bytes > most or found.entries > many or not found.complete

    @property
    def _most(self) -> tuple[int, int]:
        return self._size + self.extra, self._entries + bool(self.extra)

    def start(self) -> None:
        """Record the current size, beyond which a full folder may not grow."""
        self._lowest = self.measured

    def in_turn(self, others: int = 0) -> bool:
        """Return True if the next scan keeps to `SHARE`.

        `others` is the number of other kernels whose folders are scanned.
        """
        ours, all_of_them = self._took * SHARE, self._took_cpu * SHARE * (1 + others)
        return self._clock() - self._begun >= max(LEAST_PAUSE_S, ours, all_of_them)

    def due(self, others: int = 0) -> bool:
        """Return True if `in_turn`, or if the disk fills up so fast that a scan is urgent."""
        if self.in_turn(others):
            return True
        if self._clock() - self._begun < self._took * HURRIED_SHARE:
            return False
        if not self._in_use.acquire(blocking=False):
            return False  # being scanned or closed
        try:
            # statvfs detects a fast writer before the next scan is due
            room = max(self._size - self.measured.bytes, SLACK_BYTES)
            return self._fd >= 0 and self._free - self._free_now() > room // 2
        finally:
            self._in_use.release()

    def look(self, processes: Callable[[], Iterable[int]] = tuple) -> None:
        """Measure the folder and the deleted files that `processes` hold. Blocks.

        Raises OSError and MemoryError for shortages of the server; the last figures are kept.
        """
        with self._in_use:
            if self._fd < 0:
                return
            begin, cpu_s = self._clock(), time.thread_time()
            try:
                self._look(processes)
            finally:
                self._begun, self._took = begin, self._clock() - begin
                self._took_cpu = max(time.thread_time() - cpu_s, LEAST_CPU_S)

    def _look(self, processes: Callable[[], Iterable[int]]) -> None:
        free = self._free_now()
        large: dict[File, int] = {}
        found = measure(
            self._fd, most_entries=SEVERE * self._entries, most_bytes=self._far, large=large
        )
        device = os.fstat(self._fd).st_dev
        held = unlinked(processes(), self._known)
        hidden = sum(size for (place, _), size in held.files.items() if place == device)
        self._free, self._known = free, large | held.files
        self.measured = replace(
            found,
            bytes=found.bytes + hidden,
            complete=found.complete and held.complete,
            too_many_open_files=not held.complete,
        )
        self._lowest = TreeSize(
            min(self._lowest.bytes, self.measured.bytes),
            min(self._lowest.entries, self.measured.entries),
        )

    def sentence(self) -> str:
        """Return the excess as a phrase for error messages."""
        found = self.measured
        if found.too_many_open_files:
            return "disk quota (processes hold more files than can be measured)"
        more = "" if found.complete else "more than "
        if found.bytes > self._size:
            held, limit = format_bytes(found.bytes), format_bytes(self._size)
        else:
            held, limit = f"{found.entries:,} files and folders", f"{self._entries:,}"
        return f"disk quota ({self._name} holds {more}{held}, limit {limit})"

    def close(self) -> None:
        """Wait for a running scan and close the descriptor. Blocks."""
        with self._in_use:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _free_now(self) -> int:
        found = os.statvfs(self._fd)
        return found.f_bfree * found.f_frsize


# Deleted files that processes hold by descriptors, by mappings or as their program. Hostile code
# may hold many to hide some, so one scan reads a bounded number.
MOST_FILES = 50_000
"""Maximum number of descriptors, threads and mapped files that one scan reads."""
MOST_MAPPINGS = 32 * MIB
"""Maximum bytes of mapping tables that one scan reads: some 400,000 mappings."""
_DELETED = b" (deleted)\n"
_CHUNK = 64 * KIB
"""Bytes per read(2): Linux returns little more than a page. A larger buffer costs an mmap each."""


@dataclass(slots=True)
class DeletedFiles:
    """Bytes on disk or in memory by deleted file; not `complete` if a limit was reached.

    The size of a mapped file that this user may not stat is an estimate.
    """

    files: dict[File, int] = field(default_factory=dict)
    complete: bool = True


def opened(processes: Iterable[int]) -> DeletedFiles:
    """Return the deleted files that `processes` hold by descriptors. Blocks."""
    look = _Look({})
    look.run(processes, mapped=False)
    return look.found


def unlinked(processes: Iterable[int], known: Mapping[File, int] | None = None) -> DeletedFiles:
    """Return the deleted files that `processes` hold by descriptors, mappings or as their program.

    `known` are earlier sizes. Blocks, also on processes that are allocating.
    """
    look = _Look(known or {})
    look.run(processes, mapped=True)
    return look.found


class _ScanLimitExceeded(Exception):
    """A limit of one scan was reached."""


class _Look:
    def __init__(self, known: Mapping[File, int]) -> None:
        self.found = DeletedFiles()
        self._known = known
        self._files = MOST_FILES
        self._text = MOST_MAPPINGS
        self._allowed = True

    def run(self, processes: Iterable[int], *, mapped: bool) -> None:
        try:
            for pid in processes:
                with ignore_missing:
                    self._open_files(pid)
                if mapped:
                    with ignore_missing:
                        self._running(pid)
                    with ignore_missing:
                        self._mapped(pid)
        except _ScanLimitExceeded:
            self.found.complete = False

    def _spend(self, count: int) -> None:
        self._files -= count
        if self._files < 0:
            raise _ScanLimitExceeded

    def _open_files(self, pid: int) -> None:
        """Count deleted files among a process's descriptors, listed by one of its threads.

        Threads share their descriptors; a thread that has ended lists none.
        """
        for thread in threads(pid):
            self._spend(1)
            folder = f"/proc/{thread}/fd"
            with ignore_missing:
                names = os.listdir(folder)  # noqa: PTH208  # hostile code may have many
                self._spend(len(names))
                for name in names:
                    with ignore_missing:
                        self._note(os.stat(f"{folder}/{name}"))  # noqa: PTH116  # the same
                if names and os.path.lexists(f"{folder}/{names[-1]}"):
                    return

    def _running(self, pid: int) -> None:
        """Count the program of a process if it is deleted, even if it is no longer mapped."""
        for thread in threads(pid):
            self._spend(1)
            with ignore_missing:
                self._note(os.stat(f"/proc/{thread}/exe"))  # noqa: PTH116
                return

    def _mapped(self, pid: int) -> None:
        thread, text = self._mappings(pid)
        place, seen = -1, set[bytes]()
        while (place := text.find(_DELETED, place + 1)) >= 0:
            line = text[text.rfind(b"\n", 0, place) + 1 : place]
            span, _, _, device, inode, _ = line.split(maxsplit=5)
            if (name := device + b" " + inode) in seen:
                continue
            if not self._look_at(f"/proc/{thread}/map_files/{_plain(span)}"):
                start, end = (int(address, 16) for address in span.split(b"-"))
                major, minor = (int(number, 16) for number in device.split(b":"))
                self._guess((os.makedev(major, minor), int(inode)), end - start)
            else:
                seen.add(name)

    def _look_at(self, path: str) -> bool:
        if not self._allowed:
            return False
        self._spend(1)
        with ignore_missing:  # may be unmapped meanwhile
            try:
                self._note(os.stat(path))  # noqa: PTH116
            except PermissionError:
                self._allowed = False
        return self._allowed

    def _mappings(self, pid: int) -> tuple[int, bytes]:
        """Return a thread that shows the table of mappings, and the table; empty if none does."""
        for thread in threads(pid):
            self._spend(1)
            with ignore_missing:
                fd = os.open(f"/proc/{thread}/maps", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if text := self._read(fd):
                        return thread, text
                finally:
                    os.close(fd)
        return pid, b""

    def _read(self, fd: int) -> bytes:
        parts = []
        while part := os.read(fd, _CHUNK):
            parts.append(part)
            self._text -= len(part)
            if self._text < 0:
                raise _ScanLimitExceeded
        return b"".join(parts)

    def _note(self, info: os.stat_result) -> None:
        if not info.st_nlink and stat.S_ISREG(info.st_mode):
            file, size = (info.st_dev, info.st_ino), info.st_blocks * BLOCK
            self.found.files[file] = max(self.found.files.get(file, 0), size)

    def _guess(self, file: File, length: int) -> None:
        """Charge a file that cannot be stat'ed with the largest known size."""
        found = self.found.files
        found[file] = max(found.get(file, 0), length, self._known.get(file, 0))


def _plain(span: bytes) -> str:
    """Return the name in /proc/PID/map_files of an address range in maps.

    Addresses in maps have leading zeros.
    """
    return "-".join(f"{int(address, 16):x}" for address in span.split(b"-"))
