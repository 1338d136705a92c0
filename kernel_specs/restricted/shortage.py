"""Room for the kernel itself when user code has taken all memory."""

from __future__ import annotations

import contextlib
import mmap
import resource

from kernel_specs.restricted.confine import renew_memory_budget

BALLAST_BYTES = 4 * 1024 * 1024
"""Address space let go before the limit is raised, which needs a little memory itself."""


class Reserve:
    """Opened when a MemoryError surfaces, closed once the request is answered."""

    def __init__(self) -> None:
        """Closed, and without ballast before the first cell."""
        self._ballast: mmap.mmap | None = None
        self._opened = False

    def renew(self) -> None:
        """Give the next cell what is left of the budget."""
        self._opened = False
        if self._ballast is None:  # before the limit is lowered again
            with contextlib.suppress(MemoryError, OSError):
                self._ballast = mmap.mmap(-1, BALLAST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        renew_memory_budget()

    def open(self) -> None:
        """Raise the soft limit of the address space to the hard one."""
        self._opened = True
        self._ballast = None  # first: from here on small objects can be had
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def close(self) -> None:
        """Renew the budget if the reserve was opened."""
        if self._opened:
            self.renew()
