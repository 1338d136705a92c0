"""The files of one session, for tools that work while hostile code changes them.

Paths are resolved beneath the folder by the kernel (see `openat2`), never compared as strings.
Everything here blocks and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kernel_mcp.barriers import shortage
from kernel_mcp.config.values import KIB, MIB
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import contents, folders
from kernel_mcp.files.contents import (
    PROBE_BYTES,
    Page,
    binary_kind,
    foreign_encoding,
    is_text,
    mime_of,
)
from kernel_mcp.files.folders import (
    FOLDER,
    Listing,
    entry_of,
    listing_of,
    make_folders,
    owner_of,
    replace_file,
)
from kernel_mcp.linux.safe_tree import Opener, empty_tree, open_beneath, remove_tree
from kernel_mcp.linux.walk import Holding, entries_within, measure
from kernel_mcp.output.images import sniff
from kernel_mcp.output.text import one_line

GUEST_ROOT = "/workspace"
"""Where kernels see the folder."""
PAGE_CHARS = 30_000
BINARY_BYTES = 48 * KIB
"""Largest binary file that is returned whole in an answer; pictures have the limit of files."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a reader gets of a file of `size` bytes: a page of text, or `data`."""

    path: str
    mime: str
    size: int
    page: Page | None = None
    data: bytes = b""


