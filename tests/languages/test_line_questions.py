"""Questions of code in other languages to the person at a client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import anyio
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext

from tests.integration.agent import Agent, command
from tests.integration.test_questions import types_on
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.ways]

ASKING = {
    "r": ("cat(toupper(readline('Name? ')))", "cat('on')"),
    "stock": ("print(input('Name? ').upper())", "print('on')"),
    "deno": ("console.log(prompt('Name? ')?.toUpperCase())", "console.log('on')"),
}
"""Code that asks and code that does not, by kernel."""


def asked(name: str, answer: str | None) -> AbstractAsyncContextManager[Client]:
    """A client of a server with that kernel, whose person answers so; None declines."""

    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        if isinstance(params, types.ElicitRequestURLParams):
            assert answer is not None
            await anyio.to_thread.run_sync(types_on, params.url, answer)
            return types.ElicitResult(action="accept")
        assert params.message.endswith("asks: Name?"), params.message
        if answer is None:
            return types.ElicitResult(action="decline")
        return types.ElicitResult(action="accept", content={"answer": answer})

    flags = ("--warm", "0", "--memory", "3G", "--kernel", kernel_flag(name))
    return Client(command(*flags), elicitation_callback=elicit)


@pytest.mark.parametrize("name", ASKING)
async def test_code_gets_the_line_that_a_person_types(name: str) -> None:
    code, other = ASKING[name]
    async with asked(name, "Ada") as client:
        agent = Agent(client)
        await agent.call("create_session", name="s", language=name)
        for _ in range(2):
            answer = await agent.run(code, session="s")
            assert answer.text.startswith("ADA"), answer.text
            assert "asked the person: 1 answered" in answer.text
        assert (await agent.run(other, session="s")).text.strip() == "on"


@pytest.mark.parametrize("name", ASKING)
async def test_no_answer_interrupts_the_cell_and_loses_nothing(name: str) -> None:
    code, other = ASKING[name]
    async with asked(name, None) as client:
        agent = Agent(client)
        await agent.call("create_session", name="s", language=name)
        answer = await agent.run(code, session="s")
        assert answer.status != "ok", answer.text
        assert "asked the person: 1 declined" in answer.text
        assert (await agent.run(other, session="s")).text.strip() == "on"


async def test_r_gets_an_empty_line_where_nobody_is_asked() -> None:
    flags = ("--warm", "0", "--ask", "off", "--kernel", kernel_flag("r"))
    async with Client(command(*flags)) as client:
        agent = Agent(client)
        await agent.call("create_session", name="s", language="r")
        answer = await agent.run("nchar(readline('Name? '))", session="s")
        assert "[1] 0" in answer.text
        assert "had nobody to ask" in answer.text


async def test_a_secret_of_a_stock_kernel_is_typed_on_a_page() -> None:
    async with asked("stock", "hunter2") as client:
        agent = Agent(client)
        await agent.call("create_session", name="s", language="stock")
        code = "import getpass; print(len(getpass.getpass('Token: ')))"
        answer = await agent.run(code, session="s")
        assert answer.text.startswith("7\n"), answer.text
