"""Watch the mounted folders for changes, and determine if code or the host made them."""

from __future__ import annotations

import os
import select
import stat
import struct
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kernel_mcp.host_folders import names, secrets
from kernel_mcp.host_folders.findings import born
from kernel_mcp.host_folders.named_paths import MOST_NAMED
from kernel_mcp.host_folders.namespaces import Work
from kernel_mcp.host_folders.rights import Rights
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.host_folders.walking import Walk
from kernel_mcp.linux.safe_tree import open_beneath, open_place
from kernel_mcp.records import dataclass
from kernel_specs import linux
from kernel_specs.landlock import calls

# <sys/inotify.h>
_IN_ATTRIB, _IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = (
    0x4,
    0x8,
    0x40,
    0x80,
    0x100,
    0x200,
)
_IN_Q_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_IN_MODIFY = 0x2
_MASK = _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_IN_ONLYDIR, _IN_MASK_ADD, _IN_NONBLOCK, _IN_CLOEXEC = 0x01000000, 0x20000000, 0o4000, 0o2000000
_EVENT = struct.Struct("iIII")
READ_DIR = 1 << 3
ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""<linux/landlock.h>: listing, and the rights that a rule about a file may hold."""
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
_MOST_OBEYED = 1000
"""Maximum number of files watched for changes in place, as agents obey them."""
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
_MOST_MOVED = 64
"""Maximum number of renames whose second event is pending."""

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


@dataclass(frozen=True)
class Change:
    """An entry that was created, replaced, written or removed; any entry if `parts` is empty."""

    folder: MountedFolder
    parts: Parts = ()
    hidden: bool = False
    """True if it had a secret's name before."""

    @property
    def urgent(self) -> bool:
        """True if its name may require a cover."""
        path = (*self.folder.above, *self.parts)
        named = (secrets.secret(path, kind) for kind in (stat.S_IFREG, stat.S_IFDIR))
        return self.hidden or secrets.judged_by_content(path) or any(named)


