"""Signals of a process that somebody else has started."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from kernel_mcp.linux.process import plain_signals
plain_signals()
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
left = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
print(sorted(signal.Signals(number).name for number in left))
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_no_signal_stays_blocked_and_none_ignored_that_ends_a_program() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split("'")[1::2] == ["SIGPIPE", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGXFSZ"]
    assert (done.returncode, done.stderr) == (0, "")
