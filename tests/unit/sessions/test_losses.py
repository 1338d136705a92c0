"""Notices of losses: what they say, and when they count as delivered."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
from mcp_types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCResponse

from kernel_mcp.sessions.losses import (
    MOST_NAMES,
    MOST_PENDING,
    MOST_RECENT,
    Ledger,
    Loss,
    Outbox,
    RequestId,
)


def test_a_notice_is_pending_until_it_was_told() -> None:
    ledger = Ledger()
    first, second = ledger.add("one"), ledger.add("two")
    ledger.told([first])
    assert ledger.pending == (second,)


def test_what_nobody_has_read_is_pending_again_in_its_place() -> None:
    ledger = Ledger()
    first, second = ledger.add("one"), ledger.add("two")
    ledger.told([first])
    ledger.untold([first])
    assert ledger.pending == (first, second)


def test_a_loss_that_was_told_can_be_told_once_more() -> None:
    ledger = Ledger()
    ledger.told([ledger.add("a remark")])
    assert ledger.again is None
    loss = ledger.add("gone", Loss("death", ("x",)))
    ledger.told([loss])
    assert ledger.again is loss
    ledger.told([loss])
    assert ledger.again is None


def test_cells_run_after_what_was_lost_while_they_waited_and_before() -> None:
    ledger = Ledger()
    first = ledger.add("one", Loss("death"))
    assert ledger.place(ledger.number) == [first]
    assert ledger.place(ledger.number) == []
    waiting = ledger.number
    second = ledger.add("two", Loss("death"))
    assert ledger.place(waiting) == [second]
    assert ledger.place(waiting) == [second]
    assert ledger.place(ledger.number) == []


def test_what_takes_the_place_of_variables_brings_what_there_is_to_tell_of_it() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.add("a remark")
    ledger.add("gone", Loss("death", ("x",)))
    other.add("lost", Loss("hibernation", ("y",)))
    ledger.replaced(other, "branch b")
    assert [each.text for each in ledger.pending] == ["a remark", "Of branch b: lost"]
    assert [each.loss and each.loss.names for each in ledger.pending] == [None, ("y",)]
    assert not other.pending
    (placed,) = ledger.place(ledger.number)
    assert placed.loss is not None
    assert placed.loss.names == ("y",)


def test_what_its_own_cell_has_told_is_repeated_by_those_that_waited_only() -> None:
    ledger = Ledger()
    waiting = ledger.number
    killed = ledger.add("cell 1 was killed", Loss("death"))
    ledger.told_by_its_cell(killed)
    assert ledger.place(ledger.number) == []
    assert ledger.place(waiting) == [killed]


def test_after_a_reset_no_cell_runs_after_a_loss() -> None:
    ledger = Ledger()
    ledger.add("one", Loss("death"))
    ledger.forgive()
    assert ledger.place(ledger.number) == []
    assert len(ledger.pending) == 1


def test_notices_that_nobody_fetches_are_counted() -> None:
    ledger = Ledger()
    for number in range(MOST_PENDING + 3):
        ledger.add(str(number))
    told = ledger.pending
    assert told[0].text.startswith("3 earlier notices")
    ledger.told(told)
    assert ledger.pending == ()


def test_names_of_a_loss_are_bounded_and_the_rest_is_counted() -> None:
    loss = Loss.of("death", (f"n{i}" for i in range(MOST_NAMES + 7)), more=5)
    assert (len(loss.names), loss.more) == (MOST_NAMES, 12)


def response(request: RequestId) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=request, result={})


@pytest.mark.parametrize("request_id", [7, "seven"])
def test_the_written_answer_of_that_id_confirms(request_id: RequestId) -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(request_id).then(lambda: told.append("yes"), lambda: told.append("no"))
    outbox.written(response("other"))
    outbox.written(JSONRPCNotification(jsonrpc="2.0", method="notifications/progress"))
    assert told == []
    outbox.written(response(request_id))
    outbox.written(response(request_id))
    assert told == ["yes"]


def test_what_an_answer_told_of_is_kept_no_longer_than_until_it_is_delivered() -> None:
    outbox, told = Outbox(), {"of a session"}
    whole = weakref.ref(told)
    outbox.expect(1).then(told.clear, lambda: None)
    outbox.expect(2).then(told.clear)
    del told
    outbox.written(response(1))
    assert whole() == set()
    outbox.written(response(2))
    assert whole() is None


def test_an_id_that_is_used_again_takes_back_nothing_older() -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(1).then(lambda: None, lambda: told.append("the first"))
    outbox.written(response(1))
    outbox.expect(1).then(lambda: None)
    outbox.written(response(1))
    outbox.given_up(1)
    assert told == []


def test_an_error_in_its_place_confirms_nothing() -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(1).then(lambda: told.append("yes"))
    outbox.written(JSONRPCError(jsonrpc="2.0", id=1, error=ErrorData(code=1, message="no")))
    outbox.written(response(1))
    assert told == []


def test_a_request_that_was_given_up_is_not_delivered_any_more() -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(1).then(lambda: told.append("yes"))
    outbox.given_up(1)
    outbox.written(response(1))
    assert told == []


def test_what_a_lost_answer_tells_before_or_after_that_is_told_to_nobody() -> None:
    outbox, told = Outbox(), list[str]()
    receipt = outbox.expect(1)
    receipt.then(lambda: told.append("yes"), lambda: told.append("before"))
    outbox.lost(1)
    receipt.then(lambda: told.append("yes"), lambda: told.append("after"))
    receipt.then(lambda: told.append("yes"))
    outbox.written(response(1))
    outbox.lost(2)
    assert told == ["before", "after"]


def test_giving_up_after_the_answer_was_written_takes_it_back() -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(1).then(lambda: told.append("yes"), lambda: told.append("no"))
    outbox.written(response(1))
    outbox.given_up(1)
    outbox.given_up(1)
    assert told == ["yes", "no"]


def test_a_new_request_with_an_old_id_has_a_receipt_of_its_own() -> None:
    outbox, told = Outbox(), list[str]()
    outbox.expect(1).then(lambda: told.append("first"))
    outbox.expect(1).then(lambda: told.append("second"))
    outbox.written(response(1))
    assert told == ["second"]


def test_only_recent_answers_can_be_taken_back() -> None:
    outbox, told = Outbox(), list[int]()
    for number in range(MOST_RECENT + 1):
        outbox.expect(number).then(lambda: None, partial(told.append, number))
        outbox.written(response(number))
    for number in range(MOST_RECENT + 1):
        outbox.given_up(number)
    assert told == list(range(1, MOST_RECENT + 1))
