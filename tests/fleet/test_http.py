"""Fronts over HTTP: any number of them, with the same principals and the same sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fleet.machines import HEAD, Machines
from tests.integration.httpclient import http_agent
from tests.integration.httpserver import HttpServer, http_server
from tests.integration.principals import add

pytestmark = [pytest.mark.anyio]


@contextmanager
def fronts(machines: Machines, tokens: Path) -> Iterator[tuple[HttpServer, HttpServer]]:
    flags = ["--fleet", machines.address, "--fleet-place", f"127.0.0.{HEAD}"]
    flags += ["--tokens", str(tokens)]
    with (
        http_server(*flags, token="-", environ=machines.environ) as one,
        http_server(*flags, token="-", environ=machines.environ) as two,
    ):
        yield one, two


@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_a_principal_has_its_sessions_through_any_front_and_nobody_elses(
    era: str, whole: Machines, tmp_path: Path
) -> None:
    ada, ben = add(tmp_path / "tokens", "ada"), add(tmp_path / "tokens", "ben")
    with fronts(whole, tmp_path / "tokens") as (one, two):
        async with http_agent(one, era, ada) as agent:
            await agent.run("x = 'of ada'")
            handle = str((await agent.call("info")).data["session"])
        async with http_agent(two, era, ada) as agent:
            assert "'of ada'" in (await agent.run("x")).text
            assert (await agent.call("info")).data["session"] == handle
            listed = (await agent.call("list_sessions")).data["sessions"]
            assert [each["session"] for each in listed] == [handle]
        async with http_agent(two, era, ben) as agent:
            assert "There is no session" in await agent.refused("execute", code="x", session=handle)
            assert (await agent.call("list_sessions")).data["sessions"] == []
        async with http_agent(one, era, ada) as agent:
            await agent.call("close_session")
