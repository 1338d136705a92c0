"""Entry point of the command `kernel-mcp` and of `python -m kernel_mcp`."""

import os
import sys

INTERRUPTED = 130

# Ctrl-C during the imports below would end in a traceback
try:
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
except KeyboardInterrupt:
    os._exit(INTERRUPTED)

# Python puts the current folder first in sys.path, and its modules are not trusted
try:
    _HERE = os.path.realpath("")
except FileNotFoundError:  # it was removed
    _HERE = ""
if _HERE and sys.path[0] == _HERE and not __file__.startswith(f"{_HERE}/"):
    del sys.path[0]

from kernel_mcp import cli  # noqa: E402


def main() -> int:
    """Run the command of `sys.argv`; return its exit code."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
