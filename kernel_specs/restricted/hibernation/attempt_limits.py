"""Attempts per variable: time limits, interrupts, and why an object cannot be saved.

A signal only sets a flag, which the code that saves or loads checks. Code of a value may run for
long without a check: then the exception is raised in it, but never between two values.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from kernel_specs.restricted.originals import signal, time

MAX_REASON_CHARS = 160
GPU_ARRAY = "an array in a GPU's memory"
KINDS = {
    "_thread.lock": "a thread lock",
    "_thread.RLock": "a thread lock",
    "_thread._local": "thread-local data",
    "threading.Thread": "a thread",
    "builtins.generator": "a generator",
    "builtins.coroutine": "a coroutine",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.frame": "a frame",
    "builtins.traceback": "a traceback",
    "builtins.memoryview": "a memory view",
    "_io.BytesIO": "",
    "_io.StringIO": "",
    "_io._IOBase": "an open file",
    "tempfile._TemporaryFileWrapper": "an open file",
    "mmap.mmap": "a memory map",
    "socket.socket": "a connection",
    "_socket.socket": "a connection",
    "ssl.SSLContext": "a connection",
    "sqlite3.Connection": "an sqlite connection",
    "sqlite3.Cursor": "a database cursor",
    "subprocess.Popen": "a process",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.pool.Pool": "a pool of workers",
    "concurrent.futures._base.Executor": "a pool of workers",
    "concurrent.futures._base.Future": "a pending result",
    "_asyncio.Future": "an asynchronous task",
    "_asyncio.Task": "an asynchronous task",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "cupy._core.core.ndarray": GPU_ARRAY,
    "numba.cuda.cudadrv.devicearray.DeviceNDArray": GPU_ARRAY,
    "weakref.ReferenceType": "a weak reference",
    "weakref.ProxyType": "a weak reference",
    "weakref.CallableProxyType": "a weak reference",
    "weakref.finalize": "a finalizer",
    "_contextvars.ContextVar": "a context variable",
}
"""Kinds of objects that cannot leave the process, by class or base class."""
_ENDINGS = (("Connection", "a connection"), ("Cursor", "a database cursor"), ("Lock", "a lock"))
_REFUSAL = re.compile(r"cannot pickle '([\w.]+)' object")


class CannotKeepError(Exception):
    """An object that only exists in this process; `what` names its kind with an article."""

    def __init__(self, what: str, culprit: object) -> None:
        """`culprit` is the object, at any depth of the value."""
        super().__init__(what)
        self.what = what
        self.culprit = culprit


def kind_of(kind: type) -> str:
    """Return the kind of a class whose objects cannot leave the process, else ""."""
    for base in kind.__mro__:
        what = KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if what is not None:
            return what
        if any(
            type(vars(base).get(name)) is types.FunctionType
            for name in ("__reduce__", "__reduce_ex__", "__getstate__")
        ):
            return ""  # it defines its own reduction
    return ""


def module_of(kind: type) -> str:
    """Return the module of a class; empty if it is no text, as for functions built by Cython."""
    name: object = kind.__module__
    return name if isinstance(name, str) else ""


def on_gpu(value: Any) -> bool:
    """Return True for a tensor of torch or an array of JAX in a GPU's memory."""
    library = module_of(type(value)).partition(".")[0]
    if library == "torch":
        return getattr(value, "is_cuda", False) is True
    if library in ("jax", "jaxlib") and hasattr(value, "devices"):
        return any(device.platform != "cpu" for device in value.devices())
    return False


def reason_for(error: BaseException, value: object) -> str:
    """Return why `value` cannot be saved, as a phrase: `thread lock`, `holds an open file`."""
    if isinstance(error, MemoryError):
        return "too large for the memory limit"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "nested too deeply"
    if isinstance(error, CannotKeepError):
        what, itself = error.what, error.culprit is value
    elif match := _REFUSAL.search(_text(error)):
        what, itself = _words_for(match[1]), type(value).__name__ == match[1].rpartition(".")[2]
    else:
        return _cut(f"{type(error).__name__}: {_text(error)}".removesuffix(": "))
    return _cut(what.removeprefix("an ").removeprefix("a ") if itself else f"holds {what}")


def _words_for(name: str) -> str:
    endings = (words for ending, words in _ENDINGS if name.endswith(ending))
    return KINDS.get(name) or next(endings, f"a {name} object")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the text of a user's exception may fail
        return ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…"


R = TypeVar("R")

