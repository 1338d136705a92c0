"""Notice ended children in a poll loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator


class ChildWatch:
    """A descriptor that is readable when a child may have ended (SIGCHLD)."""

    def __init__(self) -> None:
        """Take over SIGCHLD and the wakeup descriptor of this process."""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """What to poll."""
        return self._read

    def ended(self) -> Iterator[tuple[int, int]]:
        """Process id and wait status of every child that has ended since."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, status

    @staticmethod
    def forget() -> None:
        """Undo the effects on this process, in a child that is none of ours."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
