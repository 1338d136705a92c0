"""Time limits and interrupts for code of objects that are being pickled or brought back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from kernel_specs.restricted.reasons import reason_for

R = TypeVar("R")

SHARE = 0.25
"""How much of the time one variable may use."""
PATIENCE = 10
"""How much more time than that may pass on a clock: on a busy machine, or while code only waits."""
LOOK_SECONDS = 0.1
"""How often the time is looked at; a limit that user code swallowed comes again after so long."""


class TimeUpError(BaseException):
    """The time of one variable is over."""


class TooLargeError(Exception):
    """There is no room left for a variable."""


class Budget:
    """Seconds of this thread's processor time, and `PATIENCE` times as many that may pass."""

    def __init__(self, seconds: float) -> None:
        """It is used from now on."""
        self._seconds = seconds
        self._began = time.thread_time(), time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of processor time that are left."""
        cpu, wall = self._began
        passed = (time.monotonic() - wall) / PATIENCE
        return self._seconds - max(time.thread_time() - cpu, passed)


class Watch:
    """Ends code that runs too long or that the host interrupts; for the main thread alone."""

    def __init__(self) -> None:
        """Signals are handled inside a `with` block."""
        self.interrupted = False
        self._budget: Budget | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Watch:
        """Take over SIGALRM and SIGINT."""
        self._before = [
            signal.signal(signal.SIGALRM, self._ring),
            signal.signal(signal.SIGINT, self._interrupt),
            signal.setitimer(signal.ITIMER_REAL, 0),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back."""
        alarm, interrupt, timer = self._before
        self.rest()
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)
        signal.setitimer(signal.ITIMER_REAL, *timer)

    def run(self, action: Callable[[], R], seconds: float) -> R:
        """What `action` returns within a budget of `seconds`.

        Raises TimeUpError, KeyboardInterrupt and what it raises.
        """
        self.check()
        look = min(max(seconds, 0.001), LOOK_SECONDS)
        try:
            self._budget = Budget(seconds)
            signal.setitimer(signal.ITIMER_REAL, look, look)
            return action()
        finally:
            self.rest()

    def rest(self) -> None:
        """Nothing is being watched."""
        self._budget = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raise the KeyboardInterrupt that somebody swallowed."""
        if self.interrupted:
            raise KeyboardInterrupt

    def _ring(self, *_: Any) -> None:
        if self._budget is not None and self._budget.left <= 0:
            raise TimeUpError

    def _interrupt(self, *_: Any) -> None:
        self.interrupted = True
        if self._budget is not None:
            raise KeyboardInterrupt


class Attempts:
    """Does one thing for each name, within the time there is, and notes who failed and why."""

    def __init__(self, watch: Watch, seconds: float) -> None:
        """`seconds` of processor time for all names together."""
        self.lost: dict[str, str] = {}
        self._watch = watch
        self._limit = seconds * SHARE
        self._budget = Budget(seconds)

    def do(self, name: str, action: Callable[[], object], value: object = None) -> bool:
        """Whether `action` succeeded. Raises KeyboardInterrupt when the host interrupts."""
        left = self._budget.left
        if left <= 0:
            self.lost[name] = "there was no time left"
            return False
        try:
            self._watch.run(action, min(left, self._limit))
        except TimeUpError:
            self._watch.rest()
            self.lost[name] = f"took longer than {min(left, self._limit):.1f} s"
        except TooLargeError as error:
            self.lost[name] = str(error)
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            self._watch.check()
            self.lost[name] = reason_for(error, value)
        return name not in self.lost