SHARE = 0.25
"""Fraction of the time that one variable may use."""
LOOKING = 3
"""Time limit of finding shared objects, as a multiple of that of pickling."""
PASSES = 2 + LOOKING
"""Time limit of all passes over the variables, as a multiple of one: each variable alone, finding
shared objects, variables that share."""
PATIENCE = 10
"""Wall-clock bound as a multiple of processor time, for a busy machine and code that waits."""
LOOK_SECONDS = 0.1
"""Interval of SIGALRM; an exception that user code swallowed is raised again after it."""
LAST_RESORT = 2
"""Time after which the code of a value is interrupted, as a multiple of its limit."""
UNSEEN_SECONDS = 0.5
"""Seconds that code of a value may run on after a request of the host to stop."""


class TimeUpError(BaseException):
    """The time of one variable is up."""


class StoppedError(BaseException):
    """The host has requested a stop (SIGINT)."""


class TooLargeError(Exception):
    """There is no room left for a variable."""


class TimeBudget:
    """Seconds of this thread's processor time, or `PATIENCE` times as many on a clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.thread_time(), time.monotonic()

    @property
    def left(self) -> float:
        """CPU seconds that are left; negative once they are exceeded."""
        cpu, wall = self._began
        passed = (time.monotonic() - wall) / PATIENCE
        return self._seconds - max(time.thread_time() - cpu, passed)

    @property
    def overdue(self) -> bool:
        """True once `LAST_RESORT` times as much has passed."""
        return self.left <= (1 - LAST_RESORT) * self._seconds


class Watch:
    """Turns SIGALRM and SIGINT, inside `with`, into flags for which `ask` raises exceptions."""

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._budget: TimeBudget | None = None
        self._in_hand = False
        self._before: list[Any] = []

    def __enter__(self) -> Watch:
        """Handle SIGALRM and SIGINT."""
        self._before = [
            signal.signal(signal.SIGALRM, self._ring),
            signal.signal(signal.SIGINT, self._interrupt),
            signal.setitimer(signal.ITIMER_REAL, 0),
            sys.unraisablehook,
        ]
        sys.unraisablehook = self._report
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the handlers, the timer and the hook."""
        alarm, interrupt, timer, hook = self._before
        self.rest()
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        sys.unraisablehook = hook

    def run(self, action: Callable[[], R], seconds: float, *, in_hand: bool = False) -> R:
        """Run `action` for at most `seconds`. Raises TimeUpError, StoppedError.

        With `in_hand` it handles one value, whose code may not call `ask`: the timer then raises.
        """
        self.check()
        look = min(max(seconds, 0.001), LOOK_SECONDS)
        try:
            self._budget, self._in_hand = TimeBudget(seconds), in_hand
            signal.setitimer(signal.ITIMER_REAL, look, look)
            return action()
        finally:
            self.rest()

    def rest(self) -> None:
        """Stop the timer."""
        self._budget, self._in_hand = None, False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def ask(self) -> None:
        """Raise TimeUpError if the time is up, StoppedError if the host has requested a stop."""
        self.check()
        if self._budget is not None and self._budget.left <= 0:
            raise TimeUpError

    def check(self) -> None:
        """Raise a StoppedError that user code may have swallowed."""
        if self._stopped_at is not None:
            raise StoppedError

    def _ring(self, *_: Any) -> None:
        if not self._in_hand or self._budget is None:
            return
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > UNSEEN_SECONDS:
            raise StoppedError
        if self._budget.overdue:
            raise TimeUpError

    def _interrupt(self, *_: Any) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def _report(self, unraisable: Any) -> None:
        """Report an unraisable exception of user code, unless it is this watch's own."""
        if not isinstance(unraisable.exc_value, (TimeUpError, StoppedError)):
            self._before[-1](unraisable)


class Attempts:
    """Runs one action for each name within a time limit; `lost` maps failed names to reasons."""

    def __init__(self, watch: Watch, seconds: float) -> None:
        """`seconds` of processor time for the actions of all names."""
        self.lost: dict[str, str] = {}
        self._watch = watch
        self._limit = seconds * SHARE
        self._left = seconds

    def do(self, name: str, action: Callable[[], object], value: object = None) -> bool:
        """Run `action`, and return True if it succeeded.

        Raises StoppedError when the host interrupts.
        """
        left = self._left
        if left <= 0:
            self.lost[name] = "there was no time left"
            return False
        budget = TimeBudget(left)
        try:
            self._watch.run(action, min(left, self._limit), in_hand=True)
        except TimeUpError:
            self._watch.rest()
            self.lost[name] = f"took longer than {min(left, self._limit):.1f} s"
        except TooLargeError as error:
            self.lost[name] = str(error)
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            self._watch.check()
            self.lost[name] = reason_for(error, value)
        self._left = budget.left
        return name not in self.lost
