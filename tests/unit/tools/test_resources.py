"""The resources of sessions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import (
    METHOD_NOT_FOUND,
    BlobResourceContents,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    TextResourceContents,
)

from kernel_mcp.tools import resources
from kernel_mcp.tools.resources import TEMPLATES
from tests.unit.tools.served import Served, served

pytestmark = [pytest.mark.anyio]


async def read(server: Served, path: str) -> tuple[str, str | None]:
    (content,) = (
        await server.agent.client.read_resource(f"kernel://{server.session.handle}/{path}")
    ).contents
    if isinstance(content, BlobResourceContents):
        return content.blob, content.mime_type
    assert isinstance(content, TextResourceContents)
    return content.text, content.mime_type


async def test_files_outputs_and_the_notebook_can_be_read(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        listed = (await server.agent.client.list_resource_templates()).resource_templates
        assert [each.uri_template for each in listed] == list(TEMPLATES)
        await server.call("execute", code="say one\n[kernel-mcp] two")
        await server.call("write_file", path="a b.txt", content="text")
        text, mime = await read(server, "cells/1")
        assert (text.splitlines()[0], mime) == ("one", "text/plain")
        assert "\n[kernel-mcp] two" not in text
        assert await read(server, "files/a%20b.txt") == ("text", "text/plain")
        text, _ = await read(server, "notebook")
        assert len(json.loads(text)["cells"]) == 1


async def test_a_long_output_is_cut_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "MAX_TEXT_CHARS", 3)
    async with served(tmp_path) as server:
        await server.call("execute", code="say hello")
        text, _ = await read(server, "cells/1")
        assert text.startswith("hel\n[… cut after 3 characters; read_file reads on")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("cells/2", "no cell 2"),
        ("cells/1/outputs/9", "no output '9'"),
        ("files/nowhere", "There is no file 'nowhere'"),
        ("files/../../x", "outside the workspace"),
        ("elsewhere", "is not a resource of this server"),
    ],
)
async def test_what_is_not_there_is_said_to_be_missing(
    tmp_path: Path, path: str, words: str
) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        with pytest.raises(MCPError, match=words):
            await read(server, path)


async def test_a_session_that_is_not_there_has_no_resources(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        with pytest.raises(MCPError, match="There is no session 's-none'"):
            await server.agent.client.read_resource("kernel://s-none/notebook")


async def test_a_failure_of_the_server_is_told_without_its_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret/place")

    monkeypatch.setattr(resources, "notebook", fail)
    async with served(tmp_path) as server:
        await server.opened()
        with pytest.raises(MCPError, match="The server failed while reading a resource"):
            await read(server, "notebook")


async def test_a_server_without_prompts_has_no_methods_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as server:
        client = server.agent.client
        assert client.server_capabilities.prompts is None
        assert client.server_capabilities.resources is not None
        for asked in (client.list_prompts, partial(client.get_prompt, "plot")):
            with pytest.raises(MCPError) as caught:
                await asked()
            assert caught.value.code == METHOD_NOT_FOUND
    assert not caplog.records


async def test_a_state_that_a_client_claims_to_have_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        request = CallToolRequest(
            params=CallToolRequestParams(name="execute", arguments={"code": "1"}, request_state="x")
        )
        with pytest.raises(MCPError, match="requestState"):
            await server.agent.client.session.send_request(request, CallToolResult)
