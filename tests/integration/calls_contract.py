"""The contract of `SessionCalls`, wherever the sessions are: a test for each implementation."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import InputError, SessionNotFound
from kernel_mcp.identity import Principal
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.tools.calls import Call, SessionCalls
from tests.integration.agent import Answer
from tests.unit.packages.wheels import wheel

PATIENCE_S = 120
PACKAGE = "kmtest-good"
"""A package that sessions can install, from the folder that `links` has made."""
Clause = Callable[[SessionCalls], Awaitable[None]]
CONTRACT: list[Clause] = []


def clause(test: Clause) -> Clause:
    """One sentence of the contract."""
    CONTRACT.append(test)
    return test


def links(folder: Path) -> Path:
    """A folder with `PACKAGE`, which is nowhere else."""
    wheel(folder, PACKAGE)
    return folder


class Person:
    """One who calls, of whose answers those are delivered that are said to be."""

    def __init__(self, calls: SessionCalls, name: str = "ada") -> None:
        self.calls = calls
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.heard: list[str] = []
        self.receipt = PendingReceipt()
        self.progress = False
        self.quotas = Quotas()

    @property
    def caller(self) -> Caller:
        self.receipt = PendingReceipt()
        who = Principal(self.name, quotas=self.quotas)
        return Caller(
            self.name, default=f"of {self.name}", who=who, response=ResponseContext(self.receipt)
        )

    async def _hear(self, text: str) -> None:
        self.heard.append(text)

    async def call(self, tool: str, *, delivered: bool = True, **arguments: Any) -> Answer:
        hear = self._hear if self.progress else None
        with anyio.fail_after(PATIENCE_S):
            answer = Answer(await self.calls.call(tool, arguments, Call(self.caller, hear, "1")))
        if delivered:
            self.receipt.confirm()
        return answer

    async def run(self, code: str, **arguments: Any) -> str:
        answer = await self.call("execute", code=code, **arguments)
        assert answer.status == "ok", answer.text
        return answer.text

    async def read(self, uri: str) -> str | bytes:
        with anyio.fail_after(PATIENCE_S):
            return (await self.calls.read(uri, self.caller))[0]

    async def opened(self) -> str:
        return str((await self.call("create_session")).data["session"])


@clause
async def tools_are_described_and_their_arguments_checked(calls: SessionCalls) -> None:
    definitions = {each.name: each for each in await calls.definitions()}
    assert definitions["execute"].input_schema["required"] == ["code"]
    ada = Person(calls)
    wrong = await ada.call("execute", cod="1")
    assert wrong.failed
    assert "did you mean `code`" in wrong.text
    assert "There is no tool 'exec'; did you mean execute?" in (await ada.call("exec")).text


@clause
async def variables_stay_and_answers_keep_their_form(calls: SessionCalls) -> None:
    ada = Person(calls)
    await ada.run("x = 40")
    answer = await ada.call("execute", code="print('said'); x + 2")
    assert answer.text == "said\n42"
    assert answer.cell["cell"] == 2
    assert (await ada.call("list_variables")).data["variables"][0]["name"] == "x"
    failed = await ada.call("execute", code="1/0")
    assert failed.failed
    assert failed.status == "error"
    assert "ZeroDivisionError" in failed.text


@clause
async def any_handle_is_found_by_its_owner_and_by_nobody_else(calls: SessionCalls) -> None:
    ada, ben = Person(calls), Person(calls, "ben")
    handles = [await ada.opened() for _ in range(3)]
    for number, handle in enumerate(handles):
        await ada.run(f"x = {number}", session=handle)
    for number, handle in enumerate(handles):
        assert await ada.run("x", session=handle) == str(number)
    unknown = await ben.call("execute", code="x", session="s-000000000000")
    foreign = await ben.call("execute", code="x", session=handles[0])
    assert foreign.failed
    assert foreign.text.replace(handles[0], "") == unknown.text.replace("s-000000000000", "")
    assert {each["session"] for each in (await ada.call("list_sessions")).data["sessions"]} == {
        *handles
    }
    assert (await ben.call("list_sessions")).data["sessions"] == []
    for handle in handles:
        await ada.call("close_session", session=handle)
    assert (await ada.call("execute", code="x", session=handles[0])).failed


@clause
async def a_name_finds_one_session(calls: SessionCalls) -> None:
    ada = Person(calls)
    await ada.call("create_session", name="notes")
    await ada.run("x = 'in notes'", session="notes")
    again = await ada.call("create_session", name="notes")
    assert again.failed
    assert "'notes' already" in again.text
    assert await ada.run("x", session="notes") == "'in notes'"
    await ada.call("close_session", session="notes")


@clause
async def progress_arrives_while_a_cell_runs(calls: SessionCalls) -> None:
    ada = Person(calls)
    ada.progress = True
    code = "import time\nfor n in range(3): print('step', n, flush=True); time.sleep(0.3)"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ada.call("execute", code=code))
        with anyio.fail_after(PATIENCE_S):
            while not any("step 0" in text for text in ada.heard):
                await anyio.sleep(0.01)
        assert not any("step 2" in text for text in ada.heard)
    assert any("step 2" in text for text in ada.heard)


@clause
async def a_cancelled_call_interrupts_its_cell_and_keeps_variables(calls: SessionCalls) -> None:
    ada = Person(calls)
    handle = await ada.opened()
    await ada.run("x = 1", session=handle)
    ada.progress = True
    async with anyio.create_task_group() as tasks:
        code = "print('begun', flush=True)\nwhile True: pass"
        tasks.start_soon(lambda: ada.call("execute", code=code, session=handle))
        with anyio.fail_after(PATIENCE_S):
            while not ada.heard:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    ada.progress = False
    assert "1" in (await ada.run("x", session=handle)).splitlines()
    cell = json.loads(await ada.read(f"kernel://{handle}/cells/2.json"))
    assert cell["status"] == "interrupted"
    await ada.call("close_session", session=handle)


@clause
async def an_interrupt_from_another_call_keeps_variables(calls: SessionCalls) -> None:
    ada = Person(calls)
    handle = await ada.opened()
    await ada.run("x = 2", session=handle)
    going = await ada.call("execute", code="while True: pass", session=handle, wait=0.2)
    assert going.status == "running"
    stopped = await ada.call("interrupt", session=handle)
    assert stopped.status == "interrupted"
    assert "2" in (await ada.run("x", session=handle)).splitlines()
    await ada.call("close_session", session=handle)


@clause
async def what_was_not_delivered_is_told_again(calls: SessionCalls) -> None:
    ada = Person(calls)
    handle = await ada.opened()
    await ada.run("kept = 1", session=handle)
    await ada.call("execute", code="import os; os._exit(3)", session=handle, delivered=False)
    again = await ada.call("list_variables", session=handle, delivered=False)
    third = await ada.call("list_variables", session=handle)
    for answer in (again, third):
        assert answer.data["notices"], answer.text
    with anyio.fail_after(PATIENCE_S):  # that it was delivered may be told on its own way
        while (await ada.call("list_variables", session=handle)).data["notices"]:
            await anyio.lowlevel.checkpoint()
    await ada.call("close_session", session=handle)


@clause
async def files_and_notebooks_go_in_and_out(calls: SessionCalls) -> None:
    ada = Person(calls)
    handle = await ada.opened()
    data = bytes(range(256)) * 4096
    text = base64.b64encode(data).decode()
    await ada.call("write_file", path="a.bin", content=text, encoding="base64", session=handle)
    code = "import hashlib; hashlib.sha256(open('a.bin', 'rb').read()).hexdigest()"
    assert await ada.run(code, session=handle) == repr(hashlib.sha256(data).hexdigest())
    assert await ada.read(f"kernel://{handle}/files/a.bin") == data
    read = await ada.call("read_file", path=f"kernel://{handle}/cells/1")
    assert hashlib.sha256(data).hexdigest() in read.text
    names = {
        each["path"] for each in (await ada.call("list_files", session=handle)).data["entries"]
    }
    assert "a.bin" in names
    exported = await ada.call("export_notebook", session=handle)
    assert exported.links[0].uri.endswith(f"{handle}/notebook")
    book = json.loads(await ada.read(f"kernel://{handle}/notebook"))
    assert "sha256" in "".join(book["cells"][0]["source"])
    await ada.call("close_session", session=handle)


@clause
async def addresses_that_name_nothing_are_refused_by_kind(calls: SessionCalls) -> None:
    ada = Person(calls)
    with pytest.raises(InputError):
        await ada.read("kernel://somewhere/else")
    with pytest.raises(SessionNotFound):
        await ada.read("kernel://s-000000000000/notebook")


@clause
async def a_script_runs_once_and_nothing_stays(calls: SessionCalls) -> None:
    ada = Person(calls)
    answer = await ada.call("run_script", script="print(6 * 7)")
    assert answer.cell["stdout"] == "42\n"
    handles = [each["session"] for each in (await ada.call("list_sessions")).data["sessions"]]
    assert answer.cell["session"] not in handles


@clause
async def cells_of_one_session_run_in_order_and_sessions_side_by_side(calls: SessionCalls) -> None:
    ada = Person(calls)
    one, two = await ada.opened(), await ada.opened()
    await ada.run("seen = []", session=one)
    await ada.run("1", session=two)  # its kernel is there: the next cell begins at once
    await ada.call("execute", code="while True: pass", session=two, wait=0)
    for number in range(5):
        await ada.call("execute", code=f"seen.append({number})", session=one, wait=0)
    assert "[0, 1, 2, 3, 4]" in await ada.run("seen", session=one)
    assert (await ada.call("interrupt", session=two)).status == "interrupted"
    for handle in (one, two):
        await ada.call("close_session", session=handle)


@clause
async def packages_are_added_to_a_session_that_goes_on(calls: SessionCalls) -> None:
    ada = Person(calls)
    ada.progress = True
    handle = await ada.opened()
    await ada.run("x = 1", session=handle)
    added = await ada.call("install", packages=[PACKAGE], session=handle)
    assert not added.failed, added.text
    assert ada.heard
    code = "import kmtest_good; x, kmtest_good.__version__"
    assert "(1, '1.0')" in await ada.run(code, session=handle)
    none = await ada.call("install", packages=["kmtest-none"], session=handle)
    assert none.failed
    assert "kmtest-none" in none.text
    assert "1" in (await ada.run("x", session=handle)).splitlines()
    await ada.call("close_session", session=handle)


@clause
async def cells_are_undone_and_branches_are_apart_until_one_is_adopted(calls: SessionCalls) -> None:
    ada = Person(calls)
    handle = await ada.opened()
    await ada.run("x = [0]", session=handle, checkpoint=True)
    await ada.run("x.append(1)", session=handle, checkpoint=True)
    assert (await ada.call("undo", session=handle)).data["state_as_of"] == 1
    assert "[0]" in (await ada.run("x", session=handle)).splitlines()
    made = await ada.call("branch", n=2, session=handle)
    one, other = (str(each["session"]) for each in made.data["branches"])
    await ada.run("x.append('one')", session=one)
    await ada.run("x.append('other')", session=other)
    assert "[0, 'one']" in await ada.run("x", session=one)
    assert not (await ada.call("adopt", branch=other)).failed
    assert "[0, 'other']" in await ada.run("x", session=handle)
    assert (await ada.call("execute", code="x", session=one)).failed
    await ada.call("close_session", session=handle)
