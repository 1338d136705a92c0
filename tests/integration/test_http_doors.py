"""Doors are those of principals: what one may use, another neither sees nor reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.httpclient import http_agent
from tests.integration.httpserver import http_server
from tests.integration.principals import add

pytestmark = pytest.mark.anyio

LOOK = """
import os, socket
def reaches():
    with socket.socket() as s:
        s.settimeout(5)
        host, _, port = os.environ["HTTP_PROXY"].rpartition("/")[2].rpartition(":")
        s.connect((host, int(port)))
        return True
def attempt(work):
    try:
        return work()
    except (OSError, KeyError):
        return None
[attempt(lambda: open({file!r}).read()), os.environ.get("GREETING"), attempt(reaches)]
"""


@pytest.mark.parametrize("how", ["forked", "cold"])
async def test_a_principal_has_the_doors_of_its_row_and_no_others(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("seen")
    tokens = tmp_path / "tokens"
    file = str(data / "a.txt")
    doors = [f"mount:{data}", "env:GREETING", "network"]
    rich = add(tokens, "rich", *(word for door in doors for word in ("--door", door)))
    poor = add(tokens, "poor")
    flags = [
        *("--tokens", str(tokens), "--mount", str(data), "--env", "GREETING=good morning"),
        *("--network", "example.com"),
        *(["--no-template"] if how == "cold" else []),
    ]
    with http_server("--warm", "1", *flags, token=rich) as server:
        for token, expected in (
            (poor, [None, None, None]),
            (rich, ["seen", "[GREETING masked]", True]),
            (poor, [None, None, None]),
        ):
            async with http_agent(server, token=token) as agent:
                await agent.run(LOOK.format(file=file))
                found = await agent.run(LOOK.format(file=file))
                assert found.text.strip() == repr(expected)
                read = await agent.client.call_tool("read_file", {"path": file})
                assert read.is_error == (token == poor)
                info = (await agent.client.call_tool("info", {})).structured_content
                assert info is not None
                told = json.dumps(info) + (agent.client.instructions or "")
                for name in (str(data), "GREETING", "example.com"):
                    assert (name in told) == (token == rich)


async def test_who_loses_a_door_loses_the_sessions_that_have_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("seen")
    file, tokens = str(data / "a.txt"), tmp_path / "tokens"
    token = add(tokens, "ada", "--door", f"mount:{data}")
    with http_server("--tokens", str(tokens), "--mount", str(data), token=token) as server:
        async with http_agent(server) as agent:
            assert "seen" in (await agent.run(f"kept = 1; open({file!r}).read()")).text
        rows = [json.loads(line) for line in tokens.read_text().splitlines() if line.strip()]
        for row in rows:
            row.pop("doors", None)
        tokens.write_text("".join(json.dumps(row) + "\n" for row in rows))
        async with http_agent(server) as agent:
            found = await agent.run(f"import os; [os.path.exists({file!r}), 'kept' in dir()]")
            assert "[False, False]" in found.text