class MountedFolder:
    """One mounted folder: its descriptor, its walk, and where sandboxes see it."""

    def __init__(
        self,
        number: int,
        data: dict[str, Any],
        watches: Watches,
        inodes: dict[tuple[int, int], int],
        twins: set[tuple[int, int]],
    ) -> None:
        self.number = number
        self.host, self.guest = str(data["host"]), str(data["guest"])
        self.above = Path(self.host).parts[1:]
        self._own = {tuple(path): str(kind) for path, kind in data["own"]}
        self.writable = data["writable"] is True
        self.tells_makers = self.writable
        """True if the makers of its entries are known."""
        self._strict = data["strict"] is True
        self._inner = [tuple(path) for path in data["inner"]]
        self._watches = watches
        self._inodes, self._twins = inodes, twins
        self._root = -1
        self.sources: set[Parts] = set()
        """Settings files below the mount from which the server has read paths."""
        self.rights_changed = False
        """True if the access rights of the folder itself may have changed."""
        self.obeyed: dict[Parts, bool] = {}
        """Paths that agents obey and that have changed since the last report to the server.

        The value is True if the file was written in place (IN_MODIFY), else False.
        """
        self._link_targets: set[Parts] = set()
        """Targets of links whose names agents obey."""
        self.named_by_server: list[Parts] = []
        """Last complete list of paths from the server; `named_next` collects the next one."""
        self.named_next: list[Parts] = []
        self.walk = self._open_walk()
        self.rights = Rights(self._root)
        self._began = time.time_ns()

    def _open_walk(self) -> Walk:
        if self._root >= 0:
            os.close(self._root)
        self._root = -1
        self._root = open_place(Path(self.host))
        return Walk(
            self._root,
            above=self.above,
            own=self._own,
            inner=self._inner,
            writable=self.writable,
            strict=self._strict,
            visit=lambda parts, fd: self._watches.add(self, parts, fd),
            obeys=self.note_obeyed,
            inodes=self._inodes,
            twins=self._twins,
        )

    @property
    def mount_check(self) -> Work:
        """The check that a sandbox shows this folder: its path there, with device and inode."""
        info = os.fstat(self._root)
        return self.guest, (), f"{info.st_dev}:{info.st_ino}"

    def maker(self, parts: Parts) -> str:
        """Return the maker of an entry that programs of the host execute.

        Empty if that is unknown, or if the host does not execute the entry.
        """
        covers = self.walk.findings.covers
        named = secrets.executed((*self.above, *parts))
        if not (self.tells_makers and (named or covers.get(parts) == secrets.FIXED)):
            return ""
        signs = [] if named or parts in self.walk.named_paths.all else self._signs(parts)
        makers = [self._watches.makers.of(self._root, each) for each in signs or [parts]]
        return min(makers, key=lambda maker: (not by_code(maker), maker != LIKELY, maker != HOST))

    def _signs(self, folder: Parts) -> list[Parts]:
        """Return the entries that make an environment or a repository of a folder."""
        top = "/".join((f"/proc/self/fd/{self._root}", *folder))
        found = (name for name in sorted(names.SIGNS) if os.path.lexists(f"{top}/{name}"))
        return [(*folder, name) for name in found]

    def is_older(self, parts: Parts) -> bool:
        """Return True if the entry at a path is older than this object.

        An unknown birth time counts as older.
        """
        try:
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return born(fd) < self._began
        finally:
            os.close(fd)

    def writer(self, parts: Parts, *, modified: bool) -> str:
        """Return the maker that last wrote, created or removed a file; empty if makers are unknown.

        For a file `modified` in place only a write of the last second counts. `LOST` if such a file
        has several names.
        """
        if not self.tells_makers:
            return ""
        if modified and self._has_names(parts):
            return LOST
        return self._watches.makers.writer(self._root, parts, recently=modified)

    def _has_names(self, parts: Parts) -> bool:
        with suppress(OSError):
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
            try:
                return os.fstat(fd).st_nlink > 1
            finally:
                os.close(fd)
        return False

    def obeys(self, parts: Parts) -> bool:
        """Return True if agents obey the file at a path, or a link with such a name leads to it."""
        return parts in self._link_targets or secrets.obeyed((*self.above[-1:], *parts))

    def note_obeyed(self, parts: Parts) -> None:
        """Watch a file that agents obey, or the target of a link with such a name.

        After the first walk the file counts as changed.
        """
        if self.walk.done:
            self.obeyed.setdefault(parts, False)
        goal = self.walk.goal(parts)
        if goal is None or goal == () or len(self._link_targets) >= MOST_NAMED:
            return
        if goal != parts:
            self._link_targets.add(goal)
        with suppress(OSError):  # missing, or not accessible
            fd = open_beneath(self._root, goal, os.O_PATH | os.O_NOFOLLOW)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self._watches.add_file(self, goal, fd)
            finally:
                os.close(fd)

    def reads(self, parts: Parts) -> bool:
        """Return True if covers depend on the content of a file."""
        return parts in self.sources or secrets.judged_by_content((*self.above, *parts))

    @property
    def is_folder(self) -> bool:
        """True if a folder is mounted, False for a single file."""
        return stat.S_ISDIR(os.fstat(self._root).st_mode)

    def reopen(self) -> None:
        """Open and walk the folder that is at the path now."""
        self.walk = self._open_walk()
        self.rights = Rights(self._root)
        if self.is_folder:
            self.walk.all()
            for _ in self.walk.fix(self.named_by_server):
                pass

    def allow(self, ruleset: int, read: int, write: int) -> None:
        """Add Landlock rules; where a folder holds a secret, one for each entry that is shown.

        Raises OSError.
        """
        access = write if self.writable else read
        closed = self.walk.closed() if self._strict else set()
        if () not in closed:
            calls.allow(ruleset, self._root, access if self.is_folder else access & ON_FILES)
            return
        pending: list[tuple[Parts, int]] = [((), access)]
        while pending:
            parts, access = pending.pop()
            with suppress(OSError):  # gone or not readable: it gets no rule
                folder = open_beneath(self._root, parts, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    if read & READ_DIR:
                        calls.allow(ruleset, folder, READ_DIR)
                    for name in os.listdir(folder):  # noqa: PTH208  # an open folder
                        path = (*parts, name)
                        rights = self._allow_entry(ruleset, folder, path, (access, read), closed)
                        if rights:
                            pending.append((path, rights))
                finally:
                    os.close(folder)

    def _allow_entry(
        self,
        ruleset: int,
        folder: int,
        path: Parts,
        rights: tuple[int, int],
        closed: Collection[Parts],
    ) -> int:
        """Add the rule for one entry: `rights` are those to write and those to read only.

        Return 0, or the rights for the entries of a folder that contains covered paths.
        """
        try:
            place = os.open(path[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return 0
        try:
            info = os.fstat(place)
            kind = None if stat.S_ISLNK(info.st_mode) else self.walk.shows(path, place, info)
            if kind is None:
                return 0
            access = rights[1 if kind == secrets.FIXED else 0]
            if not stat.S_ISDIR(info.st_mode):
                calls.allow(ruleset, place, access & ON_FILES)
            elif path in closed:
                return access
            else:
                calls.allow(ruleset, place, access)
            return 0
        finally:
            os.close(place)


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
        try:
            fd = open_beneath(root, parts, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            changed = os.fstat(fd).st_ctime_ns + _NEAR_NS
            made = (born(fd) or changed) - _NEAR_NS
        finally:
            os.close(fd)
        return any(begin <= changed and made <= end for begin, end in self._spans)

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


class Watches:
    """The inotify watches on mounted folders, on files that agents obey, and on files elsewhere."""

    def __init__(self) -> None:
        self.makers = Makers()
        self._fd = -1
        with suppress(OSError):
            self._fd = linux.inotify_init(_IN_NONBLOCK | _IN_CLOEXEC)
        self._places: dict[int, tuple[MountedFolder, Parts]] = {}
        limit = Path("/proc/sys/fs/inotify/max_user_watches")
        self._most = int(limit.read_text(encoding="ascii")) // 2 if limit.exists() else 0
        """Half of the user's watches: other programs share them, and code can make many folders."""
        self._files: dict[int, dict[tuple[MountedFolder, Parts], None]] = {}
        """Names of the watched files that agents obey, by watch."""
        self._file_at: dict[tuple[MountedFolder, Parts], int] = {}
        self._outside: dict[int, set[str]] = {}
        """Watched file names in folders outside of the mounts, by watch."""
        self.outside_changed = False
        """True if one of these has changed since the keeper last checked."""
        self._moved: set[int] = set()
        """Cookies of renames whose first name was a secret's."""
        self.lacking = 0

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 if inotify is not available."""
        return self._fd

    def _watch(self, path: bytes, mask: int) -> int:
        """Return the number of a watch on a path, -1 if there can be none."""
        with suppress(OSError):
            return linux.inotify_add_watch(self._fd, path, mask)
        return -1

    def add(self, folder: MountedFolder, parts: Parts, fd: int) -> None:
        """Watch an open folder."""
        path = f"/proc/self/fd/{fd}".encode()
        number = -1
        if len(self._places) < self._most:
            more = _IN_ATTRIB if folder.writable and not parts else 0
            number = self._watch(path, _MASK | _IN_ONLYDIR | more)
        if number < 0:
            self.lacking += 1
            return
        self._places[number] = (folder, parts)
        if folder.writable and not (self.makers.add(fd) or parts):
            folder.tells_makers = False

    def add_file(self, folder: MountedFolder, parts: Parts, file: int) -> None:
        """Watch the content of an open file."""
        self._forget_file(folder, parts)
        if len(self._file_at) >= _MOST_OBEYED:
            return
        path = f"/proc/self/fd/{file}".encode()
        number = self._watch(path, _IN_MODIFY)
        if number < 0:
            self.lacking += 1
            return
        self._file_at[folder, parts] = number
        self._files.setdefault(number, {})[folder, parts] = None
        self.makers.add_file(file)

    def _forget_file(self, folder: MountedFolder, parts: Parts) -> None:
        number = self._file_at.pop((folder, parts), -1)
        if number < 0:
            return
        del self._files[number][folder, parts]
        if not self._files[number]:
            del self._files[number]
            with suppress(OSError):  # its file is gone
                linux.inotify_rm_watch(self._fd, number)

    def watch_outside(self, paths: Iterable[str]) -> None:
        """Watch files outside of the mounts, if their folders exist."""
        for path in paths:
            folder, _, name = path.rpartition("/")
            flags = _MASK | _IN_ONLYDIR | _IN_MASK_ADD
            number = self._watch(os.fsencode(folder or "/"), flags)
            if number >= 0:
                self._outside.setdefault(number, set()).add(name)

    def events(self) -> Iterator[Change | None]:
        """Yield the pending changes; None if the queue overflowed and changes were lost."""
        try:
            data = os.read(self._fd, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        place = 0
        while place < len(data):
            number, mask, cookie, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0")
            place += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                yield None
            elif mask & _IN_IGNORED:
                self._places.pop(number, None)
                for gone in self._files.pop(number, {}):
                    self._file_at.pop(gone, None)
            elif number in self._files:
                for folder, parts in self._files[number]:
                    folder.obeyed.setdefault(parts, True)
            elif number in self._places or number in self._outside:
                text = os.fsdecode(name)
                self.outside_changed |= text in self._outside.get(number, ())
                if number in self._places:
                    yield from self._happened(*self._places[number], text, mask, cookie)

    def _happened(
        self, folder: MountedFolder, parts: Parts, name: str, mask: int, cookie: int
    ) -> Iterator[Change]:
        """Yield the changes that follow from one event in a watched folder."""
        if not name or mask & ~_IN_ISDIR == _IN_ATTRIB:
            folder.rights_changed |= not name
            return
        path = (*parts, name)
        if folder.writable:
            self._note_obeyed(folder, path, mask)
        if mask & (_IN_MOVED_FROM | _IN_DELETE) and folder.walk.left(path):
            yield Change(folder, path)
        if mask & _IN_MOVED_FROM:
            if folder.walk.hides(path):
                if len(self._moved) >= _MOST_MOVED:  # moved out of the watched folders
                    self._moved.clear()
                self._moved.add(cookie)
            return
        if mask & _IN_MOVED_TO and cookie in self._moved:
            self._moved.remove(cookie)
            yield Change(folder, path, hidden=True)
            return
        # a completed write matters only if covers depend on the content
        if not mask & _IN_CLOSE_WRITE or folder.reads(path):
            yield Change(folder, path)

    def _note_obeyed(self, folder: MountedFolder, path: Parts, mask: int) -> None:
        """Note a change of a file that agents obey, or the removal of a folder with such files."""
        left = mask & (_IN_MOVED_FROM | _IN_DELETE)
        if mask & _IN_ISDIR and left:
            for each, parts in list(self._file_at):
                if each is folder and parts[: len(path)] == path:
                    folder.obeyed[path] = False
                    self._forget_file(folder, parts)
        elif left:
            self._forget_file(folder, path)
        elif not mask & _IN_ISDIR and mask & (_IN_CREATE | _IN_MOVED_TO) and folder.obeys(path):
            folder.note_obeyed(path)
        if folder.obeys(path):
            folder.obeyed[path] = False
