"""Troubles of the server while it measures: they are told apart from what is measured."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from kernel_mcp.barriers import reason_of

logger = logging.getLogger(__name__)

SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EIO}
)
"""What the system says when the server or the machine lacks something."""


class _Absences:
    """Passes over what ends, moves or is closed to this user while it is looked at.

    What the server itself lacks (`SHORTAGES`) is raised: to have found nothing would be untrue.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, OSError) and error.errno not in SHORTAGES


absences = _Absences()


class Faults:
    """Looks at one kernel that have failed: each kind is logged once, with its session's handle."""

    def __init__(self, session: str) -> None:
        self.session = session
        self._told: set[str] = set()

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Let a failure in this block be no more than that: the last value of `what` stays.

        It is never a reason to end a cell or a kernel.
        """
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as reason:
            text = f"could not be measured, the last value stays: {reason_of(reason)}"
            self._tell(what, text)

    def unseen(self, folders: int) -> None:
        """Note that there are folders in which nothing could be counted."""
        if folders:
            text = f"is not all: {folders} folders belong to others, who have closed them"
            self._tell("measured disk space", text)

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("the %s of session %s %s", what, self.session, text)
