"""Answers of clients to questions, which may be anything."""

from __future__ import annotations

import base64

import pytest
from mcp.server.request_state import InvalidRequestState

from kernel_mcp.sessions.questions import Answer
from kernel_mcp.tools.asking import answer_of
from kernel_mcp.tools.elicitation import SealedState


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ({"action": "accept", "content": {"answer": "yes"}}, Answer("k", "accept", "yes")),
        ({"action": "accept", "content": {"answer": 5}}, Answer("k", "accept", "5")),
        ({"action": "accept"}, Answer("k", "accept")),
        ({"action": "accept", "content": ["answer"]}, Answer("k", "accept")),
        ({"action": "decline", "content": {"answer": "no"}}, Answer("k", "decline", "no")),
        ({"action": "cancel"}, Answer("k", "cancel")),
        ({"action": ["accept"]}, Answer("k", "cancel")),
        ({"action": "explode"}, Answer("k", "cancel")),
        (None, Answer("k", "cancel")),
        ("accept", Answer("k", "cancel")),
    ],
)
def test_a_response_is_an_answer_whatever_it_is(response: object, answer: Answer) -> None:
    assert answer_of("k", response) == answer


def test_a_state_is_sealed() -> None:
    codec, other = SealedState(lambda: b"k" * 32), SealedState(lambda: b"o" * 32)
    token = codec.seal(b"state")
    assert codec.unseal(token) == b"state"
    text, _, mac = token.rpartition(".")
    forged = base64.urlsafe_b64encode(b"other").decode()
    for wrong in ("", "x", f"{forged}.{mac}", f"{text}.", f"{text}.{mac[:-1]}0", "é.é"):
        with pytest.raises(InvalidRequestState):
            codec.unseal(wrong)
    with pytest.raises(InvalidRequestState):
        other.unseal(token)
