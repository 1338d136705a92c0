"""The files of one session, for tools that work while hostile code changes them.

Paths are resolved beneath the folder by the kernel (see `openat2`), never compared as strings.
Everything here blocks and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kernel_mcp.config.settings import MAX_OUTPUT
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import contents, folders
from kernel_mcp.files.contents import (
    PROBE_BYTES,
    Page,
    binary_kind,
    mime_of,
)
from kernel_mcp.files.encodings import foreign_encodings, is_text
from kernel_mcp.files.folders import (
    FOLDER,
    Chosen,
    Listing,
    any_name,
    entry_of,
    listing_of,
    make_folders,
    owner_of,
    replace_file,
)
from kernel_mcp.files.paths import (
    GUEST_ROOT,
    ResolvedPath,
    check_path,
    check_writable,
    entered,
    exact,
    hidden_error,
    not_found,
    opened_root,
    parts_of,
)
from kernel_mcp.files.quota import DiskQuota
from kernel_mcp.files.streams import Condition, OpenFile, Upload, check, nearest, require
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.linux.safe_tree import Opener, empty_tree, open_beneath, remove_tree
from kernel_mcp.linux.walk import TreeSize
from kernel_mcp.output.images import sniff
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

MOST_WRITTEN = 10_000


@dataclass(frozen=True, slots=True)
class FileContent:
    """The part of a file of `size` bytes that was read: a page of text, or bytes in `data`.

    Of a binary file nothing is read, and `kind` describes it, unless it was asked for as base64:
    it is `encoded` then.
    """

    path: str
    mime: str
    size: int
    page: Page | None = None
    data: bytes = b""
    kind: str = ""
    encoded: bool = False


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
        mounts: Sequence[ExposedMount] = (),
        masked: Callable[[Iterator[str]], Iterable[str]] = iter,
        seen_at: Callable[[Path], str] = lambda _root: GUEST_ROOT,
    ) -> None:
        """`mounts` are folders of the host that absolute paths may lead into.

        Relative paths begin in the one that sessions begin in, else in the session's folder.
        `masked` changes the pieces of a text that is read by lines. `seen_at` returns the path of
        the session's folder as code sees it.
        """
        self._masked = masked
        self.root = root
        self.path = seen_at(root)
        self._mounts = mounts
        self._start = next((each for each in mounts if each.mount.start), None)
        self._owner = owner
        self._file_bytes = file_bytes
        self._opener = opener
        self.quota = DiskQuota(root, disk_bytes, opener)
        self.written: set[str] = set()
        """Names of files that tools have written, of at most `MOST_WRITTEN`."""

    @property
    def mounted(self) -> list[str]:
        """Paths of the folders of the host that code sees."""
        return [each.mount.guest for each in self._mounts]

    @property
    def start(self) -> str:
        """Path of the mount in which sessions begin; empty if that is the workspace."""
        return "" if self._start is None else self._start.mount.guest

    @property
    def module_folders(self) -> list[Path]:
        """Folders of the host whose modules belong to the session itself."""
        return [*([self._start.mount.host] if self._start is not None else []), self.root]

    def own_name(self, path: str) -> str:
        """Return the path by which tools find what is at `path` below the session's folder."""
        return f"{self.path}/{path}" if self.start else path

    def where(self, places: Sequence[str]) -> str:
        """Return in words where files of `elsewhere` are."""
        own = [place for place in places if place.startswith(f"{self.path}/")]
        return "in the workspace" if own == [*places] else "in a mounted folder"

    def only_elsewhere(self, path: str) -> str:
        """Return the only one of `elsewhere`; empty for none or several."""
        found = self.elsewhere(path)
        return found[0] if len(found) == 1 else ""

    def elsewhere(self, path: str) -> list[str]:
        """Return the absolute paths of files that other folders have under this relative path.

        These are mounts, and the workspace if relative paths begin in a mount. Empty if the path
        itself leads to something.
        """
        if not self._mounts or path.startswith(("/", "~")) or "\0" in path:
            return []
        if self._is_there(path):
            return []
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            return []
        places = [
            each.mount.guest if each.single else "/".join([each.mount.guest, *parts])
            for each in self._mounts
            if not each.single or parts == [each.mount.guest.rpartition("/")[2]]
        ]
        places += ["/".join([self.path, *parts])] * (self._start is not None)
        return [place for place in dict.fromkeys(places) if self._is_there(place)]

    def _is_there(self, path: str) -> bool:
        flags = os.O_PATH | os.O_NOFOLLOW
        with (
            contextlib.suppress(WorkspaceError),
            self._resolve(path) as place,
            self._opened(place, flags),
        ):
            return True
        return False

    def name_of(self, path: str) -> str:
        """Return the name that answers use for the file or folder at `path`, existing or not."""
        with self._resolve(path) as place:
            return place.name

    def list_files(self, path: str = "", chosen: Chosen = any_name, offset: int = 0) -> Listing:
        """Return the entries of a folder as `listing_of`, or the one file that `path` names."""
        with self._resolve(path) as place:
            with self._opened(place, os.O_PATH | os.O_NOFOLLOW) as found:
                info = os.fstat(found)
            if not stat.S_ISDIR(info.st_mode):
                return Listing(place.name, (entry_of(place.name, info),))
            with self._opened(place, FOLDER) as folder, place.acting():
                return listing_of(place.name, folder, chosen, offset)

    def read_file(
        self,
        path: str,
        *,
        offset: int = 0,
        limit: int = 0,
        encoding: str = "",
        characters: int = MAX_OUTPUT,
    ) -> FileContent:
        """Return lines of a UTF-8 text, a whole picture, or the bytes of another small file.

        `offset` is the first line, from 0; `limit` the number of lines, 0 for as many as fit into
        `characters`. `encoding` utf-8 accepts text only, base64 returns bytes: `limit` of them
        from byte `offset` on. Any other is that of a text.
        """
        encoding = contents.any_encoding(encoding) if encoding else ""
        if len(found := self.elsewhere(path)) > 1:
            here, others = (self.start, "other") if self.start else ("the workspace", "mounted")
            raise WorkspaceError(
                f"There is no file {path!r} in {here}, and several in {others} folders: "
                f"{' and '.join(found)}. Name the one that is meant by its path."
            )
        path = found[0] if found else path
        with self._resolve(path) as place, self._file(place) as (fd, info):
            head = os.pread(fd, PROBE_BYTES, 0)
            name = place.name
            mime = mime_of(name, head)
            picture = sniff(head) is not None
            if encoding not in ("", "utf-8", "base64"):
                page = contents.lines_of(
                    fd, info, path, offset, limit, characters, self._masked, encoding
                )
                return FileContent(name, "text/plain", info.st_size, page)
            if encoding == "base64":
                data = contents.bytes_from(fd, offset, contents.base64_room(limit, characters))
                return FileContent(name, mime, info.st_size, data=data, encoded=True)
            if is_text(head) and not picture:
                page = contents.lines_of(fd, info, path, offset, limit, characters, self._masked)
                return FileContent(name, mime, info.st_size, page)
            if not picture and not binary_kind(head) and (found := foreign_encodings(head)):
                raise folders.not_utf8(path, found)
            if encoding == "utf-8":
                kind = binary_kind(head) or ("a picture" if picture else "binary data")
                raise WorkspaceError(
                    f"{path!r} is {kind}, not text. Read it with code, or as base64."
                )
            if not picture:
                return FileContent(name, mime, info.st_size, kind=binary_kind(head) or "")
            data = contents.bytes_of(fd, info, path, self._file_bytes, self._file_bytes)
            return FileContent(name, mime, info.st_size, data=data)

    def read_resource(self, path: str) -> tuple[str | bytes, str]:
        """Return a whole file and its MIME type; as text when it is UTF-8, else as bytes."""
        with self._resolve(path) as place, self._file(place) as (fd, info):
            data = contents.bytes_of(fd, info, path, self._file_bytes, self._file_bytes)
        mime = mime_of(place.parts[-1], data[:PROBE_BYTES])
        if is_text(data[:PROBE_BYTES]) and sniff(data) is None:
            with contextlib.suppress(UnicodeDecodeError):
                return data.decode("utf-8"), mime
        return data, mime

    def write_file(self, path: str, content: str | bytes, *, encoding: str = "utf-8") -> int:
        """Write a file, new or replaced as a whole; return its size in bytes.

        Missing folders are created. With `encoding` base64 `content` is decoded first.
        """
        data = content if isinstance(content, bytes) else contents.decoded(content, encoding)
        if len(data) > self._file_bytes:
            raise WorkspaceError(
                f"The content is {len(data):,} bytes; one file may have {self._file_bytes:,}."
            )
        with self._resolve(path) as place, self.quota.growing():
            self._check_target(path, place)
            if place.mount is None:
                self.quota.check_room(place.root, len(data), len(place.parts))
            with folders.explained(path), place.acting():
                owner = self._owner if place.mount is None else None
                owner = owner or owner_of(place.root)
                folder = make_folders(place.root, place.parts[:-1], owner, self._opener)
                try:
                    replace_file(folder, place.parts[-1], data, owner)
                finally:
                    os.close(folder)
            self._note_written(place.name)
        return len(data)

    def _note_written(self, name: str) -> None:
        if len(self.written) < MOST_WRITTEN:
            self.written.add(name)

    def open_file(self, path: str) -> OpenFile:
        """Open a regular file of any size for reading; the caller closes it."""
        with self._resolve(path) as place, self._file(place) as (fd, info):
            head = os.pread(fd, PROBE_BYTES, 0)
            mime = mime_of(place.name, head)
            return OpenFile(os.dup(fd), place.parts[-1], mime, info, is_text(head))

    def begin_upload(self, path: str, size: int | None, allowed: Condition) -> Upload:
        """Begin an upload of `size` bytes, None if that is unknown; the caller closes it.

        The file appears with `finish_upload`. Its bytes count towards `disk_bytes` from now on or,
        if their number is unknown, as they are written.
        """
        with self._resolve(path) as place:
            self._check_target(path, place)
            with folders.explained(path), place.acting():
                folder = nearest(place.root, place.parts[:-1], self._opener)
                try:
                    if folder.missing == 0:
                        folders.mode_for(folder.fd, place.parts[-1])
                        check(folder.fd, place.parts[-1], allowed)
                    else:
                        require(allowed(""))
                    bounded = self.quota.most and place.mount is None
                    room = self.quota.reserve if bounded else None
                    return Upload(path, folder.fd, size, room, place.acting)
                finally:
                    os.close(folder.fd)

    def finish_upload(self, upload: Upload, allowed: Condition) -> bool:
        """Move a complete upload to its path, in one step; return True if no file was there."""
        path = upload.path
        with self._resolve(path) as place, self.quota.growing():
            self._check_target(path, place)
            if place.mount is None:
                more = upload.size - upload.reserved_bytes
                self.quota.check_room(place.root, more, len(place.parts))
            with folders.explained(path), place.acting():
                owner = self._owner if place.mount is None else None
                owner = owner or owner_of(place.root)
                folder = make_folders(place.root, place.parts[:-1], owner, self._opener)
                try:
                    before = check(folder, place.parts[-1], allowed)
                    upload.put(folder, place.parts[-1], owner)
                finally:
                    os.close(folder)
            self._note_written(place.name)
        return not before

    def remove_entry(self, path: str, allowed: Condition) -> None:
        """Remove a file, a link or an empty folder."""
        with self._resolve(path) as place, self.quota.lock:
            if not place.parts:
                raise WorkspaceError(f"{path!r} is a folder that stays.", errno.EACCES)
            if place.mount is not None:
                check_writable(place.mount, place)
            with self._opened(place, os.O_PATH | os.O_NOFOLLOW) as found:
                is_folder = stat.S_ISDIR(os.fstat(found).st_mode)
            with folders.explained(path), place.acting():
                parent = open_beneath(place.root, place.parts[:-1], FOLDER, opener=self._opener)
                try:
                    check(parent, place.parts[-1], allowed)
                    remove = os.rmdir if is_folder else os.unlink
                    remove(place.parts[-1], dir_fd=parent)
                finally:
                    os.close(parent)

    def _check_target(self, path: str, place: ResolvedPath) -> None:
        """Raise WorkspaceError unless a file may be written there."""
        if not place.parts or path.endswith("/"):
            raise WorkspaceError(
                f"{path!r} names a folder. Give the path of a file to write.", errno.EISDIR
            )
        if place.mount is not None:
            check_writable(place.mount, place)

    def usage(self) -> TreeSize:
        """Return the disk space that the folder uses; the count ends once past `disk_bytes`."""
        return self.quota.usage()

    def clear(self) -> None:
        """Remove all files and folders in it, but not itself; a missing folder is no error."""
        with folders.explained(""), contextlib.suppress(FileNotFoundError):
            empty_tree(self.root)

    def remove(self) -> None:
        """Remove the folder with all it holds; a missing folder is no error."""
        with folders.explained(""):
            remove_tree(self.root)

    def remove_folder(self, path: str) -> None:
        """Remove a folder two levels down with all it holds, and the one above once it is empty.

        A missing folder is no error.
        """
        above, name = path.split("/")
        missing = contextlib.suppress(FileNotFoundError)
        with folders.explained(path), missing, opened_root(self.root) as root:
            parent = open_beneath(root, (above,), FOLDER, opener=self._opener)
            try:
                remove_tree(Path(f"/proc/self/fd/{parent}/{name}"))
            finally:
                os.close(parent)
            with contextlib.suppress(OSError):
                os.rmdir(above, dir_fd=root)

    @contextlib.contextmanager
    def _resolve(self, path: str) -> Iterator[ResolvedPath]:
        """Resolve a path below a mounted folder or the workspace.

        A relative one begins in the mount that sessions begin in, else in the workspace.
        """
        check_path(path)
        moved = bool(self.start) and path.split("/")[0] != "~"
        absolute = os.path.normpath(f"{self.start}/{path}") if moved else ""
        absolute = os.path.normpath(path) if path.startswith("/") else absolute
        for shown in reversed(self._mounts):
            parts = shown.parts(absolute) if absolute else None
            if parts is not None:
                prefix = "" if shown is self._start else f"{shown.mount.guest}/"
                with entered(shown, path) as root:
                    yield exact(ResolvedPath(path, root, parts, shown, prefix), self._opener)
                return
        if moved and not path.startswith("/"):
            why = f"{path!r} leads out of {self.start}, where relative paths begin."
            raise WorkspaceError(why, errno.EACCES)
        parts = parts_of(path, self.root)
        with opened_root(self.root) as root:
            prefix = f"{self.path}/" if self.start else ""
            yield exact(ResolvedPath(path, root, parts, None, prefix), self._opener)

    @contextlib.contextmanager
    def _opened(self, place: ResolvedPath, flags: int) -> Iterator[int]:
        if place.mount is not None and place.mount.covers_path(place.root, place.parts):
            raise hidden_error(place)
        try:
            with place.acting():
                fd = open_beneath(place.root, place.on_disk, flags, opener=self._opener)
        except FileNotFoundError:
            raise not_found(place, self._opener) from None
        except OSError as error:
            raise folders.explanation(error, place.path) from None
        try:
            info = os.fstat(fd)
            if place.mount is not None and place.mount.covers_file(info):
                raise hidden_error(place)
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _file(self, place: ResolvedPath) -> Iterator[tuple[int, os.stat_result]]:
        """Yield a descriptor of a regular file, open for reading, and its stat."""
        with self._opened(place, os.O_RDONLY) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise folders.not_regular(place.path, info.st_mode)
            with folders.explained(place.path):
                yield fd, info
