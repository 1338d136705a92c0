"""Record if processes of sandboxes or of the host made entries and wrote files (fanotify)."""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kernel_mcp.host_folders import names, secrets
from kernel_mcp.host_folders.inodes import born
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.linux.safe_tree import open_beneath, opened_beneath
from kernel_specs import linux

# <sys/fanotify.h>

_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_UNLIMITED_MARKS = 0x1, 0x2, 0x20
_FAN_REPORT_PIDFD, _FAN_REPORT_DIR_FID, _FAN_REPORT_NAME = 0x80, 0x400, 0x800
_FAN_MARK_ADD = 0x1
_FAN_MODIFY, _FAN_CLOSE_WRITE, _FAN_MOVED_FROM, _FAN_MOVED_TO = 0x2, 0x8, 0x40, 0x80
_FAN_CREATE, _FAN_DELETE, _FAN_Q_OVERFLOW = 0x100, 0x200, 0x4000
_FAN_CHANGES = (
    _FAN_MODIFY | _FAN_CLOSE_WRITE | _FAN_MOVED_FROM | _FAN_MOVED_TO | _FAN_CREATE | _FAN_DELETE
)
_FAN_EVENT_ON_CHILD, _FAN_ONDIR = 0x08000000, 0x40000000
_FAN_EVENT, _FAN_INFO = struct.Struct("=IBBHQii"), struct.Struct("=BBH")
_OF_NAME, _OF_PIDFD = 2, 4
_HANDLE = struct.Struct("=Ii")
_MOST_MADE = 1 << 16
"""Maximum number of entries whose makers are recorded; the oldest are dropped."""
_MOST_MISSED = 64
"""Maximum number of recorded time spans in which the makers of entries were lost."""
_NEAR_NS = 10**9 // 20
"""Tolerance for file times in ns: Linux takes them from a clock with ticks of up to 10 ms."""
_MOST_WRITTEN = 1 << 10
"""Maximum number of files whose last writer is recorded."""
_RECENT_NS = 10**9
"""Age in ns up to which a recorded write explains a change that was just reported."""
_LATE_MS = 1
"""Wait for a fanotify event in ms: inotify reports a change microseconds earlier or later."""
HOST, CODE, LOST, LIKELY, NAMED = "host", "code", "lost", "likely", "named"
"""Makers of an entry: a program of the host, one of a sandbox, or one that has already exited.

`LIKELY` means that code made so much at the time that some of it was not recorded. `NAMED` means
that the entry may be older than the settings that name it. `CODE` may be followed by a colon and
the user id of the process.
"""
T = TypeVar("T")


def by_code(maker: str) -> bool:
    """Return True if the maker is a process of a sandbox."""
    return maker.startswith(CODE)


def counts_as_code(maker: str) -> bool:
    """Return True if an entry of this maker is treated as made by code."""
    return by_code(maker) or maker == LIKELY


def user_of(maker: str) -> int | None:
    """Return the user id of a maker in a sandbox; None if it is not known."""
    user = maker.removeprefix(f"{CODE}:")
    return int(user) if user.isdecimal() else None


