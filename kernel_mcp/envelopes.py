"""Parse a client's line as a JSON-RPC message, or return the errors that answer it.

Invalid UTF-8 and lone surrogates become U+FFFD. Other malformed lines are refused under their own
id where it is readable, so that no client waits in vain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    jsonrpc_message_adapter,
)

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.records import dataclass
from kernel_mcp.stdio_lines import END_BYTES

EXAMINED_BYTES = 1024 * 1024
"""Bytes up to which a bad line is parsed again to name its fault; of longer ones the ends are
searched."""
MOST_IDS = 100
"""Most members of a batch that are answered."""

_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]")
_ID = rb'"id"\s*:\s*(-?\d{1,40}(?:\.\d{1,40})?|"(?:[^"\\]|\\.){0,1000}")\s*'
_SIMPLE = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]{0,200}"\s*'
_FIRST = re.compile(rb"\s*\{\s*(?:" + _SIMPLE + rb",\s*){0,2}" + _ID + rb"[,}]")
_LAST = re.compile(rb",\s*" + _ID + rb"(?:,\s*" + _SIMPLE + rb"){0,2}\}\s*\Z")


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """A malformed line: its answers, each a line of JSON, and the reason for the log."""

    answers: tuple[str, ...]
    reason: str


def message_of(line: bytes | bytearray) -> JSONRPCMessage | MalformedLine:
    """Return the message in a line, with invalid text repaired; or the refusal of the line."""
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return _repaired(line)
    if isinstance(message, JSONRPCNotification) and b'"id"' in line:
        return _notification(message, line)
    return message


def oversized(head: bytes, tail: bytes, most_bytes: int) -> MalformedLine:
    """Return the refusal of a line of more than `most_bytes`, of which only the ends are kept."""
    reason = (
        f"Invalid request: a message may have {most_bytes:,} bytes and this one has more. Nothing "
        "was done. Send large data in several parts."
    )
    return _refusal([_salvaged(head, tail)], INVALID_REQUEST, reason)


def unprocessed(line: bytes | bytearray, reason: str) -> MalformedLine:
    """Return the refusal of a line that the server could not process because of `reason`."""
    text = f"The server could not take this message in: {reason}. Nothing was done; try again."
    number = _salvaged(bytes(line[:END_BYTES]), bytes(line[-END_BYTES:]))
    return _refusal([number], INTERNAL_ERROR, text)


def error_line(number: object, code: int, message: str) -> str:
    """Return a JSON-RPC error as JSON without a line end."""
    error = {"code": code, "message": message}
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": error})


def line_of(message: JSONRPCMessage) -> tuple[str, JSONRPCMessage]:
    """Return a message as JSON without a line end, and the message that was encoded.

    That is an error if encoding fails.
    """
    with Barrier("writing an answer") as barrier:
        try:
            return message.model_dump_json(by_alias=True, exclude_unset=True), message
        except ValueError:  # lone surrogates, which UTF-8 cannot encode
            content = message.model_dump(by_alias=True, exclude_unset=True)
            return _well_formed(json.dumps(content)), message
    reason = reason_of(barrier.failure) if barrier.failure is not None else ""
    said = ErrorData(code=INTERNAL_ERROR, message=f"The answer could not be written: {reason}.")
    error = JSONRPCError(jsonrpc="2.0", id=getattr(message, "id", None), error=said)
    return error.model_dump_json(by_alias=True, exclude_unset=True), error


def _well_formed(text: str) -> str:
    """Return JSON with every lone escaped surrogate replaced by U+FFFD."""
    if _SUSPECT.search(text) is None:
        return text
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], text)


def _repaired(line: bytes | bytearray) -> JSONRPCMessage | MalformedLine:
    text = line.decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        message = jsonrpc_message_adapter.validate_json(_well_formed(text), by_name=False)
    except ValueError:
        return _refused(line, text)
    if isinstance(message, JSONRPCNotification) and b'"id"' in line:
        return _notification(message, line)
    return message


def _notification(
    message: JSONRPCNotification, line: bytes | bytearray
) -> JSONRPCNotification | MalformedLine:
    """Return a notification; for a request with an invalid id, its refusal."""
    content = _parsed(line.decode("utf-8", "replace")) if len(line) <= EXAMINED_BYTES else None
    if not isinstance(content, dict) or "id" not in content:
        return message
    if content["id"] is None and message.method.startswith("notifications/"):
        return message
    return _refusal([content["id"]], INVALID_REQUEST, _fault(content))


def _refused(line: bytes | bytearray, text: str) -> MalformedLine:
    if len(line) > EXAMINED_BYTES:
        number = _salvaged(bytes(line[:END_BYTES]), bytes(line[-END_BYTES:]))
        return _refusal([number], PARSE_ERROR, "Parse error: the message is no valid JSON-RPC.")
    content = _parsed(text)
    if isinstance(content, dict):
        if "method" not in content and ("result" in content or "error" in content):
            return MalformedLine((), "a response that is none of JSON-RPC's")
        if "id" not in content and isinstance(content.get("method"), str):
            return MalformedLine((), "a notification that is none of JSON-RPC's")
        return _refusal([content.get("id")], INVALID_REQUEST, _fault(content))
    if isinstance(content, list):
        found = [each["id"] for each in content if isinstance(each, dict) and "id" in each]
        reason = "Invalid request: batches are not supported. Send each message as a line."
        return _refusal(found[:MOST_IDS] or [None], INVALID_REQUEST, reason)
    if content is not _UNPARSABLE:
        return _refusal([None], INVALID_REQUEST, "Invalid request: a message is a JSON object.")
    if not text.strip():
        return MalformedLine((), "an empty line")
    number = _salvaged(bytes(line[:END_BYTES]), bytes(line[-END_BYTES:]))
    reason = "Parse error: the message is no valid JSON, or is nested too deeply."
    return _refusal([number], PARSE_ERROR, reason)


_UNPARSABLE = object()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNPARSABLE


def _fault(content: dict[str, Any]) -> str:
    number = content.get("id")
    if content.get("jsonrpc") != "2.0":
        fault = '"jsonrpc" has to be "2.0"'
    elif isinstance(number, bool) or not isinstance(number, (str, int)):
        fault = '"id" has to be a string or a whole number'
    elif not isinstance(content.get("method"), str):
        fault = '"method" has to be a string'
    elif not isinstance(content.get("params"), (dict, type(None))):
        fault = '"params" has to be an object'
    else:
        fault = "it is nested too deeply"
    return f"Invalid request: {fault}."


def _refusal(numbers: list[Any], code: int, reason: str) -> MalformedLine:
    return MalformedLine(tuple(error_line(_usable(each), code, reason) for each in numbers), reason)


def _usable(number: object) -> str | int | float | None:
    """Return an id that an error can carry: a string or a number, else None."""
    if isinstance(number, bool) or not isinstance(number, (str, int, float)):
        return None
    if isinstance(number, str):
        return number.encode("utf-8", "replace").decode("utf-8")
    return number if number == number and abs(number) != float("inf") else None


def _salvaged(head: bytes, tail: bytes) -> object:
    """Return the request id at the beginning or the end of a line; None if there is none."""
    for found in _found(head, tail):
        number = _parsed(found[1].decode("utf-8", "replace"))
        if number is not _UNPARSABLE:
            return number
    return None


def _found(head: bytes, tail: bytes) -> Iterator[re.Match[bytes]]:
    for found in (_FIRST.match(head), _LAST.search(tail)):
        if found is not None:
            yield found
