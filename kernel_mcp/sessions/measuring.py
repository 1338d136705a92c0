"""Meters that count the events of the audit trail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kernel_mcp.sessions.audit import Audit, Journal
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.telemetry import Meters

if TYPE_CHECKING:
    pass

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


class Measured(Audit):
    """An audit trail whose events `meters` counts as well."""

    def __init__(self, audit: Audit, meters: Meters) -> None:
        self._audit = audit
        self._meters = meters

    @property
    def state(self) -> str:  # type: ignore[override]
        """See `Audit`."""
        return self._audit.state

    def journal(self, who: str, session: str) -> Journal:
        """See `Audit`."""
        return MeasuredJournal(self._audit.journal(who, session), self._meters)

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """See `Audit`."""
        self._audit.note(event, facts)

    def close(self) -> None:
        """See `Audit`."""
        self._audit.close()


class MeasuredJournal(Journal):
    """A journal whose events `meters` counts as well."""

    def __init__(self, journal: Journal, meters: Meters) -> None:
        self._meters = meters
        self._journal = journal
        for name in _ONLY_WRITTEN:
            setattr(self, name, getattr(journal, name))

    def ran(self, cell: Cell) -> None:
        """See `Journal`."""
        self._journal.ran(cell)
        self._meters.cell(cell.status.value, cell.duration_s)
        if cell.status is Status.KILLED:
            cause = cell.outcome.cause if cell.outcome is not None else None
            self._meters.kill(cause_of(cell.stop_reason, cause or ""))

    def refused(self, cell: Cell, reasons: str) -> None:
        """See `Journal`."""
        self._journal.refused(cell, reasons)
        self._meters.refusal("policy")

    def died(self, cause: str) -> None:
        """See `Journal`."""
        self._journal.died(cause)
        self._meters.kill(cause_of(None, cause))

    def started(self, kind: str, seconds: float) -> None:
        """See `Journal`."""
        self._journal.started(kind, seconds)
        self._meters.start(kind, seconds)

    def not_started(self) -> None:
        """See `Journal`."""
        self._journal.not_started()
        self._meters.failed_start()

    def hibernated(self, saved: int, lost: int, size: int, cause: str) -> None:
        """See `Journal`."""
        self._journal.hibernated(saved, lost, size, cause)
        self._meters.hibernation("hibernated")

    def woke(self, back: int, lost: int) -> None:
        """See `Journal`."""
        self._journal.woke(back, lost)
        self._meters.hibernation("woke")

    def installed(self, packages: Iterable[str], outcome: str, *, done: bool = True) -> None:
        """See `Journal`."""
        self._journal.installed(packages, outcome, done=done)
        self._meters.install("ok" if done else "failed")

    def connected(self, facts: Mapping[str, Any]) -> None:
        """See `Journal`."""
        self._journal.connected(facts)
        if facts.get("verdict") == "refused":
            self._meters.refusal("network")


def cause_of(reason: StopReason | None, words: str) -> str:
    """Return the cause for `Meters.kill`: from the stop reason, else from the text on the end."""
    if reason is not None:
        return _STOPPED[reason]
    return "memory" if "memory" in words else "lost"


_ONLY_WRITTEN = [
    name for name in vars(Journal) if not name.startswith("_") and name not in vars(MeasuredJournal)
]
"""Names of events that no meter counts."""
