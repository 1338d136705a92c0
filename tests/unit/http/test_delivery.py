"""Which answers count as received."""

from __future__ import annotations

import asyncio
from typing import cast

from kernel_mcp.http.connections import ClientConnection
from kernel_mcp.http.delivery import Delivery, SseDelivery
from kernel_mcp.sessions.notifications import DeliveryTracker


def connection() -> ClientConnection:
    return ClientConnection(cast("asyncio.Transport", None))


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
    ended, broken = connection(), connection()
    ended.closed_cleanly()
    broken.reset()
    for line in (ended, broken, None):
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
    line.reset()
    line.reset()
    assert first.events == ["delivered"]
    assert second.events == ["delivered", "revoked"]


def test_an_end_in_order_takes_nothing_back() -> None:
    heard, line = Heard(), connection()
    delivery = Delivery(line)
    delivery.expect(1).then(heard.delivered, heard.revoked)
    delivery.sent()
    line.closed_cleanly()
    delivery.over()
    assert heard.events == ["delivered"]


def test_in_an_mcp_session_a_client_can_say_later_that_it_had_cancelled() -> None:
    deliveries, heard = DeliveryTracker(), Heard()
    delivery = Delivery(connection(), deliveries)
    delivery.expect("a").then(heard.delivered, heard.revoked)
    delivery.sent()
    deliveries.given_up("a")
    assert heard.events == ["delivered", "revoked"]


def test_answers_on_another_connection_are_the_outboxes() -> None:
    deliveries, heard = DeliveryTracker(), Heard()
    SseDelivery(deliveries).expect(3).then(heard.delivered)
    assert heard.events == []
    deliveries.delivered(3)
    assert heard.events == ["delivered"]
