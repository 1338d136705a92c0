"""The audit trail: one JSON line for each event, refusals included."""

from __future__ import annotations

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

    Threadsafe. A write to a local file takes microseconds. The first failed write is logged and
    reported in `state`; the server continues.
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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
        except OSError as reason:
            raise ConfigError(f"--audit-log {path}: {reason.strerror}") from reason
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ConfigError(f"--audit-log {path}: it is not a regular file")

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Add a line."""
        if self._fd < 0:
            return
        moment = _iso(self._now())
        line = json.dumps({"time": moment, "event": event, **self._masks.anywhere(facts)}) + "\n"
        with self._lock:
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
