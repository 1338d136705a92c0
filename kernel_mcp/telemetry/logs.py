"""Lines of the log: text for people, or one JSON object each. No line has a token."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from kernel_mcp.telemetry.origin import HERE

_TOKEN = re.compile(r"kmcp_[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}")
_HIDDEN = "[token]"


def without_tokens(text: str) -> str:
    """The text with tokens replaced."""
    return _TOKEN.sub(_HIDDEN, text) if "kmcp_" in text or "earer " in text else text


class Lines(logging.Formatter):
    """Writes lines; `hide` masks values in a text, or in the texts of a dict."""

    hide: Callable[[Any], Any] = staticmethod(lambda value: value)


class TextLines(Lines):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, with its traceback below."""
        return str(self.hide(without_tokens(super().format(record))))


class JsonLines(Lines):
    """An object a line: time (RFC 3339, UTC), level, logger, message; where they are known the
    ids of `request` and `session`, and the `principal`; and `exception` as text.

    Values are masked before JSON writes them in other letters.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
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


def formatter(log_format: str) -> Lines:
    """What writes the lines of `--log-format`."""
    if log_format == "json":
        return JsonLines()
    return TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")


def log_to_stderr(level: str, log_format: str) -> None:
    """Have the log of all libraries go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
