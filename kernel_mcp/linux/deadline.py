"""A deadline at which Linux kills this process, even if all processes are stuck."""

from __future__ import annotations

import ctypes
import os
import signal

CLOCK_BOOTTIME = 7
"""Linux's number of the clock that counts on while the machine sleeps (linux/time.h)."""
TIMER_ABSTIME = 1
_SIGEVENT_BYTES = 64
"""SIGEV_MAX_SIZE of Linux, on all machines."""


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * (_SIGEVENT_BYTES - ctypes.sizeof(ctypes.c_void_p) - 8)),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Deadline:
    """A timer that kills this process, also while it is stopped. Children do not inherit it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._libc = _with_timers()
        self._timer = ctypes.c_void_p()
        event = _SigEvent(signo=signal.SIGKILL, notify=0)  # SIGEV_SIGNAL
        self._check(
            self._libc.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer))
        )

    def set(self, moment: float) -> None:
        """Set the deadline, in seconds of CLOCK_BOOTTIME. Raises OSError."""
        seconds = int(moment)
        value = _TimeSpec(seconds, int((moment - seconds) * 1e9) or 1)  # 0.0 would end it
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        self._check(self._libc.timer_settime(self._timer, TIMER_ABSTIME, ctypes.byref(spec), None))

    @staticmethod
    def _check(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _with_timers() -> ctypes.CDLL:
    """Return the C library with timers; before glibc 2.34 that is a library of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
