"""The audit trail: one JSON line for each event of a session, refusals included.

Code is recorded as its SHA-256, output as its length in characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import ConfigError
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.cell import Cell, Status

if TYPE_CHECKING:
    from kernel_mcp.launch.process import KernelProcess

logger = logging.getLogger(__name__)

MAX_TEXT = 500
"""Maximum characters of one text in a line, so that a single write(2) is enough for a line."""
MAX_TEXTS = 20


class Audit:
    """An audit trail that drops all events."""

    state = "off"
    """For `info`: off, on, or what is wrong."""

    def journal(self, who: str, session: str) -> Journal:
        """Return the journal of a session; `who` is the principal that owns it."""
        return SILENT

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Add an event."""

    def close(self) -> None:
        """Accept no further events."""


class Journal:
    """Records the events of one session; this class drops them."""

    def opened(self, *, name: str, packages: Iterable[str], python: str, attach: str = "") -> None:
        """Record that the session was opened."""

    def closed(self, *, cells: int) -> None:
        """Record the end of the session."""

    def begins(self, handle: KernelProcess) -> None:
        """Start to measure the processor time of a cell that is about to run; write no event."""

    def ran(self, cell: Cell) -> None:
        """Record a cell that has ended, with any status."""

    def refused(self, cell: Cell, reasons: str) -> None:
        """Record a cell that the policy has refused before any of it ran."""

    def died(self, cause: str) -> None:
        """Record that the kernel has died between cells."""

    def started(self, kind: str, seconds: float) -> None:
        """Record the start of a kernel, its `seconds` and its `kind`, such as forked or cold."""

    def not_started(self) -> None:
        """Record that no kernel could be started."""

    def checkpointed(self, cell: int) -> None:
        """Record a checkpoint, which holds the variables as after that cell."""

    def revived(self, cell: int) -> None:
        """Record that the session was restored from the checkpoint after that cell."""

    def undone(self, cells: Iterable[int]) -> None:
        """Record the numbers of cells that were undone."""

    def branched(self, handles: Iterable[str]) -> None:
        """Record the handles of branches that were made from the current state."""

    def joined(self) -> None:
        """Record that programs of the server's user can use the kernel from now on."""

    def adopted(self, handle: str) -> None:
        """Record that the session has taken over the kernel of the branch with this handle."""

    def hibernated(self, saved: int, lost: int, size: int, cause: str) -> None:
        """Record a hibernation with counts of variables, and the `size` of the save in bytes.

        `cause` is the reason why nothing could be saved; empty otherwise.
        """

    def woke(self, back: int, lost: int) -> None:
        """Record that a hibernated session was restored, with counts of variables."""

    def resumed(self, saved: float, cells: int) -> None:
        """Record that the session continues one of an earlier server.

        `saved` is the time of the save in seconds since 1970, `cells` the number of its cells.
        """

    def installed(self, packages: Iterable[str], outcome: str, *, done: bool = True) -> None:
        """Record an installation of packages; `outcome` is ok or the reason of the failure."""

    def wrote(self, path: str, size: int, content: str | bytes, encoding: str = "utf-8") -> None:
        """Record a file of `size` bytes that a tool has written."""

    def uploaded(self, path: str, size: int, sha256: str) -> None:
        """Record a file of `size` bytes that was uploaded by HTTP."""

    def removed(self, path: str) -> None:
        """Record a file that was removed by HTTP."""

    def connected(self, facts: Mapping[str, Any]) -> None:
        """Record one connection to another machine, or several alike, that ended or was refused."""


SILENT = Journal()


