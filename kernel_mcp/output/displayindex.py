"""Display ids across the cells of a session."""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_LOGS = 8
"""Earlier cells that one `update_display` can reach."""

LogT = TypeVar("LogT")


class DisplayIndex(Generic[LogT]):
    """Which cells of a session show which display id."""

    def __init__(self) -> None:
        self._logs: dict[str, list[LogT]] = {}

    def add(self, display_id: str, log: LogT) -> None:
        """Remember that `log` shows `display_id`."""
        logs = self._logs.setdefault(display_id, [])
        if log not in logs:
            logs.append(log)
            del logs[:-MAX_LOGS]

    def forget(self, display_id: str, log: LogT) -> None:
        """Undo `add`."""
        logs = self._logs.get(display_id, [])
        if log in logs:
            logs.remove(log)
            if not logs:
                del self._logs[display_id]

    def others(self, display_id: str, log: LogT) -> list[LogT]:
        """The other logs that show `display_id`, oldest first."""
        return [other for other in self._logs.get(display_id, []) if other is not log]
