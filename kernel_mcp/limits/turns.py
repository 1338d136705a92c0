"""Who goes first when the processors are busy: short cells before long ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from kernel_mcp.limits.group import KernelGroup

LONG_S = 0.25
"""A kernel that computes for about this long lets the others go first."""


class Turns:
    """One kernel's place among those of the server."""

    def __init__(
        self, group: KernelGroup | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a `group` all are equal."""
        self._group = group
        self._clock = clock
        self._behind = False
        self._began = 0.0
        self._used: float | None = None

    def begin(self) -> None:
        """A cell is about to run."""
        if self._behind and self._group is not None:
            with contextlib.suppress(OSError):
                self._group.favour()
                self._behind = False
        self._began = self._clock()
        self._used = None

    def rank(self) -> None:
        """Let others go first from now on, if it has been computing for a while.

        Called again and again while it is at work, some `LONG_S` apart.
        """
        if self._group is None or self._behind:
            return
        with contextlib.suppress(OSError):
            if self._computes(self._group):
                self._group.step_back()
                self._behind = True

    def _computes(self, group: KernelGroup) -> bool:
        """Whether it has been busy since the last time, and not only been waiting for its turn."""
        used, before = group.cpu_s(), self._used
        if used is None:
            return self._clock() - self._began > LONG_S
        self._used = used
        return before is not None and used - before > LONG_S / 2
