"""Signals as every program expects them, whatever the one that started this one has done to them.

Supervisors block SIGINT or SIGTERM, shells ignore SIGINT for jobs in the background: a server would
hand that down to its kernels, which could not be interrupted then.
"""

from __future__ import annotations

import signal
import threading

_LEFT = frozenset(
    {
        signal.SIGPIPE,  # Python ignores these two, and gives its children the default back
        signal.SIGXFSZ,
        signal.SIGTSTP,  # a job of a shell without a terminal to stop it
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)


def plain_signals() -> None:
    """Block no signal and ignore none; has no effect outside the main thread.

    To be called before the first thread and the first process, which inherit both.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals() - _LEFT:
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if usual else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
