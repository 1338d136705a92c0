"""Whatever befalls twenty sessions, none has a wrong variable, and none loses one in silence."""

from __future__ import annotations

import os

import mcp_types as types
import pytest

from tests.chaos.driver import chaos
from tests.chaos.model import Model, Verdict
from tests.integration.agent import Answer

SECONDS = float(os.environ.get("CHAOS_SECONDS", "240"))


@pytest.mark.full
@pytest.mark.anyio
@pytest.mark.timeout(SECONDS + 900)
async def test_twenty_sessions_in_chaos_lose_nothing_in_silence() -> None:
    found = await chaos(seconds=SECONDS, sessions=20, seed=5, flags=())
    assert found.good, [*found.wrong, *found.silent, *found.stuck]
    assert found.losses_told > 20
    assert found.unnamed == []
    assert found.alarms == []


def test_the_model_tells_what_was_said_from_what_was_not() -> None:
    model = Model()
    for name in ("a", "b", "c", "d", "e"):
        model.assign(name, 1, surely=True)
    model.hear(answer("", lost=["b"]))
    model.assign("d", 2, surely=False)
    assert model.lacks(["a", "d", "e"]) == ["c"]
    assert model.compare({"a": 1, "d": 2, "e": 3}) == Verdict(
        wrong=["e is 3, not [1]"], silent=["c"]
    )
    model.hear(answer("All variables of this session are lost", lost=["a"]))
    assert model.compare({"a": 1}) == Verdict(unnamed=["d", "e"], alarms=["a"])


def test_what_went_after_a_look_that_tells_of_it_is_no_false_alarm() -> None:
    model = Model()
    for name in ("a", "b"):
        model.assign(name, 1, surely=True)
    look = answer("All variables are lost", lost=["a"])
    model.hear(look)
    assert model.compare({"a": 1, "b": 1}, look) == Verdict()
    model.hear(answer("Told before: all variables are lost", lost=[]))
    assert model.compare({"a": 1}) == Verdict(unnamed=["b"], alarms=["a"])
    assert model.compare({}) == Verdict(silent=["a"])


def test_an_older_value_is_right_where_an_answer_said_so_and_it_was_there_before() -> None:
    model = Model()
    for value in (1, 2):
        model.assign("a", value, surely=True)
    assert model.compare({"a": 1}) == Verdict(wrong=["a is 1, not [2]"])
    model.assign("a", 3, surely=True)
    model.hear(answer("killed: … Variables are as after cell 4; run cells 5-6 again", lost=[]))
    assert model.compare({"a": 2}) == Verdict()
    assert model.compare({"a": 3}) == Verdict(wrong=["a is 3, not [2]"])
    look = answer("Variables are as after cell 2; run cells 3-6 again", lost=[])
    assert model.compare({"a": 4}, look) == Verdict(wrong=["a is 4, not [3]"])
    assert model.compare({"a": 1}) == Verdict()


def answer(text: str, *, lost: list[str]) -> Answer:
    meta = {"kernel-mcp/lost": {"lost": lost}}
    return Answer(types.CallToolResult(content=[types.TextContent(text=text)], _meta=meta))
