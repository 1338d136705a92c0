"""Disk space of a session's folder: its own limit, that of its principal, and reserved bytes.

Everything here blocks and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.paths import opened_root
from kernel_mcp.linux.safe_tree import Opener
from kernel_mcp.linux.walk import TreeSize, entries_within, measure


class DiskShare:
    """Disk quota shared by several workspaces; `lock` is held while one of them grows."""

    def __init__(
        self, most: Callable[[], int | None], quotas: Callable[[], Iterable[DiskQuota]]
    ) -> None:
        """`most` returns bytes, 0 and None for no limit."""
        self.lock = Lock()
        self._most = most
        self._quotas = quotas

    def left(self, mine: DiskQuota) -> int:
        """Return the bytes that `mine` may use, uploads included: what the others do not use."""
        if not (most := self._most()):
            return sys.maxsize
        return most - sum(each.claimed for each in self._quotas() if each is not mine)


class DiskQuota:
    """Limits what the folder `root` may hold after a write to `most` bytes, 0 for no limit.

    share           quota of the session's principal
    reserved_bytes  bytes reserved for uploads, including those already written
    lock            held while a file tool changes the folder
    """

    def __init__(self, root: Path, most: int, opener: Opener | None) -> None:
        self.most = most
        self.share = DiskShare(lambda: None, tuple)
        self.reserved_bytes = 0
        self.lock = Lock()
        self._root = root
        self._opener = opener

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Hold the locks under which room is checked and then used: one write at a time."""
        with self.lock, self.share.lock:
            yield

    def reserve(self, more: int, some: int) -> int:
        """Reserve `more` bytes for an upload, up to `some` if available; return the number.

        A negative number releases bytes.
        """
        with self.growing():
            granted = more
            if more > self.most:
                raise WorkspaceError(
                    f"A file of {more:,} bytes is more than the workspace may hold: "
                    f"{self.most:,} bytes.",
                    errno.EFBIG,
                )
            if more > 0:
                with opened_root(self._root) as root:
                    left = self.check_room(root, more, 1)
                granted = max(more, min(some, left))
            self.reserved_bytes += granted
            return granted

    def usage(self) -> TreeSize:
        """Return the disk space that the folder uses; the count ends once past `most`."""
        with opened_root(self._root) as root:
            return self._measured(root)

    @property
    def claimed(self) -> int:
        """Bytes of disk that it uses or has reserved; 0 if it no longer exists."""
        with contextlib.suppress(WorkspaceError):
            return self.usage().bytes + self.reserved_bytes
        return 0

    def check_room(self, root: int, size: int, names: int) -> int:
        """Raise WorkspaceError unless `size` bytes and `names` more files and folders fit.

        Return the bytes that are left, without those reserved for uploads. Without a limit of its
        own the folder is not measured.
        """
        if not self.most:
            return sys.maxsize
        held, entries = self._measured(root), entries_within(self.most)
        left = self.most - held.bytes - self.reserved_bytes
        shared = self.share.left(self) - held.bytes - self.reserved_bytes
        if size > shared and shared < left:
            raise WorkspaceError(
                f"There is no room for {size:,} bytes more: your sessions together may hold only "
                f"{max(0, shared):,} more (your quota `disk`). Remove files, or close sessions "
                "that are not needed.",
                errno.EDQUOT,
            )
        left = min(left, shared)
        if size > left or not held.complete:
            more = "" if held.complete else "more than "
            reserved = self.reserved_bytes
            coming = f", and {reserved:,} are being uploaded" if reserved else ""
            raise WorkspaceError(
                f"The workspace is full: it holds {more}{held.bytes:,} of {self.most:,} "
                f"bytes{coming}. Remove files first.",
                errno.EDQUOT,
            )
        if held.entries + names > entries:
            raise WorkspaceError(
                f"The workspace is full: it holds {held.entries:,} of {entries:,} files and "
                "folders. Remove some first.",
                errno.EDQUOT,
            )
        return left

    def _measured(self, root: int) -> TreeSize:
        most = self.most or sys.maxsize
        try:
            return measure(
                root,
                most_entries=entries_within(most),
                most_bytes=most,
                opener=self._opener,
            )
        except (OSError, MemoryError) as error:
            raise folders.unmeasured(error) from None
