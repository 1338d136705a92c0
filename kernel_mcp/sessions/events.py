"""Events of a server and its sessions. Each goes to the audit trail and to the meters.

Code is recorded as its SHA-256, with `--audit-code` as itself, output as its length in characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_mcp.barriers import Barrier
from kernel_mcp.sessions.audit import AuditLog
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.telemetry import Meters
from kernel_mcp.telemetry.origin import HERE

if TYPE_CHECKING:
    from kernel_mcp.launch.process import KernelProcess

MAX_TEXT = 500
"""Maximum characters of one text in an event, so that a single write(2) is enough for a line."""
MAX_TEXTS = 20
MAX_CODE = 100_000
"""Maximum characters of the code of a cell."""
_CALL = ("request", "peer")
"""Parts of the origin of a call that its events have."""
START, NO_START = "kernel_start", "kernel_start_failure"
"""Events that are counted and not written: each start is part of a cell or a session's start."""
_STOPPED = {
    StopReason.TIMEOUT: "time",
    StopReason.CPU: "cpu",
    StopReason.DISK: "disk",
    StopReason.INTERRUPT: "asked",
    StopReason.CANCEL: "asked",
    StopReason.RESET: "asked",
    StopReason.CLOSE: "asked",
    StopReason.END: "asked",
}


class Whole(str):
    """A text of an event that is not cut to MAX_TEXT."""


class Events:
    """The events of a server. By default they are neither written nor counted."""

    def __init__(
        self,
        audit: AuditLog | None = None,
        meters: Meters | None = None,
        *,
        audits_code: bool = False,
    ) -> None:
        """With `audits_code` the events of cells have their code."""
        self.audits_code = audits_code
        self.meters = meters or Meters()
        self.unheard = audit is None and type(self.meters) is Meters
        """True if nothing becomes of an event."""
        self._audit = audit

    @property
    def audit_state(self) -> str:
        """State of the audit trail, for `info`: off, on, or what is wrong."""
        return "off" if self._audit is None else self._audit.state

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write and count an event; threadsafe for events that no meter counts."""
        self.meters.note(event, facts)
        if self._audit is not None and event not in (START, NO_START):
            self._audit.note(event, facts)

    def of_session(self, who: str, session: str) -> SessionEvents:
        """Return the events of a session; `who` is the principal that owns it."""
        return SessionEvents(self, who, session)

    def close(self) -> None:
        """Record the end of the server, and close the audit trail."""
        self.note("server_end", {})
        if self._audit is not None:
            self._audit.close()


class SessionEvents:
    """Records the events of one session."""

    def __init__(self, events: Events, who: str, session: str) -> None:
        self._events = events
        self._head = {"who": who, "session": session}
        self._handle: KernelProcess | None = None
        self._cpu_before = 0.0

    def note(self, event: str, /, **facts: Any) -> None:
        """Record an event, with long texts and lists cut. A failure never stops the session."""
        if not self._events.unheard:
            with self._barrier():
                bounded = {name: _bounded(value) for name, value in facts.items()}
                here = HERE.get()
                call = {name: text for name in _CALL if (text := getattr(here, name))}
                self._events.note(event, {**self._head, **call, **bounded})

    def begins(self, handle: KernelProcess) -> None:
        """Start to measure the processor time of a cell that is about to run; record no event."""
        self._handle, self._cpu_before = None, 0.0
        if not self._events.unheard:
            with self._barrier():
                self._cpu_before = handle.usage().cpu_s
                self._handle = handle

    def ran(self, cell: Cell) -> None:
        """Record a cell that has ended, with any status."""
        cpu_s: float | None = None
        memory: int | None = None
        with self._barrier():
            cpu_s, memory = self._used()
        cause = (cell.outcome.cause if cell.outcome is not None else None) or ""
        code = {"code": Whole(cell.code[:MAX_CODE])} if self._events.audits_code else {}
        self.note(
            "cell",
            **code,
            cell=cell.number,
            author=cell.author,
            client=cell.origin.program,
            code_sha256=_sha256(cell.code.encode("utf-8", "replace")),
            status=cell.status.value,
            cause=cause,
            duration_s=round(cell.duration_s, 6),
            cpu_s=cpu_s,
            memory_bytes=memory,
            output_chars=cell.log.characters,
        )
        if cell.status is Status.KILLED:
            reason = reason_of_kill(cell.stop_reason, cause)
            self.note("kill", cell=cell.number, cause=cause, reason=reason)

    def died(self, cause: str) -> None:
        """Record that the kernel has died between cells."""
        self.note("kill", cell=None, cause=cause, reason=reason_of_kill(None, cause))

    def wrote(self, path: str, size: int, content: str | bytes, encoding: str = "utf-8") -> None:
        """Record a file of `size` bytes that a tool has written."""
        self.note("file", path=path, size=size, sha256=_sha256(_bytes(content, encoding)))

    def read(self, path: str) -> None:
        """Record that a client has read a file."""
        self.note("file_read", path=path)

    def _barrier(self) -> Barrier:
        return Barrier("recording an event", self._head["session"])

    def _used(self) -> tuple[float | None, int | None]:
        """Return the cell's processor seconds, and the kernel's memory at its end in bytes.

        Both are None without a live kernel.
        """
        handle, self._handle = self._handle, None
        if handle is None or handle.exit is not None:
            return None, None
        usage = handle.usage()
        return round(max(0.0, usage.cpu_s - self._cpu_before), 3), usage.memory_bytes


def reason_of_kill(reason: StopReason | None, words: str) -> str:
    """Return the reason of a kill: from the stop reason, else from the text on the end."""
    if reason is not None:
        return _STOPPED[reason]
    return "memory" if "memory" in words else "lost"


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


def _bounded(value: Any) -> Any:
    if isinstance(value, Whole):
        return str(value)
    if isinstance(value, dict):
        return {name: _bounded(each) for name, each in value.items()}
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    if not isinstance(value, list):
        return value
    more = len(value) - MAX_TEXTS
    found = [_bounded(each) for each in value[:MAX_TEXTS]]
    return [*found, f"and {more} more"] if more > 0 else found
