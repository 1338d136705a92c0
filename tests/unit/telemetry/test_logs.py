"""Lines of the log: one JSON object each, whose request they are part of, and no token."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

from kernel_mcp.output.text import Masks
from kernel_mcp.telemetry.logs import (
    LINES,
    MOST_KINDS,
    WINDOW_S,
    BoundedHandler,
    JsonFormatter,
    TextFormatter,
    formatter,
)
from kernel_mcp.telemetry.origin import NOWHERE, Origin, in_session, of_call
from kernel_mcp.telemetry.spans import OriginContext

TOKEN = "kmcp_" + "Ab3-_" * 8


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("kernel_mcp.http", logging.WARNING, "f.py", 1, message, args, None)
    made.created = 1893585600.005  # 2030-01-02 12:00
    vars(made).update(more)
    return made


def line(made: logging.LogRecord, lines: JsonFormatter | None = None) -> dict[str, Any]:
    text = (lines or JsonFormatter()).format(made)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_is_an_object_with_what_is_known() -> None:
    assert line(record("%s sessions\nare there", 3)) == {
        "time": "2030-01-02T12:00:00.005Z",
        "level": "warning",
        "logger": "kernel_mcp.http",
        "message": "3 sessions\nare there",
    }


def test_a_line_names_request_session_and_principal() -> None:
    with OriginContext(Origin("earlier")), OriginContext(of_call(7, "ada", "h1")):
        in_session("s-1")
        found = line(record("hello"))
        assert (found["request"], found["session"], found["principal"]) == ("h1/7", "s-1", "ada")
    assert "request" not in line(record("hello"))


def test_a_record_knows_its_session_better() -> None:
    with OriginContext(Origin("1", "s-1", "ada")):
        assert line(record("hello", session="s-2"))["session"] == "s-2"
        assert line(record("hello", session=""))["session"] == "s-1"


def test_an_exception_is_text_in_one_field() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        made = record("it failed")
        made.exc_info = sys.exc_info()
    found = line(made)
    assert found["message"] == "it failed"
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: no\nway")


def test_values_are_masked_before_json_writes_them_in_other_letters() -> None:
    value = 'a"value\\of\nlength'
    lines = JsonFormatter()
    lines.hide = Masks([("SECRET", value)]).anywhere
    found = line(record("it is %s", value), lines)
    assert "value" not in json.dumps(found)


@pytest.mark.parametrize(
    "text",
    [TOKEN, f"Authorization: Bearer {TOKEN}", "bearer eyJhbGciOi.eyJpc3MiOi.c2lnbmF0dXJl"],
    ids=["own", "header", "jwt"],
)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_line_has_a_token(text: str, log_format: str) -> None:
    written = formatter(log_format).format(record("got %s from %r", text, {"x": text}))
    assert TOKEN not in written
    assert "eyJhbG" not in written
    assert "[token]" in written


def test_text_is_for_people() -> None:
    written = TextFormatter("%(levelname)s %(name)s: %(message)s").format(record("hello"))
    assert written == "WARNING kernel_mcp.http: hello"


def test_outside_of_requests_there_is_no_origin() -> None:
    assert Origin() == NOWHERE


class Bounded:
    """A handler on a clock of its own, and what it has written."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = BoundedHandler(self.stream, lambda: self.now)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def log(self, count: int, text: str, *args: object, place: int = 1, **more: Any) -> None:
        for _ in range(count):
            self.handler.handle(record(text, *args, lineno=place, **more))


def test_a_flood_of_one_kind_is_a_few_lines_and_a_count() -> None:
    log = Bounded()
    log.log(1000, "Invalid HTTP request received.")
    assert len(log.lines) == LINES
    log.log(1, "another", place=2)
    assert log.lines[LINES:] == ["another"]
    log.now += WINDOW_S
    log.log(2, "Invalid HTTP request received.")
    told = f"970 more lines of a kind of which {LINES} were written in a minute"
    assert log.lines[LINES + 1 :] == [told, *["Invalid HTTP request received."] * 2]


def test_what_was_not_written_is_told_at_the_end() -> None:
    log = Bounded()
    log.log(LINES + 3, "x")
    log.handler.close()
    assert log.lines[LINES:] == ["3 more lines of a kind of which 30 were written in a minute"]


def test_texts_that_clients_choose_are_of_one_kind() -> None:
    log = Bounded()
    for text in [f"Invalid Host header: {each}.example" for each in range(200)]:
        log.log(1, text)
    assert len(log.lines) == LINES
    for place in range(2, 3 * MOST_KINDS):
        log.log(1, "from everywhere", place=place)
    assert len(log.lines) <= LINES + MOST_KINDS + LINES


def test_failures_are_told_apart_by_what_the_server_did() -> None:
    log = Bounded()
    for each in range(100):
        log.log(1, "the server failed while %s", f"closing cell {each}", name="kernel_mcp.barriers")
    log.log(1, "the server failed while %s", "saving", name="kernel_mcp.barriers")
    assert len(log.lines) == LINES + 1


def test_lines_for_debugging_are_all_written() -> None:
    log = Bounded()
    log.log(3 * LINES, "a step", levelno=logging.DEBUG)
    assert len(log.lines) == 3 * LINES
