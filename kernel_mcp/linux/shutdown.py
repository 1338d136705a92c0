"""Shutdown of a server process: the signals that start it, a callback, and a watchdog alarm."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType

from kernel_mcp.linux.process import has_terminal

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BEAT_S = 1.0
"""Seconds between two heartbeats of the event loop."""
STILL_S = 2.0
"""CPU seconds without a heartbeat until the stack is written to stderr.

A signal handler writes it. `faulthandler.dump_traceback_later` uses a thread that reads frames
while they change, which has crashed servers (SIGSEGV) on a busy machine.
"""
ALARM_S = 5.0
"""Seconds without a heartbeat during shutdown until SIGALRM kills the process.

Work on the event loop is not cut short: it has limits of its own, or its client stops waiting.
"""
EXIT_S = 30.0
"""As `ALARM_S`, after the event loop has ended: Python waits for threads, such as self-tests."""
AGAIN_S = 0.5
"""Seconds until a second SIGINT counts: programs that start servers pass on the first twice."""
_STDERR = 2
INTERRUPTED = 128 + signal.SIGINT

logger = logging.getLogger(__name__)


class Shutdown:
    """The shutdown of this process, started by a signal or by `begin`.

    It uses Python's signal handlers, not the event loop's, as these run during a long match of a
    regular expression, too. Unless the loop is running (see `run`), a signal raises SystemExit.
    """

    def __init__(self, code: int | None = None) -> None:
        """Without a running loop, a signal exits with `code`, by default 128 plus its number."""
        self.begun = False
        self._code = code
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callable[[], None] = lambda: None
        self._beat = asyncio.Event()
        self._interrupted = 0.0
        """Time of the first SIGINT, by the monotonic clock; 0 before."""
        self._notified = False
        self._number = 0
        self._watched = False

    @property
    def code(self) -> int:
        """Exit code of a server after an orderly shutdown."""
        return INTERRUPTED if self._interrupted and self._code is None else 0

    def take_signals(self) -> None:
        """Handle `SHUTDOWN_SIGNALS` with this object; no effect outside the main thread.

        For a service, which has a `code`, SIGHUP means that logs were rotated, and does nothing. If
        it has a terminal, SIGHUP ends it: the terminal may have been closed.
        """
        if threading.current_thread() is threading.main_thread():
            for number in SHUTDOWN_SIGNALS:
                signal.signal(number, self._on_signal)
            if self._code is not None and not has_terminal():
                signal.signal(signal.SIGHUP, lambda *_: None)
            sys.unraisablehook = self._on_unraisable
            faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=False)
            self._watched = True

    def begin(self) -> None:
        """Start the shutdown, once; the callback of `on_begin` runs on the event loop."""
        if self.begun:
            return
        self.begun = True
        _set_alarm(ALARM_S)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_begin)

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Register a callback for the start of the shutdown; call it now if that has begun."""
        self._callback = callback
        if self.begun:
            callback()

    async def run(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Await `serve`; meanwhile signals call back on its event loop, which is monitored."""
        self._loop = asyncio.get_running_loop()
        beating = self._loop.create_task(self._heartbeats())
        try:
            await serve()
        finally:
            beating.cancel()
            self._watch(0.0)
            self._loop = None
            if self.begun:
                _set_alarm(EXIT_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted and number == signal.SIGINT and now - self._interrupted > AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT:
            self._interrupted = self._interrupted or now
        if self.begun:
            return
        self._number = number
        self.begin()
        if self._loop is None:
            raise SystemExit(128 + number if self._code is None else self._code)

    def _on_unraisable(self, error: sys.UnraisableHookArgs) -> None:
        """Ignore a SystemExit raised in a callback from which it cannot propagate.

        The event loop then ends as soon as it starts, since the shutdown has `begun`. Before that,
        ignore what an object misses whose creation was interrupted, such as the event loop.
        """
        ignored = SystemExit if self._loop is not None else (SystemExit, AttributeError)
        if not (self.begun and isinstance(error.exc_value, ignored)):
            sys.__unraisablehook__(error)

    def _on_begin(self) -> None:
        if self._number:  # not in the handler, which may have interrupted another log call
            logger.info("stopping on %s", signal.Signals(self._number).name)
        self._beat.set()
        self._callback()

    async def _heartbeats(self) -> None:
        """Postpone the alarm and the stack dump at intervals, as long as the event loop runs."""
        while True:
            self._watch(STILL_S)
            if self.begun:
                _set_alarm(ALARM_S)
                self._notify()
            pause = AGAIN_S if self.begun else BEAT_S
            began = time.monotonic()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._beat.wait(), pause)
            self._beat.clear()
            if (passed := time.monotonic() - began) > STILL_S:
                logger.warning("the event loop stood still for %.1f s: see above", passed - pause)

    def _watch(self, seconds: float) -> None:
        """Schedule a stack dump after `seconds` of CPU time; 0 cancels it."""
        if self._watched:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    def _notify(self) -> None:
        """Print once, after a first Ctrl-C, why the shutdown takes time."""
        waited = time.monotonic() - self._interrupted
        if self._interrupted and not self._notified and waited >= AGAIN_S:
            self._notified = True
            print("kernel-mcp: saving sessions; Ctrl-C again ends at once", file=sys.stderr)


def _set_alarm(seconds: float) -> None:
    """Arm SIGALRM to kill the process after `seconds`; a later call replaces the timer."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, seconds)
