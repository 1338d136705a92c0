"""Format the log as text for people or as one JSON object a line. No line contains a token."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

from kernel_mcp.telemetry.origin import HERE

_TOKEN = re.compile(r"kmcp_[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}")
_HIDDEN = "[token]"


def without_tokens(text: str) -> str:
    """Return the text with tokens replaced."""
    return _TOKEN.sub(_HIDDEN, text) if "kmcp_" in text or "earer " in text else text


class LogFormatter(logging.Formatter):
    """Base of both formats; `hide` masks secret values in a text, or in the texts of a dict."""

    hide: Callable[[Any], Any] = staticmethod(lambda value: value)


class TextFormatter(LogFormatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with its traceback below."""
        return str(self.hide(without_tokens(super().format(record))))


class JsonFormatter(LogFormatter):
    """An object a line: time (RFC 3339, UTC), level, logger, message; where they are known the
    ids of `request` and `session`, and the `principal`; and `exception` as text.

    Values are masked before JSON writes them in other letters.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        origin = HERE.get()
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request": origin.request,
            "session": str(getattr(record, "session", "")) or origin.session,
            "principal": origin.principal,
            "exception": self._exception(record),
        }
        told = {name: without_tokens(text) for name, text in fields.items() if text}
        return json.dumps(self.hide(told))

    def _exception(self, record: logging.LogRecord) -> str:
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return "\n".join(filter(None, (record.exc_text, stack)))


def formatter(log_format: str) -> LogFormatter:
    """Return the formatter for a value of `--log-format`."""
    if log_format == "json":
        return JsonFormatter()
    return TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # of which Python 3.10 takes no parameter

LINES = 30
"""Lines of one kind in a window, so that clients and kernels cannot fill the disk."""
WINDOW_S = 60.0
MOST_KINDS = 500
"""Kinds that are distinguished in a window."""
_BARRIERS = "kernel_mcp.barriers"
_DIGITS = str.maketrans("", "", "0123456789")


@dataclass
class _Kind:
    """Counters of the lines of one kind since `since`: `more` were not written."""

    name: str
    since: float
    written: int = 0
    more: int = 0


class BoundedHandler(_StreamHandler):
    """Writes at most `LINES` lines of one kind in a window, then the number of further ones.

    Lines are of one kind if they come from the same source line or, for caught failures, from the
    same work. Debug lines are not limited.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._now = now
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a line unless there are too many of its kind."""
        self.acquire()
        try:
            written = record.levelno <= logging.DEBUG or self._counted(record)
            return written and bool(super().handle(record))
        finally:
            self.release()

    def close(self) -> None:
        """Write how many lines were left out, then close."""
        self._sum_up(list(self._kinds.values()))
        super().close()

    def _counted(self, record: logging.LogRecord) -> bool:
        now = self._now()
        over = [each for each in self._kinds.values() if now - each.since >= WINDOW_S]
        if over:
            self._kinds = {key: each for key, each in self._kinds.items() if each not in over}
            self._sum_up(over)
        key = record.pathname, record.lineno, _doing(record)
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            key = "", 0, ""
        kind = self._kinds.setdefault(key, _Kind(record.name, now))
        kind.written += 1
        kind.more += kind.written > LINES
        return kind.written <= LINES

    def _sum_up(self, kinds: Iterable[_Kind]) -> None:
        for each in kinds:
            if each.more:
                text = f"{each.more} more lines of a kind of which {LINES} were written in a minute"
                told = logging.LogRecord(each.name, logging.WARNING, "", 0, text, None, None)
                super().handle(told)


def _doing(record: logging.LogRecord) -> str:
    """Return the work in which a caught failure occurred; empty for other lines."""
    if record.name != _BARRIERS or not isinstance(record.args, tuple) or not record.args:
        return ""
    return str(record.args[0]).translate(_DIGITS)


def log_to_stderr(level: str, log_format: str) -> None:
    """Send the log of all libraries to stderr."""
    handler = BoundedHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
