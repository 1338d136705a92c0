"""Sessions that go from node to node by what was saved of them."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.session_table import NAMED, SessionRow, SessionTable
from kernel_mcp.fleet.signed import NotOurs, Overtaken, Signed
from kernel_mcp.fleet.storage import FolderStorage
from kernel_mcp.tools.calls import SessionCalls
from tests.integration.calls_contract import Person
from tests.integration.fleet_nodes import FakeNode, Nodes

pytestmark = [pytest.mark.anyio]


def person(name: str = "ada") -> Person:
    return Person(cast(SessionCalls, None), name)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="nodes-") as folder:
        yield Nodes(Path(folder), set())


async def opened(node: FakeNode, ada: Person, **arguments: object) -> str:
    answer = await node.call(ada, "create_session", **arguments)
    return str(answer.data["session"])


async def test_a_session_of_a_lost_node_goes_on_elsewhere_and_says_what_is_lost(
    nodes: Nodes,
) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        assert handle.endswith(".one")
        await one.run(ada, "x = 40; open('a.txt', 'w').write('kept')", session=handle)
        await one.saved(handle, 1)
        await one.run(ada, "y = 1", session=handle)
        assert await two.ask(ada.caller, "execute", code="x", session=handle) == {"moved": "one"}
        nodes.lose(one)
        text = await two.run(ada, "x, 'y' in globals()", session=handle)
        assert "(40, False)" in text
        assert "The node that had this session was lost" in text
        assert await two.run(ada, "open('a.txt').read()", session=handle) == "'kept'"
        cells = (await two.call(ada, "read_file", path=f"kernel://{handle}/cells/1")).text
        assert cells.startswith("4")


async def test_of_a_session_that_was_never_saved_nothing_comes_back_and_that_is_said(
    nodes: Nodes,
) -> None:
    ada, ben = person(), person("ben")
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        nodes.lose(one)
        refused = await two.call(ben, "execute", code="1", session=handle)
        assert refused.text.startswith("There is no session")
        answer = await two.call(ada, "execute", code="1", session=handle)
        assert "before anything of it was saved" in answer.text
        assert answer.cell["state_kept"] is False


async def test_a_node_that_was_overtaken_saves_nothing_and_its_session_ends(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        await one.run(ada, "x = 1", session=handle)
        await one.saved(handle, 1)
        (session,) = one.built.manager.sessions
        nodes.lose(one)
        assert "1" in await two.run(ada, "x", session=handle)
        reply = await one.ask(ada.caller, "execute", code="x = 2", session=handle)
        if reply != {"moved": "two"}:  # a save in the background has not noticed it before
            with pytest.raises(Overtaken):
                await session.persistence.save()
        with anyio.fail_after(60):
            await session.ended.wait()
        assert await two.run(ada, "x", session=handle) == "1"
        known = two.store.table.find(handle)
        assert known is not None
        assert (known.row.node, known.row.epoch) == ("two", 2)


async def test_what_somebody_else_has_written_to_the_store_is_not_used(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        await one.run(ada, "x = 1", session=handle)
        await one.saved(handle, 1)
        nodes.lose(one)
        for path in (nodes.folder / "store" / "data").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-1] + b"!")
        answer = await two.call(ada, "execute", code="x", session=handle)
        assert answer.failed
        assert "somebody else has changed the store" in answer.text
        assert two.built.manager.sessions == []
        for path in (nodes.folder / "store" / "data").rglob("*"):
            if path.is_file():
                path.unlink()
        answer = await two.call(ada, "execute", code="x", session=handle)
        assert "is not in the store of the fleet any more" in answer.text
        for path in (nodes.folder / "store" / "sessions").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes().replace(b'"one"', b'"two"'))
        answer = await two.call(ada, "execute", code="x", session=handle)
        assert "not written with a key of this fleet" in answer.text


async def test_a_new_session_takes_the_name_of_one_whose_key_is_lost(nodes: Nodes) -> None:
    ada = person()
    store = FolderStorage(nodes.folder / "store")
    lost = SessionTable(Signed(store, b"a key that the fleet has no more"), "old", "1")
    lost.open(SessionRow("s-000000000000.old", ada.name, name="notes"))
    lost.open(SessionRow("s-000000000001.old", ada.name, default=ada.caller.default))
    async with nodes.node("one") as one:
        with pytest.raises(NotOurs):
            one.store.table.find_by_name(ada.name, NAMED, "notes")
        await opened(one, ada, name="notes")
        for session in ("notes", ""):
            text = await one.run(ada, "40 + 2", session=session)
            assert text.startswith("42")
            assert "a key that the fleet does not have any more" in text
        assert one.store.table.find_by_name(ada.name, NAMED, "notes") is not None


async def test_a_name_and_a_default_session_are_one_on_all_nodes(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        await opened(one, ada, name="notes")
        assert (await two.ask(ada.caller, "execute", code="1", session="notes")) == {"moved": "one"}
        again = await two.call(ada, "create_session", name="notes")
        assert again.failed
        assert "'notes' already" in again.text
        await one.run(ada, "x = 1")
        assert await two.ask(ada.caller, "execute", code="x") == {"moved": "one"}
        await one.call(ada, "close_session", session="notes")
        assert not (await two.call(ada, "create_session", name="notes")).failed
        await two.call(ada, "close_session", session="notes")


async def test_a_drained_node_gives_its_sessions_away_with_all_that_they_have(
    nodes: Nodes,
) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada, name="notes")
        await one.run(ada, "x = 1", session=handle)
        going = await one.call(
            ada, "execute", code="import time; time.sleep(1); x += 1", session=handle, wait=0
        )
        assert going.status in ("queued", "running")
        assert await one.sessions.drain(60) == {}
        assert one.built.manager.sessions == []
        assert await one.ask(ada.caller, "execute", code="x", session=handle) == {"moved": ""}
        assert await one.ask(ada.caller, "create_session") == {"moved": ""}
        text = await two.run(ada, "x", session="notes")
        assert "2" in text.splitlines()
        assert "lost" not in text
        again = await two.call(ada, "wait", session=handle, cell=2)
        assert again.status == "ok"


async def test_a_call_that_comes_while_a_session_is_given_away_waits_and_follows_it(
    nodes: Nodes,
) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        await one.call(
            ada, "execute", code="import time; time.sleep(1); x = 1", session=handle, wait=0
        )
        replies = []

        async def ask() -> None:
            replies.append(await one.ask(ada.caller, "execute", code="x", session=handle))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.sessions.drain, 60)
            with anyio.fail_after(60):
                while handle not in one.sessions.leaving:
                    await anyio.lowlevel.checkpoint()
            tasks.start_soon(ask)
        assert replies == [{"moved": ""}]
        assert "1" in (await two.run(ada, "x", session=handle)).splitlines()


async def test_a_second_node_of_a_name_takes_nothing_from_the_first(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one:
        handle = await opened(one, ada)
        await one.run(ada, "open('a.txt', 'w').write('kept')", session=handle)
        with pytest.raises(KernelMcpError, match="another node of this name"):
            async with nodes.node("one"):
                pass
        assert await one.run(ada, "open('a.txt').read()", session=handle) == "'kept'"


async def test_what_could_not_be_saved_of_files_is_named_when_it_is_gone(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        await one.run(ada, "import os; os.mkfifo('pipe'); x = 1", session=handle)
        await one.saved(handle, 1)
        nodes.lose(one)
        text = await two.run(ada, "x", session=handle)
        assert "Of its files 1 had not been saved and are gone" in text
        assert "(pipe)" in text


async def test_files_that_were_written_between_cells_are_saved_too(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        handle = await opened(one, ada)
        await one.call(ada, "write_file", path="a.txt", content="by a call", session=handle)
        with anyio.fail_after(60):
            while True:
                known = await anyio.to_thread.run_sync(one.store.table.find, handle)
                if known is not None and known.row.saved:
                    break
                await anyio.sleep(0.02)
        nodes.lose(one)
        assert "by a call" in (await two.call(ada, "read_file", path="a.txt", session=handle)).text


async def test_a_store_that_cannot_be_read_is_told_and_nothing_is_made_up(nodes: Nodes) -> None:
    ada = person()
    async with nodes.node("one") as one:
        place = one.store.table.signed.place

        def broken(_name: str) -> NoReturn:
            raise OSError(errno.EIO, "the disk of the store")

        vars(place)["names"] = broken
        answer = await one.call(ada, "execute", code="1", session="s-000000000000.two")
        assert answer.failed
        assert "The server failed while answering execute" in answer.text
        assert one.built.manager.sessions == []


@pytest.mark.ways
async def test_a_loss_that_nobody_has_heard_of_goes_with_the_session(nodes: Nodes) -> None:
    ada = person()
    async with (
        nodes.node("one") as one,
        nodes.node("two") as two,
        nodes.node("three") as three,
    ):
        handle = await opened(one, ada)
        await one.run(ada, "x = 1", session=handle)
        await one.saved(handle, 1)
        await one.run(ada, "x = 2", session=handle)
        nodes.lose(one)
        await two.ask(ada.caller, "list_variables", told=False, session=handle)
        assert await two.sessions.drain(60) == {}
        answer = await three.call(ada, "execute", code="x", session=handle)
        assert "1" in answer.text.splitlines()
        assert "The node that had this session was lost" in answer.text
        assert answer.cell["state_kept"] is True
        assert await three.sessions.drain(60) == {}
        two.sessions.draining = False
        again = await two.call(ada, "execute", code="x", session=handle)
        assert "was lost" not in again.text


async def test_sessions_that_begin_while_their_node_is_drained_are_given_away_too(
    nodes: Nodes,
) -> None:
    ada = person()
    async with nodes.node("one") as one, nodes.node("two") as two:
        replies = []

        async def create() -> None:
            replies.append(await one.ask(ada.caller, "create_session"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            with anyio.fail_after(60):
                while not one.sessions.calls:
                    await anyio.lowlevel.checkpoint()
            assert await one.sessions.drain(60) == {}
        assert one.built.manager.sessions == []
        handle = replies[0]["answer"]["structuredContent"]["session"]
        answer = await two.call(ada, "execute", code="1", session=handle)
        assert "lost" not in answer.text


async def test_a_session_is_closed_for_good_once_the_store_can_be_written_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = person()
    async with nodes.node("one") as one:
        handle = await opened(one, ada, name="notes")
        (session,) = one.built.manager.sessions

        def refuse(name: str, data: bytes) -> bool:
            raise OSError(errno.EROFS, "Read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr(one.store.table.signed.place, "create", refuse)
            await one.call(ada, "close_session", session=handle)
            with anyio.fail_after(60):
                await session.ended.wait()
        for name in ("notes", handle):
            answer = await one.call(ada, "execute", code="1", session=name)
            assert answer.text.startswith("There is no session")
        assert one.store.table.find(handle) is None
        assert not (await one.call(ada, "create_session", name="notes")).failed
