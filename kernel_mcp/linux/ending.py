"""The end of a server process: what begins it, who hears of it, and the alarm behind it."""

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

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BEAT_S = 1.0
"""Seconds between two signs of life of the event loop."""
STILL_S = 2.0
"""Seconds of processor time without such a sign until the stack is written to stderr. A signal
handler writes it: a thread beside Python, as of `faulthandler.dump_traceback_later`, reads frames
while they change, and has ended servers by SIGSEGV on a busy machine."""
ALARM_S = 5.0
"""Seconds without a sign of life at the end until SIGALRM ends the process. Work that goes on is
not cut short: its own bounds end it, or a client that waits no longer."""
EXIT_S = 30.0
"""The same once the event loop is over: Python waits for threads, such as that of a self-test."""
AGAIN_S = 0.5
"""Seconds until a second SIGINT counts: programs that start servers pass on a first one twice."""
_STDERR = 2
INTERRUPTED = 128 + signal.SIGINT

logger = logging.getLogger(__name__)


class Ending:
    """The end of this process, which a signal or `begin` begins.

    Its signal handlers are Python's, not the event loop's: they run inside a long match of a
    regular expression, too. Except `during` an event loop, a signal raises SystemExit.
    """

    def __init__(self, code: int | None = None) -> None:
        """A signal ends the process with `code`, or with 128 and its number, where no loop runs."""
        self.begun = False
        self._code = code
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hear: Callable[[], None] = lambda: None
        self._beat = asyncio.Event()
        self._interrupted = 0.0
        """When the first SIGINT came, by the monotonic clock; 0 before."""
        self._told = False
        self._number = 0
        self._watched = False

    @property
    def code(self) -> int:
        """The exit code of a server that has ended in order."""
        return INTERRUPTED if self._interrupted and self._code is None else 0

    def take_signals(self) -> None:
        """Handle the signals of `ENDING` here; no effect outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                signal.signal(number, self._on_signal)
            sys.unraisablehook = self._on_unraisable
            faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=False)
            self._watched = True

    def begin(self) -> None:
        """Begin the end, once: call what is to `hear` of it, on the event loop."""
        if self.begun:
            return
        self.begun = True
        _set_alarm(ALARM_S)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_begin)

    def hear(self, hear: Callable[[], None]) -> None:
        """Call `hear` once the end begins, or now where it has begun."""
        self._hear = hear
        if self.begun:
            hear()

    async def during(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Await `serve`: meanwhile its event loop hears of the end, and is watched."""
        self._loop = asyncio.get_running_loop()
        beating = self._loop.create_task(self._go_on())
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
        """Be silent on an end that was raised in a callback, which it cannot leave.

        The event loop ends as it begins then: it has `begun`.
        """
        if not (self.begun and isinstance(error.exc_value, SystemExit)):
            sys.__unraisablehook__(error)

    def _on_begin(self) -> None:
        if self._number:  # not in the handler, which may interrupt the writing of another line
            logger.info("stopping on %s", signal.Signals(self._number).name)
        self._beat.set()
        self._hear()

    async def _go_on(self) -> None:
        """Put off the alarm and the writing of the stack, for as long as the event loop runs."""
        while True:
            self._watch(STILL_S)
            if self.begun:
                _set_alarm(ALARM_S)
                self._tell()
            pause = AGAIN_S if self.begun else BEAT_S
            began = time.monotonic()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._beat.wait(), pause)
            self._beat.clear()
            if (passed := time.monotonic() - began) > STILL_S:
                logger.warning("the event loop stood still for %.1f s: see above", passed - pause)

    def _watch(self, seconds: float) -> None:
        """Write the stack after so much processor time, unless this is called again before."""
        if self._watched:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    def _tell(self) -> None:
        """Say what takes the time to someone who has pressed Ctrl-C."""
        waited = time.monotonic() - self._interrupted
        if self._interrupted and not self._told and waited >= AGAIN_S:
            self._told = True
            print("kernel-mcp: saving sessions; Ctrl-C again ends at once", file=sys.stderr)


def _set_alarm(seconds: float) -> None:
    """Arm SIGALRM to end the process after so many seconds; the next call replaces this timer."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, seconds)
