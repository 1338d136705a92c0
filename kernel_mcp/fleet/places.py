"""Where a fleet keeps what outlives its nodes: a folder that all of them have, or an object store.

What is there is read whole and never changed: a name is either created once, by whoever comes
first, or filled with what is the same for all who write it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from kernel_mcp.errors import ConfigError
from kernel_mcp.linux.folders import from_home, private_folder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

READ_BYTES = 1024 * 1024
_NEW = ".new-"


class Place(Protocol):
    """Names with bytes. A name has parts separated by `/`. All methods block, and raise OSError."""

    def create(self, name: str, data: bytes) -> bool:
        """Create a name with these bytes, whole or not at all; False where it is there already."""

    def put(self, name: str, file: IO[bytes]) -> None:
        """Give a name what is left of a file, whole or not at all."""

    def open(self, name: str) -> IO[bytes]:
        """Read what a name has piece by piece. Raises FileNotFoundError."""

    def names(self, folder: str) -> list[str]:
        """The last parts of all names in a folder, sorted."""

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""


def read(place: Place, name: str, most: int) -> bytes | None:
    """What a name has, at most so many bytes; None where it is not there. Raises OSError."""
    try:
        with place.open(name) as file:
            return file.read(most)
    except FileNotFoundError:
        return None


class FolderPlace:
    """A folder of this user alone, such as one of NFS that every node has mounted."""

    def __init__(self, folder: Path) -> None:
        """Make the folder where it is missing. Raises OSError, PermissionError."""
        self._folder = private_folder(folder)

    def create(self, name: str, data: bytes) -> bool:
        """See `Place`: link(2) gives a name to what is on the disk, and to nobody else's."""
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
        """See `Place`."""
        path = self._path(name)
        with self._written(path) as (new_file, new):
            while piece := file.read(READ_BYTES):
                new_file.write(piece)
            self._settle(new_file)
            new.rename(path)
        self._sync(path.parent)

    def open(self, name: str) -> IO[bytes]:
        """See `Place`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(self._folder / name, flags), "rb")

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        try:
            found = [path.name for path in (self._folder / folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.startswith(_NEW))

    def remove(self, name: str) -> None:
        """See `Place`; a folder that is empty then goes too."""
        path = self._folder / name
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if path.parent != self._folder:
                path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / name

    @contextlib.contextmanager
    def _written(self, path: Path) -> Iterator[tuple[IO[bytes], Path]]:
        """A file beside a path, which goes unless it was renamed."""
        new = path.with_name(f"{_NEW}{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed as empty meanwhile
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


class ObjectPlace:
    """A file system of fsspec that can create a file only where there is none, such as S3."""

    def __init__(self, files: AbstractFileSystem, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        """See `Place`."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        self._files.invalidate_cache()
        return True

    def put(self, name: str, file: IO[bytes]) -> None:
        """See `Place`."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.transaction, self._files.open(path, "wb") as written:
            while piece := file.read(READ_BYTES):
                written.write(piece)
        self._files.invalidate_cache()

    def open(self, name: str) -> IO[bytes]:
        """See `Place`."""
        found: Any = self._files.open(f"{self._root}/{name}", "rb")
        opened: IO[bytes] = found
        return opened

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """See `Place`."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


def place_of(address: str) -> Place:
    """The place at an address: a path, or what fsspec knows by its scheme (`s3://bucket/folder`).

    Raises ConfigError, OSError.
    """
    if "://" not in address:
        try:
            path = from_home(Path(address))
        except ValueError as error:
            raise ConfigError(f"--fleet-store {error}") from None
        if not path.is_absolute():
            raise ConfigError(f"--fleet-store {address}: expected an absolute path, or a URL")
        return FolderPlace(path)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"--fleet-store {address}: addresses take fsspec: pip install 'kernel-mcp[fleet]'"
        ) from None
    try:
        files, root = url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--fleet-store {address}: {error}") from None
    return ObjectPlace(files, root)
