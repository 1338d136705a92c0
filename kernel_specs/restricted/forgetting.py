"""Run cells as if they had never been run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


@contextlib.contextmanager
def forgetting(shell: Any) -> Iterator[None]:
    """Put names and results of `shell` back; for cells without a number that no user wrote."""
    names, hidden, hook = dict(shell.user_ns), dict(shell.user_ns_hidden), shell.displayhook
    shown = hook._, hook.__, hook.___
    try:
        yield
    finally:
        shell.user_ns.clear()
        shell.user_ns.update(names)
        shell.user_ns_hidden.clear()
        shell.user_ns_hidden.update(hidden)
        shell.user_ns["Out"].clear()
        hook._, hook.__, hook.___ = shown
        shell.last_execution_result = None
        shell.last_execution_succeeded = True
        for name in _LAST_ERROR:
            vars(sys).pop(name, None)
