"""The audit trail: one JSON line for each event, refusals included."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.output.text import Masks

logger = logging.getLogger(__name__)


class AuditLog:
    """The audit trail in a file. Each event is one line, written before the call returns.

    Threadsafe. After a rotation the next line begins a new file. A write to a local file takes
    microseconds. The first failed write is logged and reported in `state`; the server continues.
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], datetime] | None = None,
        masks: Masks | None = None,
    ) -> None:
        """Open the file for appending; `masks` hide secret values in every line.

        Raises ConfigError if the file cannot be opened or is not a regular file.
        """
        self._path = path
        self._masks = masks or Masks()
        self._now = now or _utc
        self._lock = threading.Lock()
        self._torn = False
        self.state = "on"
        try:
            self._fd, self._file = self._opened()
        except OSError as reason:
            raise ConfigError(f"--audit-log {path}: {reason.strerror}") from reason

    def _opened(self) -> tuple[int, tuple[int, int]]:
        """Return the file opened for appending, and its device and inode. Raises OSError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return fd, (found.st_dev, found.st_ino)

    def _follow_name(self) -> None:
        """Open the file again if its name is gone or another file's, as after a rotation.

        Raises OSError; the former file stays open then.
        """
        try:
            found = os.lstat(self._path)
            if (found.st_dev, found.st_ino) == self._file:
                return
        except FileNotFoundError:
            pass
        former = self._fd
        self._fd, self._file = self._opened()
        self._torn = False
        os.close(former)

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Add a line."""
        if self._fd < 0:
            return
        moment = _iso(self._now())
        line = json.dumps({"time": moment, "event": event, **self._masks.anywhere(facts)}) + "\n"
        with self._lock:
            try:
                self._follow_name()
            except OSError as reason:
                self._failed(reason.strerror or str(reason))
            data = ("\n" + line if self._torn else line).encode()
            try:
                self._torn = os.write(self._fd, data) < len(data)
                if self._torn:
                    raise OSError("only a part of a line could be written")
            except OSError as reason:
                self._failed(reason.strerror or str(reason))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, reason: str) -> None:
        if self.state == "on":
            self.state = f"failing since {self._now():%Y-%m-%d %H:%M:%S} UTC: {reason}"
            logger.error("the audit log %s cannot be written: %s", self._path, reason)


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_of(seconds: float) -> str:
    """Return seconds since 1970 in the format of the trail; empty for 0."""
    return _iso(datetime.fromtimestamp(seconds, timezone.utc)) if seconds else ""


def _utc() -> datetime:
    return datetime.now(timezone.utc)