class Makers:
    """Records which entries were made by processes of sandboxes and which by the host's.

    Uses fanotify(7), which requires root and Linux 5.15. Processes of sandboxes are recognised by
    their pid namespace.
    """

    def __init__(self) -> None:
        flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_UNLIMITED_MARKS
        report = _FAN_REPORT_PIDFD | _FAN_REPORT_DIR_FID | _FAN_REPORT_NAME
        self._fd = -1
        if os.geteuid() == 0:
            with suppress(OSError):
                self._fd = linux.fanotify_init(flags | report, os.O_RDONLY)
        self._made: dict[tuple[bytes, str], str] = {}
        self._noted: dict[tuple[bytes, str], int] = {}
        """Times (ns) at which entries that code may have made were recorded."""
        self._wrote: dict[tuple[bytes, str], tuple[str, int]] = {}
        """The last writer of an entry, and the time (ns) at which that was recorded."""
        self._names: set[str] = set()
        self._of_others = False
        """True if some of the events being read are of makers other than `HOST`."""
        self._drained_ns = time.time_ns()
        """Time (ns) at which all events had been read."""
        self._spans: deque[tuple[int, int]] = deque(maxlen=_MOST_MISSED)
        """Time spans (ns) in which makers were lost because code made too many entries."""

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 if fanotify is not available."""
        return self._fd

    def add(self, folder: int) -> bool:
        """Watch an open folder; return False if the makers of its entries cannot be known."""
        changes = _FAN_CHANGES & ~_FAN_MODIFY
        return self._mark(changes | _FAN_ONDIR | _FAN_EVENT_ON_CHILD, folder)

    def add_file(self, file: int) -> None:
        """Watch an open file for writes through any of its names."""
        self._mark(_FAN_MODIFY, f"/proc/self/fd/{file}")

    def _mark(self, mask: int, place: int | str) -> bool:
        with suppress(OSError):
            if self._fd >= 0:
                linux.fanotify_mark(self._fd, _FAN_MARK_ADD, mask, place)
                return True
        return False

    def of(self, root: int, parts: Parts) -> str:
        """Return the maker of an entry below the folder `root`; `CODE` with its user id if known.

        An entry made in a new folder before its watch began counts as made by the folder's maker.
        """
        self.note()
        for end in range(len(parts), 0, -1):
            key = self._key(root, parts[:end])
            if key is not None and key not in self._made and end == len(parts):
                select.select([self._fd], [], [], _LATE_MS / 1000)
                self.note()
            if key in self._made:
                return self._made[key]
        return LIKELY if self._missed(root, parts) else LOST

    def _missed(self, root: int, parts: Parts) -> bool:
        """Return True if the entry was made in a time span in which makers were lost."""
        if not self._spans:
            return False
        with suppress(OSError), opened_beneath(root, parts) as fd:
            changed = os.fstat(fd).st_ctime_ns + _NEAR_NS
            made = (born(fd) or changed) - _NEAR_NS
            return any(begin <= changed and made <= end for begin, end in self._spans)
        return False

    def writer(self, root: int, parts: Parts, *, recently: bool) -> str:
        """Return the last writer of a file, else its maker; `LOST` if neither is known.

        With `recently` only a write of the last second counts.
        """
        self.note()
        key = self._key(root, parts)
        if key is None:  # its folder is gone
            return LOST
        maker, moment = self._wrote.get(key, ("", 0))
        if recently:
            return maker if moment > time.monotonic_ns() - _RECENT_NS else LOST
        return maker or self.of(root, parts)

    def look_for(self, names: Iterable[str]) -> None:
        """Record the makers of entries of these names as well."""
        self._names.update(names)

    @staticmethod
    def _key(root: int, parts: Parts) -> tuple[bytes, str] | None:
        try:
            folder = open_beneath(root, parts[:-1], os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return None
        try:
            handle = linux.file_handle(folder)
            system = struct.pack("=Q", os.fstatvfs(folder).f_fsid)
        except OSError:
            return None
        finally:
            os.close(folder)
        return system + handle, parts[-1]

    def _matters(self, name: str) -> bool:
        last = name.lower()
        known = name in names.SIGNS or name in self._names
        return known or secrets.executed((last,)) or secrets.obeyed((last,))

    def note(self) -> None:
        """Read all pending events, while the processes that caused them still exist."""
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # no more events, or no free descriptor
                self._of_others, self._drained_ns = False, time.time_ns()
                return
            place = 0
            known: dict[int, str] = {}
            while place < len(data):
                length, _, _, head, mask, _, pid = _FAN_EVENT.unpack_from(data, place)
                if mask & _FAN_Q_OVERFLOW:
                    if self._of_others:
                        self._spans.append((self._drained_ns, time.time_ns()))
                    self._made.clear()
                    self._noted.clear()
                self._note(data[place + head : place + length], mask, pid, known)
                place += length

    def _keep_made(self, key: tuple[bytes, str], maker: str) -> None:
        oldest = _keep(self._made, key, maker, _MOST_MADE)
        self._noted.pop(key, None)
        if maker != HOST:
            self._noted[key] = time.time_ns()
        if oldest is None or oldest not in self._noted:
            return
        moment = self._noted.pop(oldest)
        begin, end = self._spans.pop() if self._spans else (moment, moment)
        if not begin <= moment <= end + 10**9:
            self._spans.append((begin, end))
            begin = moment
        self._spans.append((begin, max(end, moment)))

    def _note(self, records: bytes, mask: int, pid: int, known: dict[int, str]) -> None:
        """Record one event; `known` caches the batch's makers by pid, except `HOST`."""
        key, process, place = None, -1, 0
        while place < len(records):
            kind, _, length = _FAN_INFO.unpack_from(records, place)
            record = records[place + _FAN_INFO.size : place + length]
            place += length
            if kind == _OF_PIDFD:
                (process,) = struct.unpack_from("=i", record)
            elif kind == _OF_NAME:
                size, _ = _HANDLE.unpack_from(record, 8)
                end = 8 + _HANDLE.size + size
                key = record[:end], os.fsdecode(record[end:].split(b"\0")[0])
        try:
            if key is None:
                return
            made = mask & (_FAN_CREATE | _FAN_MOVED_TO)
            maker = known.get(pid) or _maker(pid, process)
            if maker != HOST:
                known[pid], self._of_others = maker, True
            if made and (mask & _FAN_ONDIR or self._matters(key[1])):
                self._keep_made(key, maker)
            if mask & _FAN_CHANGES:
                _keep(self._wrote, key, (maker, time.monotonic_ns()), _MOST_WRITTEN)
        finally:
            if process >= 0:
                os.close(process)


def _keep(
    known: dict[tuple[bytes, str], T], key: tuple[bytes, str], maker: T, most: int
) -> tuple[bytes, str] | None:
    """Record a maker as the newest; return the oldest key if it had to be dropped, else None."""
    known.pop(key, None)
    oldest = next(iter(known)) if len(known) >= most else None
    if oldest is not None:
        del known[oldest]
    known[key] = maker
    return oldest


def _maker(pid: int, process: int) -> str:
    """Return `HOST`, `CODE` with its user id, or `LOST` for a process, by its pid and pidfd."""
    if pid == 0:
        return HOST  # outside this process's pid namespace, which contains all sandboxes
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/self/fdinfo/{process}").read_text(encoding="ascii").splitlines()
        numbers = next(line.split()[1:] for line in lines if line.startswith("NSpid:"))
        if int(numbers[0]) > 0:
            return HOST if len(numbers) == 1 else _code(numbers[0])
    return LOST


def _code(pid: str) -> str:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        user = next(line.split()[1] for line in lines if line.startswith(b"Uid:"))
        return f"{CODE}:{user.decode()}"
    return CODE
