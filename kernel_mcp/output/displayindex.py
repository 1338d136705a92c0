"""Display ids across the cells of a session."""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_LOGS = 8
"""Earlier cells that one `update_display` can reach."""
MAX_HELD = 32
"""Cells with display ids that can be updated at all: they stay in memory."""

LogT = TypeVar("LogT")


class DisplayIndex(Generic[LogT]):
    """Which of the newest cells of a session show which display id."""

    def __init__(self) -> None:
        self._logs: dict[str, list[LogT]] = {}
        self._ids: dict[LogT, set[str]] = {}

    def add(self, display_id: str, log: LogT) -> None:
        """Remember that `log` shows `display_id`; the oldest of too many logs is forgotten."""
        logs = self._logs.setdefault(display_id, [])
        if log not in logs:
            logs.append(log)
            self._ids.setdefault(log, set()).add(display_id)
            for earlier in logs[:-MAX_LOGS]:
                self.forget(display_id, earlier)
        while len(self._ids) > MAX_HELD:
            oldest = next(iter(self._ids))
            for held in list(self._ids[oldest]):
                self.forget(held, oldest)

    def forget(self, display_id: str, log: LogT) -> None:
        """Undo `add`."""
        logs = self._logs.get(display_id, [])
        if log in logs:
            logs.remove(log)
            self._ids[log].discard(display_id)
            if not logs:
                del self._logs[display_id]
            if not self._ids[log]:
                del self._ids[log]

    def others(self, display_id: str, log: LogT) -> list[LogT]:
        """The other logs that show `display_id`, oldest first."""
        return [other for other in self._logs.get(display_id, []) if other is not log]

    def holds(self, log: LogT) -> bool:
        """Whether an update may yet reach `log`."""
        return log in self._ids

    def clear(self) -> None:
        """Forget everything: the kernel that made the displays has gone."""
        self._logs.clear()
        self._ids.clear()
