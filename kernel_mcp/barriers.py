"""Barriers confine a failure, such as of a system call, to one session of the server."""

from __future__ import annotations

import errno
import logging
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kernel_mcp.errors import KernelMcpError, ServerFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PACKAGE = Path(__file__).parent
_NO_THREAD = "can't start new thread"
"""CPython's message when pthread_create(3) fails."""


class Barrier:
    """A block whose exceptions are logged with the session's handle and kept in `failure`.

    Cancellation and BaseExceptions go through. `failure` is None on success.
    """

    __slots__ = ("_doing", "_session", "failure")

    def __init__(self, doing: str, session: str = "") -> None:
        """`doing` completes the sentence "the server failed while …"."""
        self.failure: Exception | None = None
        self._doing = doing
        self._session = session

    def __enter__(self) -> Barrier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = error
        log_failure(error, self._doing, self._session)
        return True


def log_failure(error: Exception, doing: str, session: str = "") -> None:
    """Log a failure, with its traceback unless its text is complete.

    The text of a KernelMcpError is complete; for a shortage, the line that raised it is added.
    """
    cause = _first(error)
    expected = refusal_of(error) is not None
    refused = _refusal(cause) is not None
    logger.log(
        logging.WARNING if expected else logging.ERROR,
        "the server failed while %s%s: %s%s",
        doing,
        f" (session {session})" if session else "",
        reason_of(error),
        f" (at {_place(cause)})" if refused and not expected else "",
        exc_info=None if expected or refused else error,
        extra={"session": session},
    )


def refusal_of(error: BaseException) -> KernelMcpError | None:
    """Return the KernelMcpError to report, the first one if all errors of a group are such.

    Returns None for any other error: it is a defect, and its traceback is needed.
    """
    inner = getattr(error, "exceptions", None)
    if isinstance(inner, tuple):
        found = [refusal_of(each) for each in inner]
        return found[0] if found and all(found) else None
    return error if isinstance(error, KernelMcpError) else None


def explained(error: Exception, doing: str, *, kept: str = "") -> KernelMcpError:
    """Return the failure as an error for the caller; a KernelMcpError is returned unchanged.

    `kept` is a sentence about what the failure has cost.
    """
    cause = _first(error)
    if isinstance(cause, KernelMcpError):
        return cause
    sentences = [f"The server failed while {doing}: {reason_of(cause)}.", kept, _advice(cause)]
    return ServerFailure(" ".join(text for text in sentences if text))


def in_full(error: Exception) -> str:
    """Return the cause of a command's failure and the remedy, with paths, for its user.

    Tools use `explained`: their callers can close and reset sessions.
    """
    cause = _first(error)
    if isinstance(cause, KernelMcpError):
        return str(cause)
    if _is_shortage(cause):
        return f"{reason_of(cause)}. Run it again where it has more of it"
    if isinstance(cause, OSError) and cause.strerror:
        place = f": {cause.filename}" if cause.filename else ""
        return f"{cause.strerror}{place}. Put that right, then run it again"
    return f"{reason_of(cause)}. Run it again with --log-level debug, and report what it says"


def shortage(error: BaseException) -> str:
    """Return the exhausted resource and the remedy; empty for any other failure."""
    cause = _first(error)
    return f"{reason_of(cause)}. {_advice(cause)}" if _is_shortage(cause) else ""


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure as text without paths."""
    cause = _first(error)
    if isinstance(cause, KernelMcpError):
        return str(cause)
    if (refusal := _refusal(cause)) is not None:
        return refusal
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return f"{type(cause).__name__} ({str(cause)[:200]})" if str(cause) else type(cause).__name__


async def run_in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run `work` in a thread, or here when no thread can start. Not cancelled."""
    begun: list[bool] = []

    def do() -> T:
        begun.append(True)
        return work(*args)

    import anyio  # here: programs that run without packages use the rest of this module

    with anyio.CancelScope(shield=True):
        try:
            return await anyio.to_thread.run_sync(do)
        except (RuntimeError, MemoryError):
            if begun:
                raise
    return work(*args)


def _first(error: BaseException) -> BaseException:
    while True:
        inner = getattr(error, "exceptions", None)
        if not isinstance(inner, tuple) or not inner:
            return error
        error = inner[0]


def _refusal(cause: BaseException) -> str | None:
    """Return the resource that the system refused; None for other errors."""
    if isinstance(cause, MemoryError):
        return "there is no memory left for it"
    if _NO_THREAD in str(cause):
        return "the system lets it start no further thread"
    if isinstance(cause, OSError) and cause.errno in _REASONS:
        return _REASONS[cause.errno]()
    return None


def _place(cause: BaseException) -> str:
    """Return the innermost line of this package in the traceback."""
    place = "an unknown place"
    for frame, line in traceback.walk_tb(cause.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            place = f"{path.relative_to(_PACKAGE)}:{line}"
    return place


def _descriptors() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"it has no file descriptors left (ulimit -n is {soft})"


_REASONS: dict[int | None, Callable[[], str]] = {
    errno.EMFILE: _descriptors,
    errno.ENFILE: lambda: "the machine has no file descriptors left",
    errno.ENOSPC: lambda: "there is no space left on its disk",
    errno.EDQUOT: lambda: "its disk quota is used up",
    errno.EIO: lambda: "its disk cannot be read or written (I/O error)",
    errno.ENOENT: lambda: "a file or folder that it needs has been removed",
    errno.ENOTDIR: lambda: "a folder that it needs has been replaced by a file",
    errno.EROFS: lambda: "its disk can only be read",
    errno.EACCES: lambda: "it may not use a file or folder that it needs",
    errno.ENOMEM: lambda: "there is no memory left for it",
    errno.EAGAIN: lambda: "the system lets it start no further process or thread",
}
_CROWDED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _is_shortage(cause: BaseException) -> bool:
    number = cause.errno if isinstance(cause, OSError) else None
    return number in _CROWDED or isinstance(cause, MemoryError) or _NO_THREAD in str(cause)


def _advice(cause: BaseException) -> str:
    if _is_shortage(cause):
        return (
            "Close sessions that are not needed with close_session, then try again; if that does "
            "not help, the server has to be given more of it."
        )
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _FULL:
        return "Remove files that are not needed, then try again."
    if number == errno.ENOENT:
        return "Call reset, which makes the session's folders again, then try again."
    return "Try again; the server's log says more."


SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EIO}
)
"""Values of errno for a shortage of the server or the machine."""


class _IgnoreMissing:
    """Suppresses OSErrors of files and processes that vanish or deny access while inspected.

    Errors in `SHORTAGES` are raised: an empty result would be wrong.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, OSError) and error.errno not in SHORTAGES


ignore_missing = _IgnoreMissing()


class Faults:
    """Logs failed measurements of one kernel, each kind once, with the session's handle."""

    def __init__(self, session: str) -> None:
        self.session = session
        self._logged: set[str] = set()

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Log a failure in this block; the last value of `what` stays in use.

        A failed measurement never ends a cell or a kernel.
        """
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as reason:
            text = f"could not be measured, the last value stays: {reason_of(reason)}"
            self._log(what, text)

    def unseen(self, folders: int) -> None:
        """Warn once that `folders` folders could not be measured; 0 for none."""
        if folders:
            text = f"is not all: {folders} folders belong to others, who have closed them"
            self._log("measured disk space", text)

    def _log(self, what: str, text: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            extra = {"session": self.session}
            logger.warning("the %s of session %s %s", what, self.session, text, extra=extra)
