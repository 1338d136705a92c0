"""Skills over MCP, as a host reads them: lists, entries, and files that agree with both."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import mcp_types as types
import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from tests.integration.agent import ERAS
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]
HOUR_MS = 3600 * 1000
FIRST = "skill://work-in-a-notebook/SKILL.md"


class ListSkills(types.Request[types.PaginatedRequestParams | None, Literal["skills/list"]]):
    method: Literal["skills/list"] = "skills/list"
    params: types.PaginatedRequestParams | None = None


class SkillParams(types.RequestParams):
    uri: str


class GetSkill(types.Request[SkillParams, Literal["skills/get"]]):
    method: Literal["skills/get"] = "skills/get"
    params: SkillParams


class SkillList(types.CacheableResult):
    skills: list[dict[str, Any]]


class SkillEntry(types.CacheableResult):
    skill: dict[str, Any]


async def skills(client: Client) -> list[dict[str, Any]]:
    found = await client.session.send_request(ListSkills(), SkillList)
    assert found.ttl_ms == HOUR_MS
    return found.skills


async def entry(client: Client, uri: str) -> dict[str, Any]:
    request = GetSkill(params=SkillParams(uri=uri))
    return (await client.session.send_request(request, SkillEntry)).skill


async def file(client: Client, uri: str) -> str:
    (content,) = (await client.read_resource(uri)).contents
    assert isinstance(content, types.TextResourceContents)
    assert content.mime_type == "text/markdown"
    return content.text


@pytest.mark.parametrize("era", sampled(ERAS, "auto"))
async def test_each_skill_is_listed_and_its_file_is_what_its_entry_says(
    servers: Servers, era: str
) -> None:
    async with servers.agent(era=era) as notebook:
        client = notebook.client
        if era == "auto":  # the older era has no field for extensions
            assert "io.modelcontextprotocol/skills" in (client.server_capabilities.extensions or {})
        listed = await skills(client)
        assert len(listed) == 3
        resources = {each.uri: each for each in (await client.list_resources()).resources}
        for skill in listed:
            name, uri = skill["frontmatter"]["name"], skill["uri"]
            assert uri == f"skill://{name}/SKILL.md"
            assert await entry(client, uri) == skill
            text = await file(client, uri)
            head = f"---\nname: {name}\ndescription: {skill['frontmatter']['description']}\n---\n"
            assert text.startswith(head)
            data = text.encode()
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            assert skill["resources"] == [{"uri": uri, "digest": digest, "size": len(data)}]
            assert resources[uri].name == name
            assert resources[uri].description == skill["frontmatter"]["description"]
        with pytest.raises(MCPError, match="is not a skill of this server"):
            await entry(client, "skill://none/SKILL.md")


async def test_skills_say_what_is_open_and_name_no_tool_that_is_not_there(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        text = await file(notebook.client, FIRST)
        assert "There is no network." in text
        assert "`undo`" in text
    flags = ("--tools", "core", "--network", "example.com", "--profile", "strict")
    async with servers.agent(*flags) as notebook:
        tools = {each.name for each in (await notebook.client.list_tools()).tools}
        text = "\n".join(
            [await file(notebook.client, each["uri"]) for each in await skills(notebook.client)]
        )
        assert "Network: example.com" in text
        assert "There is no network." not in text
        named = {word for word in text.split("`")[1::2] if word.isidentifier()}
        words_of_calls = {"running", "wait", "timeout"}
        assert named - words_of_calls <= tools


@pytest.mark.parametrize(
    "flags",
    [
        ("--checkpoints", "off"),
        pytest.param(("--no-template", "--warm", "0"), marks=pytest.mark.ways),
    ],
)
async def test_where_nothing_can_be_undone_no_skill_says_so(
    servers: Servers, flags: tuple[str, ...]
) -> None:
    async with servers.agent(*flags) as notebook:
        told = await file(notebook.client, FIRST)
        assert "undo" not in told
        assert "undo" not in (notebook.client.instructions or "")
        assert "undo" in {each.name for each in (await notebook.client.list_tools()).tools}
