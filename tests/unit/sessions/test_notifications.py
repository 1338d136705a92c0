"""Notices of losses: what they say, and when they count as delivered."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
from mcp_types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCResponse

from kernel_mcp.sessions.notifications import (
    MOST_NAMES,
    MOST_PENDING,
    MOST_RECENT,
    DeliveryTracker,
    Loss,
    NotificationQueue,
    RequestId,
    ResponseContext,
)


def test_a_notice_is_pending_until_it_was_told() -> None:
    notifications = NotificationQueue()
    first, second = notifications.add("one"), notifications.add("two")
    notifications.mark_delivered([first])
    assert notifications.pending == (second,)


def test_what_nobody_has_read_is_pending_again_in_its_place() -> None:
    notifications = NotificationQueue()
    first, second = notifications.add("one"), notifications.add("two")
    notifications.mark_delivered([first])
    notifications.mark_undelivered([first])
    assert notifications.pending == (first, second)


def test_what_a_later_notice_has_replaced_is_not_told_beside_it() -> None:
    notifications = NotificationQueue()
    first = notifications.add("cell 1 has ended")
    notifications.withdraw(first)
    both = notifications.add("cells 1 and 2 have ended")
    notifications.mark_undelivered([first])
    assert notifications.pending == (both,)


def test_a_loss_that_was_told_can_be_told_once_more() -> None:
    notifications = NotificationQueue()
    notifications.mark_delivered([notifications.add("a remark")])
    assert notifications.last_loss is None
    loss = notifications.add("gone", Loss("death", ("x",)))
    notifications.mark_delivered([loss])
    assert notifications.last_loss is loss
    notifications.mark_delivered([loss])
    assert notifications.last_loss is None


def test_cells_run_after_what_was_lost_while_they_waited_and_before() -> None:
    notifications = NotificationQueue()
    first = notifications.add("one", Loss("death"))
    assert notifications.take_losses(notifications.number) == [first]
    assert notifications.take_losses(notifications.number) == []
    waiting = notifications.number
    second = notifications.add("two", Loss("death"))
    assert notifications.take_losses(waiting) == [second]
    assert notifications.take_losses(waiting) == [second]
    assert notifications.take_losses(notifications.number) == []


def test_what_takes_the_place_of_variables_brings_what_there_is_to_tell_of_it() -> None:
    notifications, other = NotificationQueue(), NotificationQueue()
    notifications.add("a remark")
    notifications.add("gone", Loss("death", ("x",)))
    other.add("lost", Loss("hibernation", ("y",)))
    notifications.take_over(other, "branch b")
    assert [each.text for each in notifications.pending] == ["a remark", "Of branch b: lost"]
    assert [each.loss and each.loss.names for each in notifications.pending] == [None, ("y",)]
    assert not other.pending
    (placed,) = notifications.take_losses(notifications.number)
    assert placed.loss is not None
    assert placed.loss.names == ("y",)


def test_what_its_own_cell_has_told_is_repeated_by_those_that_waited_only() -> None:
    notifications = NotificationQueue()
    waiting = notifications.number
    killed = notifications.add("cell 1 was killed", Loss("death"))
    notifications.mark_reported_by_cell(killed)
    assert notifications.take_losses(notifications.number) == []
    assert notifications.take_losses(waiting) == [killed]


def test_after_a_reset_no_cell_runs_after_a_loss() -> None:
    notifications = NotificationQueue()
    notifications.add("one", Loss("death"))
    notifications.accept_losses()
    assert notifications.take_losses(notifications.number) == []
    assert len(notifications.pending) == 1


def test_notices_that_nobody_fetches_are_counted() -> None:
    notifications = NotificationQueue()
    for number in range(MOST_PENDING + 3):
        notifications.add(str(number))
    told = notifications.pending
    assert told[0].text.startswith("3 earlier notices")
    notifications.mark_delivered(told)
    assert notifications.pending == ()


def test_names_of_a_loss_are_bounded_and_the_rest_is_counted() -> None:
    loss = Loss.of("death", (f"n{i}" for i in range(MOST_NAMES + 7)), more=5)
    assert (len(loss.names), loss.more) == (MOST_NAMES, 12)


def response(request: RequestId) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=request, result={})


@pytest.mark.parametrize("request_id", [7, "seven"])
def test_the_written_answer_of_that_id_confirms(request_id: RequestId) -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(request_id).then(lambda: told.append("yes"), lambda: told.append("no"))
    deliveries.written(response("other"))
    deliveries.written(JSONRPCNotification(jsonrpc="2.0", method="notifications/progress"))
    assert told == []
    deliveries.written(response(request_id))
    deliveries.written(response(request_id))
    assert told == ["yes"]


def test_what_an_answer_told_of_is_kept_no_longer_than_until_it_is_delivered() -> None:
    deliveries, told = DeliveryTracker(), {"of a session"}
    whole = weakref.ref(told)
    deliveries.expect(1).then(told.clear, lambda: None)
    deliveries.expect(2).then(told.clear)
    del told
    deliveries.written(response(1))
    assert whole() == set()
    deliveries.written(response(2))
    assert whole() is None


def test_an_id_that_is_used_again_takes_back_nothing_older() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(1).then(lambda: None, lambda: told.append("the first"))
    deliveries.written(response(1))
    deliveries.expect(1).then(lambda: None)
    deliveries.written(response(1))
    deliveries.given_up(1)
    assert told == []


def test_the_cancellation_of_an_answered_request_makes_only_losses_pending_again() -> None:
    deliveries, notifications = DeliveryTracker(), NotificationQueue()
    notifications.add("Continued from 5 min ago")
    loss = notifications.add("x is lost", Loss("died", ("x",)))
    told = list[str]()
    receipt = deliveries.expect(1)
    ResponseContext(receipt).attach(notifications, notifications.pending)
    receipt.then(lambda: None, lambda: told.append("not delivered"))
    deliveries.written(response(1))
    assert len(notifications.pending) == 0
    deliveries.cancelled(1)
    deliveries.cancelled(1)
    pending = notifications.pending
    assert list(pending) == [loss]
    assert not told


def test_an_error_in_its_place_confirms_nothing() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(1).then(lambda: told.append("yes"))
    deliveries.written(JSONRPCError(jsonrpc="2.0", id=1, error=ErrorData(code=1, message="no")))
    deliveries.written(response(1))
    assert told == []


def test_a_request_that_was_given_up_is_not_delivered_any_more() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(1).then(lambda: told.append("yes"))
    deliveries.given_up(1)
    deliveries.written(response(1))
    assert told == []


def test_what_a_lost_answer_tells_before_or_after_that_is_told_to_nobody() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    receipt = deliveries.expect(1)
    receipt.then(lambda: told.append("yes"), lambda: told.append("before"))
    deliveries.lost(1)
    receipt.then(lambda: told.append("yes"), lambda: told.append("after"))
    receipt.then(lambda: told.append("yes"))
    deliveries.written(response(1))
    deliveries.lost(2)
    assert told == ["before", "after"]


def test_giving_up_after_the_answer_was_written_takes_it_back() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(1).then(lambda: told.append("yes"), lambda: told.append("no"))
    deliveries.written(response(1))
    deliveries.given_up(1)
    deliveries.given_up(1)
    assert told == ["yes", "no"]


def test_a_new_request_with_an_old_id_has_a_receipt_of_its_own() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(1).then(lambda: told.append("first"))
    deliveries.expect(1).then(lambda: told.append("second"))
    deliveries.written(response(1))
    assert told == ["second"]


def test_only_recent_answers_can_be_taken_back() -> None:
    deliveries, told = DeliveryTracker(), list[int]()
    for number in range(MOST_RECENT + 1):
        deliveries.expect(number).then(lambda: None, partial(told.append, number))
        deliveries.written(response(number))
    for number in range(MOST_RECENT + 1):
        deliveries.given_up(number)
    assert told == list(range(1, MOST_RECENT + 1))
