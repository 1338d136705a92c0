"""Where a front sends calls, and what it answers when a node is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from mcp_types import CallToolResult, TextContent

from kernel_mcp.errors import InputError, SessionNotFound
from kernel_mcp.fleet.front import PATIENCE_S, FleetCalls
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.tools.calls import Call
from tests.unit.fleet.fake_ray import Actor, FakeNode, FakeRay, FakeRegistry, answered

pytestmark = [pytest.mark.anyio]

ONE, TWO = "s-000000000000.one", "s-000000000000.two"


@dataclass
class Fleet:
    """A front of nodes that are made up."""

    ray: FakeRay
    registry: FakeRegistry
    calls: FleetCalls
    receipts: list[PendingReceipt] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    @property
    def one(self) -> FakeNode:
        return self.ray.nodes["one"]

    @property
    def two(self) -> FakeNode:
        return self.ray.nodes["two"]

    async def call(self, tool: str, *, progress: bool = False, **arguments: Any) -> CallToolResult:
        self.receipts.append(PendingReceipt())
        caller = Caller("ada", default="here", response=ResponseContext(self.receipts[-1]))

        async def hear(text: str) -> None:
            self.heard.append(text)

        with anyio.fail_after(30):
            return await self.calls.call(
                tool, arguments, Call(caller, hear if progress else None, "1")
            )

    async def said(self, tool: str, **arguments: Any) -> str:
        return text_of(await self.call(tool, **arguments))


def text_of(answer: CallToolResult) -> str:
    return "\n".join(each.text for each in answer.content if isinstance(each, TextContent))


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[Fleet]:
    names = names or ("one", "two")
    ray, registry = FakeRay(*names), FakeRegistry(*names)
    calls = FleetCalls(ray, Actor(registry), seed=1)
    async with anyio.create_task_group() as tasks:
        await tasks.start(calls.run)
        yield Fleet(ray, registry, calls)
        tasks.cancel_scope.cancel()


async def test_a_handle_leads_to_its_node() -> None:
    async with fleet() as given:
        assert given.calls.instructions == "the words"
        for _ in range(3):
            assert await given.said("execute", code="1", session=ONE) == "from one"
            assert await given.said("execute", code="1", session=TWO) == "from two"
        assert given.one.asked[0]["caller"]["principal"] == "ada"


async def test_a_session_that_has_moved_is_followed_and_remembered() -> None:
    async with fleet() as given:
        given.one.replies = [{"moved": "two"}]
        given.two.replies = [answered("here it is", session=ONE)]
        assert await given.said("execute", code="1", session=ONE) == "here it is"
        assert await given.said("execute", code="1", session=ONE) == "from two"
        assert len(given.one.asked) == 1


async def test_a_session_that_any_other_node_takes_goes_to_one() -> None:
    async with fleet() as given:
        given.one.replies = [{"moved": ""}]
        assert await given.said("execute", code="1", session=ONE) == "from two"


async def test_a_call_that_a_lost_node_was_answering_is_told_and_not_made_again() -> None:
    async with fleet() as given:
        given.one.lost = True
        answer = await given.call("execute", code="1", session=ONE)
        assert answer.is_error
        assert "Node one was lost while it answered this call" in text_of(answer)
        assert answer.meta is not None
        assert answer.meta["kernel-mcp/lost"]["state_kept"] is False
        assert given.two.asked == []
        assert await given.said("execute", code="1", session=ONE) == "from two"
        assert given.two.asked[0]["patience_s"] == PATIENCE_S


async def test_a_call_that_a_node_has_not_begun_as_it_had_left_goes_on_elsewhere() -> None:
    async with fleet() as given:
        given.one.lost = True
        given.registry.members.leave("one", "life of one")
        assert await given.said("execute", code="1", session=ONE) == "from two"


@pytest.mark.parametrize("tool", ["wait", "create_session"])
async def test_what_changes_nothing_or_can_be_had_twice_is_asked_of_another(tool: str) -> None:
    async with fleet() as given:
        given.one.lost = True
        arguments = {"session": ONE} if tool == "wait" else {}
        for _ in range(5):
            assert await given.said(tool, **arguments) == "from two"


async def test_a_node_that_could_not_be_reached_for_a_while_is_found_again() -> None:
    async with fleet() as given:
        given.one.lost = True
        assert "Node one was lost" in await given.said("execute", session=ONE)
        given.one.lost = False
        given.two.replies = [{"moved": "one"}]
        assert await given.said("execute", session=ONE) == "from one"
        assert given.two.asked[-1]["patience_s"] == PATIENCE_S


async def test_a_node_that_is_silent_is_not_waited_for_once_it_is_known_to_be_lost() -> None:
    async with fleet() as given:
        given.one.silent = True
        answers: list[CallToolResult] = []

        async def ask() -> None:
            answers.append(await given.call("execute", code="1", session=ONE, progress=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not given.one.asked:
                await anyio.lowlevel.checkpoint()
            given.registry.lose("one")
        assert "Node one was lost" in text_of(answers[0])


async def test_a_call_that_a_node_gave_up_is_not_made_again() -> None:
    async with fleet() as given:
        given.one.replies = [{"cancelled": True}]
        answer = await given.call("execute", code="1", session=ONE)
        assert answer.is_error
        assert "is not done again" in text_of(answer)
        assert given.two.asked == []


async def test_progress_comes_before_the_answer() -> None:
    async with fleet() as given:
        given.one.progress = ("a", "b")
        answer = await given.call("execute", code="1", session=ONE, progress=True)
        assert text_of(answer) == "from one"
        assert given.heard == ["a", "b"]


async def test_a_cancelled_call_is_cancelled_on_its_node() -> None:
    async with fleet() as given:
        given.one.silent = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: given.call("execute", code="1", session=ONE))
            while not given.one.asked:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert given.one.said == [("cancel", given.one.asked[0]["id"])]


async def test_a_node_hears_whether_its_answer_was_delivered() -> None:
    async with fleet() as given:
        await given.call("execute", code="1", session=ONE)
        assert given.one.said == []
        given.receipts[0].confirm()
        given.receipts[0].revoke()
        number = given.one.asked[0]["id"]
        assert given.one.said == [("delivered", number), ("revoked", number)]


async def test_sessions_of_all_nodes_are_one_list() -> None:
    async with fleet() as given:
        for age, node in ((1.0, given.one), (2.0, given.two)):
            reply = answered("")
            row = {"session": f"s-000000000000.{node.name}", "age_s": age}
            reply["answer"]["structuredContent"] = {"notices": [], "sessions": [row], "limit": 8}
            node.replies = [reply]
        answer = await given.call("list_sessions")
        found = answer.structured_content
        assert found is not None
        assert [each["session"] for each in found["sessions"]] == [TWO, ONE]
        assert found["limit"] == 16
        given.registry.lose("one")
        while given.calls._nodes.find("one") is not None:
            await anyio.lowlevel.checkpoint()
        assert "Sessions of one" in await given.said("list_sessions")


async def test_where_no_node_takes_sessions_that_is_said() -> None:
    async with fleet() as given:
        for name in ("one", "two"):
            given.registry.members.drain(name)
        text = await given.said("create_session")
        assert "one is being drained, two is being drained" in text


async def test_a_node_that_does_not_answer_is_called_lost_and_not_full() -> None:
    async with fleet("one") as given:
        given.one.lost = True
        assert "one is lost" in await given.said("create_session")


async def test_a_session_that_is_found_nowhere_ends_the_search() -> None:
    async with fleet() as given:
        given.one.replies = [{"moved": "two"}] * 50
        given.two.replies = [{"moved": "one"}] * 50
        assert "Call again" in await given.said("execute", code="1", session=ONE)


@pytest.mark.parametrize(("kind", "error"), [("missing", SessionNotFound), ("input", InputError)])
async def test_errors_of_reads_keep_their_kind(kind: str, error: type[Exception]) -> None:
    async with fleet() as given:
        given.one.replies = [{"error": kind, "text": "why"}]
        with pytest.raises(error, match="why"):
            await given.calls.read(f"kernel://{ONE}/notebook", Caller("ada"))


async def test_a_resource_is_read_where_its_session_is() -> None:
    async with fleet() as given:
        given.two.replies = [{"content": b"data", "mime": "image/png"}]
        found = await given.calls.read(f"kernel://{TWO}/files/a.png", Caller("ada"))
        assert found == (b"data", "image/png")
