"""Doors are those of principals: what one may use, another neither sees nor reaches."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import anyio.to_thread
import pytest

from tests.integration.httpclient import http_agent
from tests.integration.httpserver import LEAN, HttpServer, http_server
from tests.integration.principals import add
from tests.languages.kernels import STOCK
from tests.sampled import sampled

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


@pytest.mark.parametrize("how", sampled(["forked", "cold"], "forked"))
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
                tools = {each.name: each for each in (await agent.client.list_tools()).tools}
                hints = tools["execute"].annotations
                assert hints is not None
                assert (hints.open_world_hint, hints.destructive_hint) == (token == rich,) * 2


@pytest.mark.ways
async def test_a_kernel_is_of_those_whose_row_names_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    rich, poor = add(tokens, "rich", "--door", "kernel:stock"), add(tokens, "poor")
    flags = (*LEAN, "--tokens", str(tokens), "--kernel", f"stock={STOCK}")
    with http_server(*flags, token=rich) as server:
        async with http_agent(server, token=rich) as agent:
            assert "stock" in (agent.client.instructions or "")
            opened = await agent.call("create_session", name="a", language="stock")
            assert not opened.failed, opened.text
        async with http_agent(server, token=poor) as agent:
            assert "stock" not in (agent.client.instructions or "")
            assert (await agent.call("info")).data["languages"] == []
            for tool, code in (("create_session", {}), ("run_script", {"script": "1"})):
                there = await agent.refused(tool, language="stock", **code)
                unknown = await agent.refused(tool, language="cobol", **code)
                assert there.replace("stock", "cobol") == unknown


async def test_outputs_do_not_tell_who_lacks_a_variable_what_its_value_is(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    rich, poor = add(tokens, "rich", "--door", "env:GREETING"), add(tokens, "poor")
    flags = (*LEAN, "--tokens", str(tokens), "--env", "GREETING=good morning")
    with http_server(*flags, token=rich) as server:
        for token, shown in ((poor, "good morning"), (rich, "[GREETING masked]")):
            async with http_agent(server, token=token) as agent:
                ran = await agent.run("open('a.txt', 'w').write('good morning'); 'good morning'")
                read = await agent.client.call_tool("read_file", {"path": "a.txt"})
                assert shown in ran.text
                assert shown in str(read.content)


@pytest.mark.ways
async def test_the_log_names_rows_with_a_door_that_the_server_lacks(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    token = add(tokens, "ada", "--door", "mount:/there/not", "--door", "env:GREETING")
    flags = (*LEAN, "--tokens", str(tokens), "--env", "GREETING=good morning")
    with http_server(*flags, token=token) as server:
        async with http_agent(server) as agent:
            found = await agent.run("import os; os.environ['GREETING'] == 'good ' + 'morning'")
            assert "True" in found.text
        assert "row 1 (ada) of the tokens file names the door mount:/there/not" in server.log
        assert "the door env:GREETING" not in server.log


@pytest.mark.ways
async def test_a_principal_whose_wing_cannot_be_built_is_told_and_others_go_on(
    tmp_path: Path,
) -> None:
    tokens, data = tmp_path / "tokens", tmp_path / "data"
    data.mkdir()
    rich, poor = add(tokens, "rich", "--door", f"mount:{data}"), add(tokens, "poor")
    flags = (*LEAN, "--tokens", str(tokens), "--mount", str(data))
    with http_server(*flags, token=rich) as server:
        data.rmdir()
        status, text = await anyio.to_thread.run_sync(_asked, server, rich)
        assert status == 503
        assert "there is no such folder" in text
        async with http_agent(server, token=poor) as agent:
            assert (await agent.run("6 * 7")).text.strip() == "42"
        data.mkdir()
        async with http_agent(server, token=rich) as agent:
            found = await agent.run(f"import os; os.path.isdir({str(data)!r})")
            assert "True" in found.text


def _asked(server: HttpServer, token: str) -> tuple[int, str]:
    """Status and body of what answers the beginning of an MCP session."""
    connection = http.client.HTTPConnection(*server.address)
    headers = {"authorization": f"Bearer {token}", "accept": "application/json, text/event-stream"}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {}})
    headers["content-type"] = "application/json"
    connection.request("POST", "/mcp", body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


async def test_who_loses_a_door_loses_the_sessions_that_have_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("seen")
    file, tokens = str(data / "a.txt"), tmp_path / "tokens"
    token = add(tokens, "ada", "--door", f"mount:{data}")
    with http_server("--tokens", str(tokens), "--mount", str(data), token=token) as server:
        async with http_agent(server) as agent:
            assert "seen" in (await agent.run(f"kept = 1; open({file!r}).read()")).text
        before = tokens.read_text()
        rows = [json.loads(line) for line in tokens.read_text().splitlines() if line.strip()]
        for row in rows:
            row.pop("doors", None)
        tokens.write_text("".join(json.dumps(row) + "\n" for row in rows))
        async with http_agent(server) as agent:
            found = await agent.run(f"import os; [os.path.exists({file!r}), 'kept' in dir()]")
            assert "[False, False]" in found.text
        tokens.write_text(before)
        async with http_agent(server) as agent:
            found = await agent.run(f"[open({file!r}).read(), 'kept' in dir()]")
            assert "['seen', False]" in found.text
            assert "ended when the access of its principal was changed" in found.text
