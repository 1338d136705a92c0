"""The folder of one running server, and what dead servers left beside it.

A server holds a lock on its folder for as long as it lives, whatever way it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kernel_mcp.errors import ConfigError
from kernel_mcp.limits.groups import RECORD, remove_recorded
from kernel_mcp.linux.folders import private_folder
from kernel_mcp.linux.safe_tree import remove_tree

logger = logging.getLogger(__name__)

LONGEST = 90
"""Bytes of a run directory's path, so that `k/12345678/k-1` below it fits the 107 of
`sockaddr_un`."""
_PREFIX = "s-"


class RunDirectory:
    """A private folder that goes with the server: sockets in `k`, the rest is for its users."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.kernels = private_folder(path / "k")

    @classmethod
    def create(cls, base: Path | None = None) -> RunDirectory:
        """Make the folder of a new server below `base` and remove those of dead ones.

        Raises ConfigError when `base` is too long or cannot be used.
        """
        parent = _default_base() if base is None else base.absolute()
        path = parent / f"{_PREFIX}{secrets.token_hex(4)}"
        if len(os.fsencode(path)) > LONGEST:
            raise ConfigError(
                f"{parent} is too long for the kernels' sockets: choose a folder for state of at "
                f"most {LONGEST - len(path.name) - 1} bytes"
            )
        try:
            private_folder(parent)
            with _alone_in(parent):
                _sweep(parent)
                path.mkdir(mode=0o700)
                lock = _try_lock(path)
        except OSError as reason:
            raise ConfigError(
                f"cannot keep the server's files in {parent}: {reason}; or choose another folder "
                "with --state-dir"
            ) from reason
        if lock is None:
            raise ConfigError(f"another process has locked {path}; check the disk's lock service")
        return cls(path, lock)

    def fresh(self, name: str = "") -> Path:
        """A new empty folder of mode 0700 for one start of one kernel. Raises FileExistsError."""
        path = self.kernels / (name or secrets.token_hex(4))
        self.kernels.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed
        path.mkdir(mode=0o700)
        return path

    def close(self) -> None:
        """Remove the folder; what cannot be removed is left to the next server's sweep."""
        if self._lock < 0:
            return
        try:
            remove_tree(self.path)
        except OSError as reason:
            logger.warning("could not remove %s: %s", self.path, reason)
        finally:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _default_base() -> Path:
    """On a disk rather than in memory, since workspaces may live here too."""
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else "/tmp"
    return Path(parent, f"kernel-mcp-{os.geteuid()}")


@contextlib.contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Keep other servers from sweeping or starting in this folder."""
    lock = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders whose servers are dead."""
    for path in parent.glob(f"{_PREFIX}*"):
        _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    try:
        lock = _try_lock(path)
        if lock is None:
            return
        try:
            remove_recorded(path / RECORD)
            remove_tree(path)
        finally:
            os.close(lock)
    except OSError as reason:
        logger.warning("could not remove %s of a server that has ended: %s", path, reason)


def _try_lock(path: Path) -> int | None:
    """A locked handle of a folder, or None while another process holds it.

    Raises PermissionError for a folder of somebody else, OSError.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a folder of this user")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock
