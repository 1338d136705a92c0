"""SIGINT: KeyboardInterrupt in user code, else ignored or delayed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from kernel_specs.restricted.originals import signal

REST_SECONDS = 0.1
"""Least seconds between two KeyboardInterrupts, so that the first is reported whole."""
GUARD_DEPTH = 16
"""Frames of the output path below a write; deeper stacks are user code."""


class InterruptGate:
    """The SIGINT handler: KeyboardInterrupt in user code, and nowhere else.

        idle                     ignored
        a request, before code   remembered, raised when its code starts
        user code running        KeyboardInterrupt
        inside the output path   tried again a moment later, so that no message is cut in two
        just after another one   likewise, so that the error of the cell is reported whole
        a cell awaiting          its task is cancelled at once

    A signal may arrive after Python's last check and before a blocking system call: Python handles
    it only after that call. The service thread detects this by `waiting` and ends it by `wake`.

    Python runs signal handlers between any two bytecodes of the main thread. No flag could be set
    early enough, so the handler inspects the interrupted frame.
    """

    def __init__(self, guarded: Iterable[str] = ()) -> None:
        """`guarded` are the file names of the output path."""
        self._guarded = frozenset(guarded)
        self._loop_files = frozenset(_event_loop_files())
        self._handling = False
        self._open = False
        self._pending = False
        self._raised_at = 0.0
        self._handled = 0
        self._arrived = self._arrival = -1
        self._watched = False
        self.retry: Callable[[], None] = lambda: None
        self.cancel: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Return True if a request is being handled."""
        return self._handling

    def __call__(self, _signum: int, frame: FrameType | None) -> None:
        """Handle SIGINT. Raises KeyboardInterrupt in user code."""
        if self._arrived >= 0:
            self._read_arrivals()  # before counting: signals that arrive later are not handled yet
        self._handled += 1
        if not self._handling:
            return
        if self.cancel is not None and self._in_event_loop(frame):
            self.cancel()
        elif not self._open:
            self._pending = True
        elif self._in_output_path(frame) or self._resting():
            self._pending = True
            self.retry()
        else:
            self._raise()

    def begin(self) -> None:
        """Note the start of a request; install the handler, which user code may have replaced."""
        self._pending = False
        self._raised_at = 0.0
        if self._arrived >= 0:
            self._read_arrivals()  # drop those of the last request, which may have had a handler
        self._handled += 1
        self._handling = True
        signal.signal(signal.SIGINT, self)
        if self._arrival >= 0:
            with contextlib.suppress(ValueError, OSError):  # user code has closed it
                signal.set_wakeup_fd(self._arrival, warn_on_full_buffer=False)

    def watch(self) -> int:
        """Let C code write each signal to a pipe before Python handles it; return the read end."""
        self._arrived, self._arrival = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if not self._watched:  # hooks are inherited
            self._watched = True
            os.register_at_fork(after_in_child=self._forget_arrivals)
        return self._arrived

    @property
    def arrivals(self) -> tuple[int, ...]:
        """Descriptors of the pipe that `watch` has made; empty without one."""
        return tuple(fd for fd in (self._arrived, self._arrival) if fd >= 0)

    def waiting(self) -> int | None:
        """Return the count of handled signals if SIGINT is pending, else None (service thread)."""
        handled = self._handled
        return handled if signal.SIGINT in self._read_arrivals() and self._handling else None

    def wake(self, handled: int) -> None:
        """Interrupt the main thread's system call if no signal was handled since (service thread).

        `handled` is the count that `waiting` has returned.
        """
        main = threading.main_thread().ident
        if (
            handled == self._handled
            and self._handling
            and main is not None
            and signal.getsignal(signal.SIGINT) is self
        ):
            signal.pthread_kill(main, signal.SIGINT)

    def _read_arrivals(self) -> bytes:
        try:
            return os.read(self._arrived, 4096)
        except OSError:  # empty, or closed by user code
            return b""

    def _forget_arrivals(self) -> None:
        """Forget the pipe in a forked child: it is the parent's."""
        signal.set_wakeup_fd(-1)
        self._arrived = self._arrival = -1

    def end(self) -> None:
        """Note the end of a request: SIGINT is ignored until the next one."""
        self._open = self._handling = self._pending = False

    def open(self) -> None:
        """Note that user code follows. Raises KeyboardInterrupt if a SIGINT came before."""
        self._open = True
        self.check()

    def close(self) -> None:
        """Note that user code has ended; the reply follows."""
        self._open = False

    def check(self) -> None:
        """Raise a delayed KeyboardInterrupt; for code of the kernel that waits."""
        if self._pending and self._open and threading.current_thread() is threading.main_thread():
            self._raise()

    def catch_up(self) -> None:
        """Call `check` unless the last KeyboardInterrupt is still being reported."""
        if self._pending and not self._resting():
            self.check()

    def redeliver(self) -> None:
        """Send SIGINT to the main thread again if one is still pending (service thread)."""
        main = threading.main_thread().ident
        if self._pending and self._open and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def _resting(self) -> bool:
        return time.monotonic() - self._raised_at < REST_SECONDS

    def _raise(self) -> None:
        self._pending = False
        self._raised_at = time.monotonic()
        raise KeyboardInterrupt

    def _in_output_path(self, frame: FrameType | None) -> bool:
        for _ in range(GUARD_DEPTH):
            if frame is None:
                return False
            if frame.f_code.co_filename in self._guarded:
                return True
            frame = frame.f_back
        return False

    def _in_event_loop(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename in self._loop_files:
            if frame.f_code.co_name == "_run_once":
                return True
            frame = frame.f_back
        return False


def _event_loop_files() -> list[str]:
    folder = Path(asyncio.__file__).parent
    names = ("base_events.py", "events.py", "selector_events.py", "unix_events.py")
    return [selectors.__file__, *(str(folder / name) for name in names)]