class Workspace:
    """A session's folder. Created files get `owner` (uid, gid), or the owner of the folder.

    `file_bytes` bounds what is read or written at once; `disk_bytes` all that the folder may hold
    after a write, 0 for no bound. Every method raises WorkspaceError.
    """

    def __init__(
        self,
        root: Path,
        owner: tuple[int, int] | None = None,
        *,
        file_bytes: int = 50 * MIB,
        disk_bytes: int = 0,
        opener: Opener | None = None,
    ) -> None:
        self.root = root
        self._owner = owner
        self._file_bytes = file_bytes
        self._disk_bytes = disk_bytes
        self._opener = opener
        self._writing = Lock()

    def list_files(self, path: str = "") -> Listing:
        """The entries of a folder, or the one file `path` names."""
        parts = self._parts(path)
        with self._root() as root:
            with self._opened(root, parts, os.O_PATH | os.O_NOFOLLOW, path) as found:
                info = os.fstat(found)
            if not stat.S_ISDIR(info.st_mode):
                return Listing("/".join(parts), (entry_of("/".join(parts), info),))
            with self._opened(root, parts, FOLDER, path) as folder:
                return listing_of("/".join(parts), folder)

    def read_file(
        self,
        path: str,
        *,
        offset: int = 0,
        limit: int = 0,
        encoding: str = "",
        characters: int = PAGE_CHARS,
    ) -> FileContent:
        """Lines of a UTF-8 text, a whole picture, or the bytes of another file if it is small.

        `offset` is the first line, from 0; `limit` the number of lines, 0 for as many as fit into
        `characters`. `encoding` utf-8 insists on text, base64 on bytes.
        """
        encoding = contents.encoding_of(encoding) if encoding else ""
        parts = self._parts(path)
        with self._root() as root, self._file(root, parts, path) as (fd, info):
            head = os.pread(fd, PROBE_BYTES, 0)
            name = "/".join(parts)
            mime = mime_of(name, head)
            picture = sniff(head) is not None
            if encoding != "base64" and is_text(head) and not picture:
                page = contents.lines_of(fd, info, path, offset, limit, characters)
                return FileContent(name, mime, info.st_size, page)
            if encoding != "base64" and (reason := foreign_encoding(head)):
                raise folders.not_utf8(path, reason)
            if encoding == "utf-8":
                kind = binary_kind(head) or ("a picture" if picture else "binary data")
                raise WorkspaceError(
                    f"{path!r} is {kind}, not text. Read it with code, or as base64."
                )
            most = self._file_bytes if picture else BINARY_BYTES
            data = contents.bytes_of(fd, info, path, most, self._file_bytes)
            return FileContent(name, mime, info.st_size, data=data)

    def read_resource(self, path: str) -> tuple[str | bytes, str]:
        """A whole file with its MIME type, as text when it is UTF-8."""
        parts = self._parts(path)
        with self._root() as root, self._file(root, parts, path) as (fd, info):
            data = contents.bytes_of(fd, info, path, self._file_bytes, self._file_bytes)
        mime = mime_of(parts[-1], data[:PROBE_BYTES])
        if is_text(data[:PROBE_BYTES]) and sniff(data) is None:
            with contextlib.suppress(UnicodeDecodeError):
                return data.decode("utf-8"), mime
        return data, mime

    def write_file(self, path: str, content: str | bytes, *, encoding: str = "utf-8") -> int:
        """Put `content` into a file, new or replaced as a whole; returns its size in bytes.

        Folders on the way are made. `encoding` base64 writes the bytes that text encodes.
        """
        data = content if isinstance(content, bytes) else contents.decoded(content, encoding)
        if len(data) > self._file_bytes:
            raise WorkspaceError(
                f"The content is {len(data):,} bytes; one file may have {self._file_bytes:,}."
            )
        parts = self._parts(path)
        if not parts or path.endswith("/"):
            raise WorkspaceError(f"{path!r} names a folder. Give the path of a file to write.")
        with self._root() as root, self._writing:  # one after the other, each sees those before
            if self._disk_bytes:
                self._check_room(root, len(data), len(parts))
            with folders.explained(path):
                owner = self._owner or owner_of(root)
                folder = make_folders(root, parts[:-1], owner, self._opener)
                try:
                    replace_file(folder, parts[-1], data, owner)
                finally:
                    os.close(folder)
        return len(data)

    def usage(self) -> Holding:
        """Bytes of disk that the folder takes up; the count ends once it exceeds `disk_bytes`."""
        with self._root() as root:
            return self._measured(root)

    def clear(self) -> None:
        """Remove all files and folders in it, but not itself; a missing folder is no error."""
        with folders.explained(""), contextlib.suppress(FileNotFoundError):
            empty_tree(self.root)

    def remove(self) -> None:
        """Remove the folder with all it holds; a missing folder is no error."""
        with folders.explained(""):
            remove_tree(self.root)

    def _parts(self, path: str) -> tuple[str, ...]:
        """The components of a path as a caller wrote it."""
        if "\0" in path or len(path) > 4096:
            raise WorkspaceError("The path is too long or contains a NUL character.")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise WorkspaceError(
                f"{one_line(path)} is no usable path: use plain Unicode."
            ) from None
        inner = path
        for prefix in (GUEST_ROOT, str(self.root)):
            if path == prefix or path.startswith(f"{prefix}/"):
                inner = path[len(prefix) :].lstrip("/")
                break
        parts: list[str] = []
        outside = inner.startswith("/") or inner.split("/")[0] == "~"
        for part in inner.split("/"):
            if part == "..":
                outside = outside or not parts
                del parts[-1:]
            elif part not in ("", "."):
                parts.append(part)
        if outside:
            raise WorkspaceError(
                f"{path!r} is outside the workspace. Use a path relative to it, such as "
                "'data/input.csv'; absolute paths may only begin with /workspace/."
            )
        return tuple(parts)

    def _check_room(self, root: int, size: int, names: int) -> None:
        """Raise WorkspaceError unless a file of `size` bytes with `names` folders fits in."""
        held, entries = self._measured(root), entries_within(self._disk_bytes)
        if held.bytes + size > self._disk_bytes or not held.complete:
            more = "" if held.complete else "more than "
            raise WorkspaceError(
                f"The workspace is full: it holds {more}{held.bytes:,} of {self._disk_bytes:,} "
                "bytes. Remove files first."
            )
        if held.entries + names > entries:
            raise WorkspaceError(
                f"The workspace is full: it holds {held.entries:,} of {entries:,} files and "
                "folders. Remove some first."
            )

    def _measured(self, root: int) -> Holding:
        most = self._disk_bytes or sys.maxsize
        try:
            return measure(
                root,
                most_entries=entries_within(most),
                most_bytes=most,
                opener=self._opener,
            )
        except (OSError, MemoryError) as error:
            raise folders.unmeasured(error) from None

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """A descriptor of the folder itself, closed at the end. Raises WorkspaceError."""
        try:
            fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WorkspaceError(
                "The workspace folder of this session has been removed from outside: its files are "
                "gone. Call reset for a new one."
            ) from None
        except OSError as error:
            why = shortage(error) or f"{error.strerror}."
            raise WorkspaceError(f"The workspace cannot be opened: {why}") from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, root: int, parts: tuple[str, ...], flags: int, path: str) -> Iterator[int]:
        try:
            fd = open_beneath(root, parts, flags, opener=self._opener)
        except FileNotFoundError:
            raise self._not_found(root, parts, path) from None
        except OSError as error:
            raise folders.explanation(error, path) from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _file(
        self, root: int, parts: tuple[str, ...], path: str
    ) -> Iterator[tuple[int, os.stat_result]]:
        """A regular file opened for reading, with what is known of it."""
        with self._opened(root, parts, os.O_RDONLY, path) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise folders.not_regular(path, info.st_mode)
            with folders.explained(path):
                yield fd, info

    def _not_found(self, root: int, parts: tuple[str, ...], path: str) -> WorkspaceError:
        for depth in range(len(parts) - 1, -1, -1):
            with contextlib.suppress(OSError):
                fd = open_beneath(root, parts[:depth], FOLDER, opener=self._opener)
                try:
                    listing = listing_of("", fd)
                finally:
                    os.close(fd)
                return folders.not_found(path, "/".join(parts[:depth]), parts[depth], listing)
        return WorkspaceError(f"There is no file {path!r} in the workspace.")