class AuditLog(Audit):
    """An audit trail in a file. Each event is one line, written before the call returns.

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

    def journal(self, who: str, session: str) -> Journal:
        """Return the journal of a session, which writes to this file."""
        return _SessionJournal(self, who, session)

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


class _SessionJournal(Journal):
    def __init__(self, audit: Audit, who: str, session: str) -> None:
        self._audit = audit
        self._head = {"who": who, "session": session}
        self._handle: KernelProcess | None = None
        self._cpu_before = 0.0

    def opened(self, *, name: str, packages: Iterable[str], python: str, attach: str = "") -> None:
        joined = {"attach": attach} if attach else {}
        self._note("session_start", name=name, packages=_texts(packages), python=python, **joined)

    def closed(self, *, cells: int) -> None:
        self._note("session_end", cells=cells)

    def begins(self, handle: KernelProcess) -> None:
        self._handle, self._cpu_before = None, 0.0
        with self._barrier():
            self._cpu_before = handle.usage().cpu_s
            self._handle = handle

    def ran(self, cell: Cell) -> None:
        cpu_s: float | None = None
        memory: int | None = None
        with self._barrier():
            cpu_s, memory = self._used()
        cause = cell.outcome.cause if cell.outcome is not None else None
        self._note(
            "cell",
            cell=cell.number,
            author=cell.author,
            code_sha256=_sha256(cell.code.encode("utf-8", "replace")),
            status=cell.status.value,
            cause=_short(cause or ""),
            duration_s=round(cell.duration_s, 6),
            cpu_s=cpu_s,
            memory_bytes=memory,
            output_chars=cell.log.characters,
        )
        if cell.status is Status.KILLED:
            self._note("kill", cell=cell.number, cause=_short(cause or ""))

    def refused(self, cell: Cell, reasons: str) -> None:
        self._note("refusal", cell=cell.number, reasons=_texts(reasons.splitlines()))

    def died(self, cause: str) -> None:
        self._note("kill", cell=None, cause=_short(cause))

    def checkpointed(self, cell: int) -> None:
        self._note("checkpoint", cell=cell)

    def revived(self, cell: int) -> None:
        self._note("revival", cell=cell)

    def undone(self, cells: Iterable[int]) -> None:
        self._note("undo", cells=list(cells)[:MAX_TEXTS])

    def branched(self, handles: Iterable[str]) -> None:
        self._note("branch", branches=list(handles))

    def joined(self) -> None:
        self._note("join")

    def adopted(self, handle: str) -> None:
        self._note("adopt", branch=handle)

    def hibernated(self, saved: int, lost: int, size: int, cause: str) -> None:
        self._note("hibernate", saved=saved, lost=lost, size=size, cause=_short(cause))

    def woke(self, back: int, lost: int) -> None:
        self._note("wake", back=back, lost=lost)

    def resumed(self, saved: float, cells: int) -> None:
        self._note("resume", saved=_moment(saved), cells=cells)

    def installed(self, packages: Iterable[str], outcome: str, *, done: bool = True) -> None:
        self._note("install", packages=_texts(packages), outcome=_short(outcome))

    def wrote(self, path: str, size: int, content: str | bytes, encoding: str = "utf-8") -> None:
        self._note("file", path=_short(path), size=size, sha256=_sha256(_bytes(content, encoding)))

    def uploaded(self, path: str, size: int, sha256: str) -> None:
        self._note("file", path=_short(path), size=size, sha256=sha256)

    def removed(self, path: str) -> None:
        self._note("file_removed", path=_short(path))

    def connected(self, facts: Mapping[str, Any]) -> None:
        texts = {name: _short(each) for name, each in facts.items() if isinstance(each, str)}
        self._note("connection", **{**facts, **texts})

    def _note(self, event: str, **facts: Any) -> None:
        with self._barrier():
            self._audit.note(event, {**self._head, **facts})

    def _barrier(self) -> Barrier:
        """Return an error boundary for writes: a failed write never stops the session."""
        return Barrier("writing the audit log", self._head["session"])

    def _used(self) -> tuple[float | None, int | None]:
        """Return the cell's processor seconds, and the kernel's memory at its end in bytes.

        Both are None without a live kernel.
        """
        handle, self._handle = self._handle, None
        if handle is None or handle.exit is not None:
            return None, None
        usage = handle.usage()
        return round(max(0.0, usage.cpu_s - self._cpu_before), 3), usage.memory_bytes


def open_audit(path: Path | None, masks: Masks | None = None) -> Audit:
    """Return the audit trail of a server, which drops all events if `path` is None.

    Raises ConfigError.
    """
    return Audit() if path is None else AuditLog(path, masks=masks)


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(seconds: float) -> str:
    """Return seconds since 1970 in the format of the trail; empty for 0."""
    return _iso(datetime.fromtimestamp(seconds, timezone.utc)) if seconds else ""


def _utc() -> datetime:
    return datetime.now(timezone.utc)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(content: str | bytes, encoding: str) -> bytes:
    """Return the bytes that `write_file` wrote; empty for content that is not valid base64."""
    if isinstance(content, bytes):
        return content
    try:
        return base64.b64decode(content) if encoding.lower() == "base64" else content.encode()
    except (binascii.Error, ValueError):
        return b""


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _texts(texts: Iterable[str]) -> list[str]:
    found = [_short(text) for text in texts]
    left_out = len(found) - MAX_TEXTS
    return [*found[:MAX_TEXTS], f"and {left_out} more"] if left_out > 0 else found
