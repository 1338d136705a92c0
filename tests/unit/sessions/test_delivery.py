"""An answer counts as delivered when its line is written and nobody had given its request up."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
from mcp_types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCResponse

from kernel_mcp.sessions.losses import MOST_RECENT, Outbox, RequestId


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
