"""Every line of a client is a message or gets an error under its id."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from kernel_mcp.envelopes import MalformedLine, line_of, message_of, oversized, unprocessed

PING = {"jsonrpc": "2.0", "id": 7, "method": "ping"}


def request(line: bytes) -> JSONRPCRequest:
    message = message_of(line)
    assert isinstance(message, JSONRPCRequest), message
    return message


def refused(line: bytes) -> list[tuple[Any, int]]:
    """The ids and codes of the errors that a line gets."""
    message = message_of(line)
    assert isinstance(message, MalformedLine), message
    return errors(message)


def errors(refusal: MalformedLine) -> list[tuple[Any, int]]:
    answers = [json.loads(answer) for answer in refusal.answers]
    assert all(answer["jsonrpc"] == "2.0" and answer["error"]["message"] for answer in answers)
    return [(answer["id"], answer["error"]["code"]) for answer in answers]


def test_a_request_a_notification_and_a_response_are_what_they_are() -> None:
    assert request(json.dumps(PING).encode() + b"\r\n").id == 7
    line = b'{"jsonrpc":"2.0","method":"notifications/x","params":{"id":1}}'
    assert isinstance(message_of(line), JSONRPCNotification)
    line = b'{"jsonrpc":"2.0","method":"notifications/x","id":null}'
    assert isinstance(message_of(line), JSONRPCNotification)
    assert isinstance(message_of(b'{"jsonrpc":"2.0","id":1,"result":{}}'), JSONRPCResponse)
    assert request(b"\xef\xbb\xbf" + json.dumps(PING).encode()).id == 7


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (rb"a\ud800b", "a\ufffdb"),
        (rb"a\udc00", "a\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\uD83D\uDE00\uDE00", "\U0001f600\ufffd"),
        (rb"\\ud800\ud800", "\\ud800\ufffd"),
        (rb"\\\ud800", "\\\ufffd"),
        (b"caf\xe9 \xed\xa0\x80", "caf\ufffd \ufffd\ufffd\ufffd"),
    ],
)
def test_what_is_no_text_is_repaired_and_the_rest_is_as_sent(sent: bytes, arrives: str) -> None:
    line = b'{"jsonrpc":"2.0","id":7,"method":"m","params":{"c":"%s","n":"\\u00e9\\n\\\\"}}' % sent
    assert request(line).params == {"c": arrives, "n": "\u00e9\n\\"}


@given(st.text(st.characters(codec=None)))
def test_any_text_arrives_once_it_is_escaped(text: str) -> None:
    line = json.dumps({**PING, "params": {"text": text, "after": "kept"}}).encode()
    params = request(line).params
    assert params is not None
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert len(params["text"]) == len(whole)
    assert all(a == b or a == "\ufffd" for a, b in zip(params["text"], whole, strict=True))
    assert params["after"] == "kept"


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":7,"method":"ping"}',
        b'{"jsonrpc":"1.0","id":7,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":7}',
        b'{"jsonrpc":"2.0","id":7,"method":5}',
        b'{"jsonrpc":"2.0","id":7,"method":"ping","params":[1]}',
        b'{"jsonrpc":"2.0","id":7,"method":"ping","params":"x"}',
        b'{"jsonrpc":"2.0","id":7,"method":null,"result":1}',
        b'{"jsonrpc":"2.0","id":1,"id":7,"method":"ping","params":3}',
        b'{"jsonrpc":"2.0","method":"ping","id":7,"params":' + b'{"a":' * 300 + b"1" + b"}" * 301,
        b'[{"jsonrpc":"2.0","id":7,"method":"ping"},{"jsonrpc":"2.0","method":"notifications/x"}]',
    ],
)
def test_what_is_no_request_is_refused_under_its_id(line: bytes) -> None:
    assert refused(line) == [(7, INVALID_REQUEST)]


@pytest.mark.parametrize(
    ("number", "answered"),
    [
        (b"1.5", 1.5),
        (b"1.0", 1.0),
        (b"true", None),
        (b"null", None),
        (b"[1]", None),
        (b'{"a":1}', None),
        (b"NaN", None),
        (b"1e999", None),
    ],
)
def test_an_id_of_an_odd_kind_is_answered(number: bytes, answered: object) -> None:
    line = b'{"jsonrpc":"2.0","id":%s,"method":"tools/list"}' % number
    assert refused(line) == [(answered, INVALID_REQUEST)]


@pytest.mark.parametrize("number", ["x", "\u00e9", "7", 7, -1, 0, 2**63, 10**30])
def test_an_id_of_a_usual_kind_is_taken(number: str | int) -> None:
    assert request(json.dumps({**PING, "id": number}).encode()).id == number


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":7,"method":"m","params":{"c":"a\x00b"}',
        b'{"jsonrpc":"2.0","id":7,"method":"m","params":{"c":"unfinished',
        b'{"method":"m","jsonrpc":"2.0","id":7,"params":' + b'{"a":' * 100_000,
        b'{"params":' + b"[" * 100_000 + b"]" * 100_000 + b',"jsonrpc":"2.0","id":7,"method":"m"}',
        b'{"params":{,},"method":"m","id": 7 , "jsonrpc":"2.0"}\r\n',
        b'{"jsonrpc":"2.0","id":7,"method":"m","params":' + b"9" * 5000 + b"}",
    ],
    ids=["nul", "torn", "deep", "deep first", "comma", "long number"],
)
def test_what_is_no_json_is_refused_under_the_id_at_an_end(line: bytes) -> None:
    assert refused(line)[0][0] == 7


def test_an_id_inside_a_text_or_an_argument_is_not_taken_for_that_of_the_message() -> None:
    fake = b'{"params":{"code":"x = {\\"a\\":1,\\"id\\":9}","id":8,"k":[}},"method":"m"'
    assert refused(fake) == [(None, PARSE_ERROR)]


@pytest.mark.parametrize("line", [b"\x00", b"nonsense", b'"text"', b"5", b"null", b"[]", b"[1,2]"])
def test_what_has_no_id_is_answered_with_none(line: bytes) -> None:
    (found,) = refused(line)
    assert found[0] is None


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b" \r\n",
        b'{"jsonrpc":"2.0","id":1,"result":5}',
        b'{"jsonrpc":"2.0","method":"notifications/x","params":[1]}',
    ],
)
def test_what_asks_for_nothing_gets_nothing(line: bytes) -> None:
    assert refused(line) == []


def test_the_members_of_a_batch_are_answered_up_to_a_bound() -> None:
    batch = [{**PING, "id": number} for number in range(1000)]
    found = refused(json.dumps(batch).encode())
    assert found == [(number, INVALID_REQUEST) for number in range(100)]


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (b'{"jsonrpc":"2.0","id":"a\\"b","method":"m","params":{"x":"', b'yyy"}}'),
        (b'{"params":{"x":"', b'yyy"},"id":"a\\"b","method":"m","jsonrpc":"2.0"}'),
    ],
)
def test_a_line_that_is_too_long_is_refused_under_its_id(head: bytes, tail: bytes) -> None:
    refusal = oversized(head, tail, 1000)
    assert errors(refusal) == [('a"b', INVALID_REQUEST)]
    assert "1,000 bytes" in refusal.reason


def test_a_line_that_could_not_be_taken_in_is_answered() -> None:
    assert errors(unprocessed(json.dumps(PING).encode(), "no memory")) == [(7, INTERNAL_ERROR)]
    assert errors(unprocessed(b"x" * 100_000, "no memory")) == [(None, INTERNAL_ERROR)]


def test_an_answer_with_half_a_surrogate_is_written() -> None:
    message = JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": "a\ud800b\U0001f600"})
    line, said = line_of(message)
    assert said is message
    written = json.loads(line.encode("utf-8"))
    assert written["result"] == {"text": "a\ufffdb\U0001f600"}


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    message = JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": object()})
    line, said = line_of(message)
    written = json.loads(line)
    assert (written["id"], written["error"]["code"]) == (7, INTERNAL_ERROR)
    assert isinstance(said, JSONRPCError), "so that nothing in the answer counts as delivered"
