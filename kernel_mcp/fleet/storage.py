"""Storage shared by the nodes of a fleet: a folder that all of them mount, or an object store.

Values are never changed: a name is either created exactly once, by the first writer, or written
with the same bytes by all writers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from kernel_mcp.errors import ConfigError
from kernel_mcp.extensions import install_line
from kernel_mcp.linux.folders import from_home, private_folder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

READ_BYTES = 1024 * 1024
_NEW = ".new-"


class Storage(Protocol):
    """Store of bytes by name; parts of a name are separated by `/`.

    All methods are blocking and raise OSError.
    """

    def create(self, name: str, data: bytes) -> bool:
        """Create a name with these bytes atomically. Return False if it exists already."""

    def put(self, name: str, file: IO[bytes]) -> None:
        """Write the rest of a file under a name, atomically."""

    def open(self, name: str) -> IO[bytes]:
        """Open a name for reading. Raises FileNotFoundError."""

    def names(self, folder: str) -> list[str]:
        """Return the last parts of all names in a folder, sorted; empty without the folder."""

    def remove(self, name: str) -> None:
        """Remove a name if it exists."""


def read(place: Storage, name: str, most: int) -> bytes | None:
    """Return the first `most` bytes of a name, or None if it does not exist. Raises OSError."""
    try:
        with place.open(name) as file:
            return file.read(most)
    except FileNotFoundError:
        return None


class FolderStorage:
    """A private folder, for example on NFS, that every node mounts."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if it is missing. Raises OSError, PermissionError."""
        self._folder = private_folder(folder)

    def create(self, name: str, data: bytes) -> bool:
        """See `Storage`. link(2) makes the synced file visible, and fails if the name exists."""
        path = self._path(name)
        with self._written(path) as (file, new):
            file.write(data)
            self._settle(file)
            try:
                os.link(new, path)
            except FileExistsError:
                return False
        self._sync(path.parent)
        return True

    def put(self, name: str, file: IO[bytes]) -> None:
        """See `Storage`."""
        path = self._path(name)
        with self._written(path) as (new_file, new):
            while piece := file.read(READ_BYTES):
                new_file.write(piece)
            self._settle(new_file)
            new.rename(path)
        self._sync(path.parent)

    def open(self, name: str) -> IO[bytes]:
        """See `Storage`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(self._folder / name, flags), "rb")

    def names(self, folder: str) -> list[str]:
        """See `Storage`."""
        try:
            found = [path.name for path in (self._folder / folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.startswith(_NEW))

    def remove(self, name: str) -> None:
        """See `Storage`. A folder that becomes empty is removed, too."""
        path = self._folder / name
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if path.parent != self._folder:
                path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / name

    @contextlib.contextmanager
    def _written(self, path: Path) -> Iterator[tuple[IO[bytes], Path]]:
        """Open a temporary file beside a path; it is removed afterwards unless it was renamed."""
        new = path.with_name(f"{_NEW}{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the empty folder was removed meanwhile
                fd = os.open(new, flags, 0o600)
                break
        try:
            with open(fd, "wb") as file:
                yield file, new
        finally:
            new.unlink(missing_ok=True)

    @staticmethod
    def _settle(file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    @staticmethod
    def _sync(folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class ObjectStorage:
    """An fsspec file system that supports exclusive creation of files, such as S3."""

    def __init__(self, files: AbstractFileSystem, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        """See `Storage`."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        self._files.invalidate_cache()
        return True

    def put(self, name: str, file: IO[bytes]) -> None:
        """See `Storage`."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.transaction, self._files.open(path, "wb") as written:
            while piece := file.read(READ_BYTES):
                written.write(piece)
        self._files.invalidate_cache()

    def open(self, name: str) -> IO[bytes]:
        """See `Storage`."""
        found: Any = self._files.open(f"{self._root}/{name}", "rb")
        opened: IO[bytes] = found
        return opened

    def names(self, folder: str) -> list[str]:
        """See `Storage`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """See `Storage`."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


def storage_of(address: str) -> Storage:
    """Return the storage at an absolute path, or at a URL of fsspec (`s3://bucket/folder`).

    Raises ConfigError, OSError.
    """
    if "://" not in address:
        try:
            path = from_home(Path(address))
        except ValueError as error:
            raise ConfigError(f"--fleet-store {error}") from None
        if not path.is_absolute():
            raise ConfigError(f"--fleet-store {address}: expected an absolute path, or a URL")
        return FolderStorage(path)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"--fleet-store {address}: addresses take fsspec: {install_line('fleet')}"
        ) from None
    try:
        files, root = url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--fleet-store {address}: {error}") from None
    return ObjectStorage(files, root)
