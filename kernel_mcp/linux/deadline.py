"""A deadline at which Linux kills this process, even if all processes are stuck."""

from __future__ import annotations

import signal

from kernel_specs import linux


class Deadline:
    """A timer that kills this process, also while it is stopped. Children do not inherit it."""

    def __init__(self) -> None:
        """Create the timer, not armed yet. Raises OSError."""
        self._timer = linux.timer_create(linux.CLOCK_BOOTTIME, signal.SIGKILL)

    def set(self, moment: float) -> None:
        """Set the deadline, in seconds of CLOCK_BOOTTIME. Raises OSError."""
        linux.timer_set(self._timer, moment)
