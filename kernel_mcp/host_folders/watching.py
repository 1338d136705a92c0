"""Watch the mounted folders, files that agents obey, and files elsewhere for changes (inotify)."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kernel_mcp.host_folders import secrets
from kernel_mcp.host_folders.makers import Makers
from kernel_mcp.host_folders.mounted_folder import MountedFolder
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.records import dataclass
from kernel_specs import linux

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
_MOST_OBEYED = 1000
"""Maximum number of files watched for changes in place, as agents obey them."""
_MOST_MOVED = 64
"""Maximum number of renames whose second event is pending."""


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
