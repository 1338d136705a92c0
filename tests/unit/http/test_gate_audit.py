"""Audit records of the gate: a line for each refusal, and a flood of them in a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_mcp.http.gate_audit import LINES, AuditObserver
from kernel_mcp.sessions.events import Events
from kernel_mcp.telemetry import Meters


class Counted(Meters):
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.bytes = (0, 0)
        self.lines: list[dict[str, Any]] = []

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        self.lines.append({"event": event, **facts})

    def refusal(self, reason: str) -> None:
        self.reasons.append(reason)

    def moved(self, received: int, sent: int) -> None:
        self.bytes = (received, sent)


def watched() -> tuple[AuditObserver, list[dict[str, Any]], Counted]:
    meters = Counted()
    return AuditObserver(Events(meters=meters)), meters.lines, meters


def test_a_refusal_is_a_line_with_reason_peer_and_principal() -> None:
    watch, lines, meters = watched()
    watch.refused("unauthenticated", "192.0.2.7", "")
    watch.refused("rate", "192.0.2.7", "ada")
    assert lines == [
        {
            "event": "refused",
            "reason": "unauthenticated",
            "peer": "192.0.2.7",
            "who": "",
            "count": 1,
        },
        {"event": "refused", "reason": "rate", "peer": "192.0.2.7", "who": "ada", "count": 1},
    ]
    assert meters.reasons == ["unauthenticated", "rate"]


def test_a_flood_is_a_few_lines_and_all_is_counted() -> None:
    watch, lines, meters = watched()
    for number in range(LINES + 5000):
        watch.refused("unauthenticated", f"192.0.2.{number % 200}", "")
    watch.refused("rate", "192.0.2.1", "ada")
    assert len(lines) == LINES
    watch.sum_up()
    assert [(each["reason"], each["count"]) for each in lines[LINES:]] == [
        ("unauthenticated", 5000),
        ("rate", 1),
    ]
    assert len(meters.reasons) == LINES + 5001


def test_after_a_flood_each_has_its_line_again() -> None:
    watch, lines, _ = watched()
    for _number in range(LINES + 1):
        watch.refused("host", "192.0.2.1", "")
    watch.sum_up()
    lines.clear()
    watch.refused("host", "192.0.2.1", "")
    assert [each["peer"] for each in lines] == ["192.0.2.1"]


def test_bytes_are_counted() -> None:
    watch, _, meters = watched()
    watch.moved(3, 4)
    assert meters.bytes == (3, 4)


def test_a_file_of_tokens_that_was_read_again_is_a_line() -> None:
    watch, lines, _ = watched()
    watch.tokens("tokens.toml was read: 2 rows")
    assert lines == [{"event": "tokens", "text": "tokens.toml was read: 2 rows"}]
