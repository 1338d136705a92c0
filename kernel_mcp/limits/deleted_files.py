"""Files without a name that processes still hold, found while hostile code tries to hide them.

A process holds files by descriptors, by mappings and by running them. How much of that is looked
at is bounded: who holds more than that is told apart instead.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernel_mcp.barriers import absences
from kernel_mcp.config.values import MIB
from kernel_mcp.linux.proc import threads
from kernel_mcp.linux.walk import BLOCK, File

MOST_FILES = 50_000
"""How many descriptors, threads and mapped files one look takes in."""
MOST_MAPPINGS = 32 * MIB
"""How much of the tables of mappings one look reads, in bytes: some 400,000 mappings."""
_DELETED = b" (deleted)\n"
_CHUNK = MIB


@dataclass(slots=True)
class DeletedFiles:
    """Bytes on disk or in memory of each file; `complete` unless there was too much to look at.

    The size of a mapped file that this user may not look at is a guess.
    """

    files: dict[File, int] = field(default_factory=dict)
    complete: bool = True


def opened(processes: Iterable[int]) -> DeletedFiles:
    """What processes hold by descriptors. Blocks."""
    look = _Look({})
    look.run(processes, mapped=False)
    return look.found


def unlinked(processes: Iterable[int], known: Mapping[File, int] | None = None) -> DeletedFiles:
    """What processes hold in any way; `known` are earlier sizes of files.

    Blocks, and waits for processes that are busy getting memory.
    """
    look = _Look(known or {})
    look.run(processes, mapped=True)
    return look.found


class _TooMuch(Exception):
    """There is more than one look takes in."""


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
                with absences:
                    self._open_files(pid)
                if mapped:
                    with absences:
                        self._running(pid)
                    with absences:
                        self._mapped(pid)
        except _TooMuch:
            self.found.complete = False

    def _spend(self, count: int) -> None:
        self._files -= count
        if self._files < 0:
            raise _TooMuch

    def _open_files(self, pid: int) -> None:
        """All threads have the same; one that has ended, or ends meanwhile, shows none."""
        for thread in threads(pid):
            self._spend(1)
            folder = f"/proc/{thread}/fd"
            with absences:
                names = os.listdir(folder)  # noqa: PTH208  # hostile code may have many
                self._spend(len(names))
                for name in names:
                    with absences:
                        self._note(os.stat(f"{folder}/{name}"))  # noqa: PTH116  # the same
                if names and os.path.lexists(f"{folder}/{names[-1]}"):
                    return

    def _running(self, pid: int) -> None:
        """The program of a process; the mappings of it can be undone."""
        for thread in threads(pid):
            self._spend(1)
            with absences:
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
        """Note a mapped file; False where this user may not."""
        if not self._allowed:
            return False
        self._spend(1)
        with absences:  # unmapped meanwhile
            try:
                self._note(os.stat(path))  # noqa: PTH116
            except PermissionError:
                self._allowed = False
        return self._allowed

    def _mappings(self, pid: int) -> tuple[int, bytes]:
        """The table of mappings, and a thread that shows it."""
        for thread in threads(pid):
            self._spend(1)
            with absences:
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
                raise _TooMuch
        return b"".join(parts)

    def _note(self, info: os.stat_result) -> None:
        if not info.st_nlink and stat.S_ISREG(info.st_mode):
            file, size = (info.st_dev, info.st_ino), info.st_blocks * BLOCK
            self.found.files[file] = max(self.found.files.get(file, 0), size)

    def _guess(self, file: File, length: int) -> None:
        """Charge a file that cannot be looked at with the most that is known of it."""
        found = self.found.files
        found[file] = max(found.get(file, 0), length, self._known.get(file, 0))


def _plain(span: bytes) -> str:
    """The name in map_files of addresses in maps, which pads them."""
    return "-".join(f"{int(address, 16):x}" for address in span.split(b"-"))
