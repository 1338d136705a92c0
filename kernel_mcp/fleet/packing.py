"""Packing of folders as tar files, and unpacking; their content is not trusted.

A folder is read by descriptors, as its owner may change it meanwhile: no symlink is followed, and
only folders, files and symlinks are included. Files are unpacked into a private folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kernel_mcp.fleet.signed import NotOurs
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.records import dataclass

MOST_DEPTH = 100
MOST_PATH = 3000
"""Most bytes of a path: Linux permits 4096, including the folder that it is unpacked into."""
MOST_NAMED = 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_RIGHTS = 0o777


@dataclass(frozen=True, slots=True)
class Packed:
    """Entries that were not packed: some of their paths, and their number."""

    left_out: tuple[str, ...] = ()
    count: int = 0


class _Packer:
    def __init__(self, archive: tarfile.TarFile, most_bytes: int, most_entries: int) -> None:
        self._archive = archive
        self._bytes = most_bytes
        self._entries = most_entries
        self.left_out: list[str] = []
        self.count = 0

    def folder(self, fd: int, path: str, depth: int) -> None:
        """Add the entries of an open folder."""
        with os.scandir(fd) as found:
            names = sorted(entry.name for entry in found)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                self._entry(fd, name, f"{path}/{name}" if path else name, depth)

    def _entry(self, folder: int, name: str, path: str, depth: int) -> None:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        self._entries -= 1
        if self._entries < 0 or len(os.fsencode(path)) > MOST_PATH or depth > MOST_DEPTH:
            self._leave_out(path)
        elif stat.S_ISDIR(info.st_mode):
            self._folder(folder, name, path, depth)
        elif stat.S_ISREG(info.st_mode):
            self._file(folder, name, path)
        elif stat.S_ISLNK(info.st_mode):
            entry = _entry_of(path, info, tarfile.SYMTYPE)
            entry.linkname = os.readlink(name, dir_fd=folder)
            self._archive.addfile(entry)
        else:  # a socket or pipe: useless without its process
            self._leave_out(path)

    def _folder(self, folder: int, name: str, path: str, depth: int) -> None:
        try:
            fd = os.open(name, _FOLDER, dir_fd=folder)
        except (PermissionError, NotADirectoryError, OSError):
            self._leave_out(path)
            return
        try:
            self._archive.addfile(_entry_of(path, os.fstat(fd), tarfile.DIRTYPE))
            self.folder(fd, path, depth + 1)
        finally:
            os.close(fd)

    def _file(self, folder: int, name: str, path: str) -> None:
        try:
            fd = os.open(name, _FILE, dir_fd=folder)
        except OSError:
            self._leave_out(path)
            return
        with open(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > self._bytes:
                self._leave_out(path)
                return
            self._bytes -= info.st_size
            entry = _entry_of(path, info, tarfile.REGTYPE)
            entry.size = info.st_size
            self._archive.addfile(entry, _ExactReader(file, info.st_size))

    def _leave_out(self, path: str) -> None:
        self.count += 1
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append(path)


class _ExactReader:
    """Reader of exactly `size` bytes; bytes that the file lacks by then are zeros."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Read as a file does."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._left -= wanted
        return data + bytes(wanted - len(data))


def _entry_of(path: str, info: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type = kind
    entry.mode = stat.S_IMODE(info.st_mode) & _RIGHTS
    entry.mtime = int(info.st_mtime)
    return entry


def pack(folder: Path, file: IO[bytes], *, most_bytes: int, most_entries: int) -> Packed:
    """Write a folder as a tar file, which is empty if there is no folder.

    Returns what was left out. Blocking. Raises OSError.
    """
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        packer = _Packer(archive, most_bytes, most_entries)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(folder, _FOLDER)
            try:
                packer.folder(fd, "", 0)
            finally:
                os.close(fd)
    return Packed(tuple(packer.left_out), packer.count)


def unpack(file: IO[bytes], folder: Path) -> None:
    """Create a folder from a tar file of `pack`. Blocking. Raises OSError, NotOurs.

    Symlinks are created last, so that nothing is written through one.
    """
    make_private(folder)
    links: list[tuple[Path, str]] = []
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for entry in archive:
                path = folder.joinpath(*_parts(entry.name))
                if entry.isdir():
                    path.mkdir(mode=0o700)
                    folders.append((path, entry))
                elif entry.issym():
                    links.append((path, entry.linkname))
                elif entry.isreg():
                    _write(archive, entry, path)
                else:
                    raise NotOurs(f"a packed folder has {entry.name!r}, which is no file")
    except tarfile.TarError as error:
        raise NotOurs(f"a packed folder cannot be read: {error}") from error
    for path, target in links:
        path.symlink_to(target)
    for path, entry in reversed(folders):
        path.chmod(entry.mode | stat.S_IRWXU)
        os.utime(path, (entry.mtime, entry.mtime))


def _parts(name: str) -> Iterator[str]:
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise NotOurs(f"a packed folder has the name {name!r}")
        yield part


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(entry)
    assert source is not None  # of a regular file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as written:
        while piece := source.read(1024 * 1024):
            written.write(piece)
        os.fchmod(written.fileno(), entry.mode | stat.S_IRUSR | stat.S_IWUSR)
    os.utime(path, (entry.mtime, entry.mtime))
