"""The quota of one folder, by repeated scans, and the deleted files that processes still hold.

A scan takes time in proportion to the number of files: slow folders are scanned less often, and
sooner when their disk fills up.
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
from kernel_mcp.config.values import KIB, MIB, format_bytes
from kernel_mcp.linux.proc import threads
from kernel_mcp.linux.walk import BLOCK, File, TreeSize, entries_within, measure
from kernel_mcp.records import dataclass

LEAST_PAUSE_S = 0.5
SHARE = 20
"""Scans of one folder take at most 1/`SHARE` of the time, and those of all folders together
1/`SHARE` of a processor, except when the disk fills up."""
LEAST_CPU_S = 0.003
"""Least CPU seconds that a scan counts as: reading the mappings of a kernel for the first time
takes that."""
HURRIED_SHARE = 2
SLACK_BYTES = 16 * MIB
SLACK_ENTRIES = 100
"""Bytes and entries that code may add to a full folder, so that it can make room in it."""
SEVERE = 2
SEVERE_BYTES = 512 * MIB
"""A folder with this many times its limit, and this many bytes above it, runs no more code."""


class FolderQuota:
    """Watches one folder through a descriptor, which survives renames. One thread at a time.

    `measured`, `excess` and `severe` come from the last scan.
    """

    def __init__(
        self, folder: Path, name: str, size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` appears in sentences, `size` is in bytes. Raises OSError without `folder`."""
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
        """Large and deleted files by the last scan."""
        self._in_use = Lock()
        self.measured = TreeSize()

    @property
    def full(self) -> bool:
        """Return True if the folder holds more than its limit, or too much to be counted."""
        found = self.measured
        return found.bytes > self._size or found.entries > self._entries or not found.complete

    @property
    def severe(self) -> bool:
        """Return True if the folder is so far above its limit that it has to be emptied."""
        found = self.measured
        return (
            found.bytes > self._far or found.entries > SEVERE * self._entries or not found.complete
        )

    @property
    def growing(self) -> bool:
        """Return True if it is full and has grown since `start`, or since files were removed.

        Growth up to `SLACK_BYTES` and `SLACK_ENTRIES` does not count.
        """
        found, lowest = self.measured, self._lowest
        most, many = self._size, self._entries
        if lowest.bytes > most:
            most = lowest.bytes + SLACK_BYTES
        if lowest.entries > many:
            many = lowest.entries + SLACK_ENTRIES
        return found.bytes > most or found.entries > many or not found.complete

    def start(self) -> None:
        """Record the size from which a full folder may not grow."""
        self._lowest = self.measured

    def in_turn(self, others: int = 0) -> bool:
        """Return True if enough time has passed since the last scan for scans to keep to `SHARE`.

        `others` is the number of other kernels whose folders are scanned.
        """
        ours, all_of_them = self._took * SHARE, self._took_cpu * SHARE * (1 + others)
        return self._clock() - self._begun >= max(LEAST_PAUSE_S, ours, all_of_them)

    def due(self, others: int = 0) -> bool:
        """Return True if `in_turn`, or if the disk fills up so fast that it is needed sooner."""
        if self.in_turn(others):
            return True
        if self._clock() - self._begun < self._took * HURRIED_SHARE:
            return False
        if not self._in_use.acquire(blocking=False):
            return False  # it is being looked at, or closed
        try:
            # statvfs finds a fast writer before the next scan is due
            room = max(self._size - self.measured.bytes, SLACK_BYTES)
            return self._fd >= 0 and self._free - self._free_now() > room // 2
        finally:
            self._in_use.release()

    def look(self, processes: Callable[[], Iterable[int]] = tuple) -> None:
        """Measure the folder and the deleted files that `processes` hold. Blocks.

        Raises OSError and MemoryError for shortages of the server; the last figures stay.
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
        """Return the excess as a phrase, for the cause of an end."""
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
        """Close the descriptor, after a running scan. Blocks."""
        with self._in_use:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _free_now(self) -> int:
        found = os.statvfs(self._fd)
        return found.f_bfree * found.f_frsize


# Deleted files that processes hold by descriptors, by mappings or by running them. Hostile code
# may hold many to hide some: one scan reads a bounded number.
MOST_FILES = 50_000
"""Most descriptors, threads and mapped files that one scan reads."""
MOST_MAPPINGS = 32 * MIB
"""Most bytes of mapping tables that one scan reads: some 400,000 mappings."""
_DELETED = b" (deleted)\n"
_CHUNK = 64 * KIB
"""Bytes per read(2). Linux returns a page or little more; a larger buffer is mapped and unmapped
each time."""


@dataclass(slots=True)
class DeletedFiles:
    """Bytes on disk or in memory by deleted file; `complete` unless a bound was reached.

    The size of a mapped file that this user may not stat is a guess.
    """

    files: dict[File, int] = field(default_factory=dict)
    complete: bool = True


def opened(processes: Iterable[int]) -> DeletedFiles:
    """Return the deleted files that `processes` hold by descriptors. Blocks."""
    look = _Look({})
    look.run(processes, mapped=False)
    return look.found


def unlinked(processes: Iterable[int], known: Mapping[File, int] | None = None) -> DeletedFiles:
    """Return the deleted files that `processes` hold by descriptors, mappings or by running them.

    `known` are earlier sizes. Blocks, also on processes that are allocating.
    """
    look = _Look(known or {})
    look.run(processes, mapped=True)
    return look.found


class _ScanLimitExceeded(Exception):
    """A bound of one scan was reached."""


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
        """Count deleted files in a process's descriptors, by its first thread that shows them.

        Threads share their descriptors; a thread that has ended shows none.
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
        """Count the program of a process if it is deleted, also when it is not mapped any more."""
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
        with ignore_missing:  # unmapped meanwhile
            try:
                self._note(os.stat(path))  # noqa: PTH116
            except PermissionError:
                self._allowed = False
        return self._allowed

    def _mappings(self, pid: int) -> tuple[int, bytes]:
        """Return the table of mappings, and a thread that shows it; empty if none does."""
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
    """Return the name in /proc/PID/map_files of an address range in maps, where it is padded."""
    return "-".join(f"{int(address, 16):x}" for address in span.split(b"-"))
