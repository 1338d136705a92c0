"""Which answers count as received."""

from __future__ import annotations

from typing import cast

from kernel_mcp.http.connections import Connection
from kernel_mcp.http.delivery import Delivery, Later
from kernel_mcp.sessions.losses import Outbox


class Line:
    """A connection that is there until it is not."""

    def __init__(self, *, closing: bool = False) -> None:
        self.closing = closing

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


def connection(*, closing: bool = False) -> Connection:
    return Connection(cast("object", Line(closing=closing)))  # type: ignore[arg-type]


class Heard:
    def __init__(self) -> None:
        self.events: list[str] = []

    def delivered(self) -> None:
        self.events.append("delivered")

    def revoked(self) -> None:
        self.events.append("revoked")


def test_an_answer_sent_to_a_living_client_was_delivered_once() -> None:
    heard, delivery = Heard(), Delivery(connection())
    delivery.expect(1).then(heard.delivered, heard.revoked)
    assert heard.events == []
    delivery.sent()
    delivery.sent()
    assert heard.events == ["delivered"]


def test_an_answer_sent_to_nobody_was_not() -> None:
    for line in (connection(closing=True), None):
        heard, delivery = Heard(), Delivery(line)
        delivery.expect(1).then(heard.delivered, heard.revoked)
        delivery.sent()
        assert heard.events == []


def test_a_reset_takes_back_what_was_sent_last() -> None:
    line = connection()
    first, second = Heard(), Heard()
    for heard in (first, second):
        delivery = Delivery(line)
        delivery.expect(1).then(heard.delivered, heard.revoked)
        delivery.sent()
    assert line.unread is not None
    line.unread()
    assert first.events == ["delivered"]
    assert second.events == ["delivered", "revoked"]


def test_in_an_mcp_session_a_client_can_say_later_that_it_had_cancelled() -> None:
    outbox, heard = Outbox(), Heard()
    delivery = Delivery(connection(), outbox)
    delivery.expect("a").then(heard.delivered, heard.revoked)
    delivery.sent()
    outbox.given_up("a")
    assert heard.events == ["delivered", "revoked"]


def test_answers_on_another_connection_are_the_outboxes() -> None:
    outbox, heard = Outbox(), Heard()
    Later(outbox).expect(3).then(heard.delivered)
    assert heard.events == []
    outbox.delivered(3)
    assert heard.events == ["delivered"]
