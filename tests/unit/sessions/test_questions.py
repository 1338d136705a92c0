"""Questions of the code of a cell, by the messages of its kernel alone."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kernel_mcp.kernels.run import InputRequest
from kernel_mcp.output.items import Item, TextItem
from kernel_mcp.sessions.questions import (
    ANSWER_CHARS,
    MOST_QUESTIONS,
    NOBODY,
    Answer,
    Mode,
    Questions,
)

pytestmark = [pytest.mark.anyio]


class AskingCell:
    """Notes what its questions do to it."""

    number = 3

    def __init__(self) -> None:
        self.clock: list[bool] = []
        self.text = ""

    def rest(self, *, resting: bool) -> None:
        self.clock.append(resting)

    def printed(self) -> list[Item]:
        text, self.text = self.text, ""
        return [TextItem("stdout", text)] if text else []

    def note_change(self) -> None:
        pass


class Asked:
    """The questions of a cell, with what its kernel and the audit trail get of them."""

    def __init__(self, *modes: Mode, seconds: float = 60.0) -> None:
        self.cell = AskingCell()
        self.sent: list[tuple[str, str, str]] = []
        self.noted: list[dict[str, Any]] = []
        self.questions = Questions(
            self.cell,
            seconds,
            frozenset(modes or ("form",)),
            lambda **facts: self.noted.append(facts),
        )
        self.questions.reply = lambda *answer: self.sent.append(answer)

    def take(self, key: str = "k", prompt: str = "?", **more: bool) -> None:
        self.questions.take(InputRequest(key, prompt, **more))

    @property
    def key(self) -> str:
        assert self.questions.open is not None
        return self.questions.open.key


async def test_an_answer_goes_to_the_kernel_and_its_length_to_the_audit_trail() -> None:
    asked = Asked()
    asked.take(prompt="Name? ")
    asked.questions.answer(Answer("3-2", "accept", "wrong key"))
    assert asked.sent == []
    asked.questions.answer(Answer(asked.key, "accept", "Ada"))
    assert asked.sent == [("k", "accept", "Ada")]
    assert asked.cell.clock == [True, False]
    [facts] = asked.noted
    assert facts == {
        "cell": 3, "secret": False, "prompt_chars": 5, "answer": "accept", "answer_chars": 3
    }  # fmt: skip
    assert asked.questions.words == ["The code asked the person: 1 answered"]


async def test_keys_of_questions_differ() -> None:
    asked, keys = Asked(), []
    for _ in range(3):
        asked.take()
        keys.append(asked.key)
        asked.questions.answer(Answer(asked.key, "decline"))
    assert len(set(keys)) == 3
    assert {action for _, action, _ in asked.sent} == {"decline"}


async def test_after_a_cancel_nobody_is_asked_again() -> None:
    asked = Asked()
    asked.take()
    asked.questions.answer(Answer(asked.key, "cancel"))
    asked.take("again")
    assert asked.questions.open is None
    assert asked.sent == [("k", NOBODY, ""), ("again", NOBODY, "")]


async def test_a_secret_is_not_asked_for_by_a_form() -> None:
    asked = Asked("form")
    asked.take(secret=True)
    assert asked.questions.open is None
    assert asked.sent == [("k", NOBODY, "")]


async def test_a_question_closes_when_its_code_gives_up_or_asks_another() -> None:
    asked = Asked()
    asked.take("one")
    asked.questions.take(InputRequest("other", withdrawn=True))
    assert asked.questions.open is not None
    asked.questions.take(InputRequest("one", withdrawn=True))
    assert asked.questions.open is None
    asked.take("two")
    first = asked.key
    asked.take("three")
    assert asked.key != first
    asked.questions.withdraw()
    assert asked.sent == []
    assert [facts["answer"] for facts in asked.noted] == ["withdraw"] * 3


async def test_a_person_has_so_long() -> None:
    asked = Asked(seconds=0.01)
    asked.take()
    scope = anyio.CancelScope()
    with anyio.fail_after(10), asked.questions.while_open(scope), scope:
        await anyio.sleep_forever()
    assert asked.sent == [("k", "late", "0.01 s")]


async def test_who_waits_is_woken_by_a_question() -> None:
    asked = Asked()
    for _ in range(2):  # before it is open, and while it is
        scope = anyio.CancelScope()
        with anyio.fail_after(10), asked.questions.ending(scope), scope:
            if asked.questions.open is None:
                asked.take()
            await anyio.sleep_forever()


async def test_the_number_of_questions_and_lengths_are_bounded() -> None:
    asked = Asked()
    asked.cell.text = "\n".join(f"line {n}" for n in range(1000))
    asked.take(prompt="p" * 10_000)
    assert asked.questions.open is not None
    assert len(asked.questions.open.words) < 900
    assert asked.questions.open.printed == "line 997 / line 998 / line 999"
    asked.questions.answer(Answer(asked.key, "accept", "a" * 10**6))
    assert len(asked.sent[0][2]) == ANSWER_CHARS
    for _ in range(MOST_QUESTIONS - 1):
        asked.take()
        asked.questions.answer(Answer(asked.key, "accept"))
    asked.take("last")
    assert asked.sent[-1] == ("last", NOBODY, "")


@pytest.mark.parametrize(
    "content",
    [{}, {"key": 1}, {"key": "k", "prompt": 5}, {"key": "k" * 300, "prompt": ""}, {"prompt": "?"}],
)
def test_malformed_requests_are_dropped(content: dict[str, Any]) -> None:
    assert InputRequest.of(content) is None


CHOICES = ("once", "always in this session", "no")


async def test_the_server_asks_for_a_choice_beside_the_questions_of_the_code() -> None:
    asked, ends = Asked(), list[tuple[str, str]]()
    asked.take("one", "Name? ")
    wish = asked.questions.decide("call crm.x?", CHOICES, lambda *end: ends.append(end))
    later = asked.questions.decide("call crm.y?", CHOICES, lambda *end: ends.append(end))
    assert wish is not None
    assert later is not None
    asked.questions.answer(Answer(asked.key, "accept", "Ada"))
    question = asked.questions.open
    assert question is not None
    assert question.choices == CHOICES
    assert question.words == "kernel-mcp asks: may the code in notebook cell 3 call crm.x?"
    asked.take("two")  # a thread of the code asks meanwhile
    asked.questions.take(InputRequest("two", withdrawn=True))
    assert asked.questions.open is question
    asked.questions.answer(Answer(asked.key, "accept", "once"))
    assert ends == [("accept", "once")]
    asked.questions.drop(later)
    assert asked.questions.open is None
    assert asked.sent == [("one", "accept", "Ada")]
    assert asked.cell.clock == [True, False] * 3
    assert asked.questions.words == ["The code asked the person: 1 answered"]


async def test_a_choice_ends_with_its_cell_and_with_a_client_that_asks_nobody() -> None:
    asked, ends = Asked(), list[tuple[str, str]]()
    for _ in range(2):
        asked.questions.decide("call crm.x?", CHOICES, lambda *end: ends.append(end))
    asked.questions.answer(Answer(asked.key, "cancel"))
    assert ends == [("cancel", ""), ("cancel", "")]
    assert asked.questions.decide("call crm.x?", CHOICES, lambda *_: None) is None
    asked, ends = Asked(), []
    for _ in range(2):
        asked.questions.decide("call crm.x?", CHOICES, lambda *end: ends.append(end))
    asked.questions.end()
    assert ends == [("withdraw", ""), ("withdraw", "")]
    assert asked.questions.open is None
    assert asked.questions.decide("call crm.x?", CHOICES, lambda *_: None) is None
