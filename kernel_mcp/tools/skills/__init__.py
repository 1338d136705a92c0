"""Skills over MCP (SEP-2640): instructions for longer work, which hosts load when they need them.

Each is a Markdown file in this folder. Lines that name missing tools in brackets are left out. The
instructions of the server, which say what is open in it, are added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CacheableResult, PaginatedRequestParams, RequestParams

from kernel_mcp.instructions import GOING_BACK, HOW
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import escaped
from kernel_mcp.tools.calls import SessionCalls
from kernel_mcp.tools.resources import LISTED_MS, Page

MIME = "text/markdown"
NAMES = ("work-in-a-notebook", "big-data-and-long-jobs", "finish-and-hand-over")
_OPTIONAL = "- ["


class SkillParams(RequestParams):
    """Parameters of `skills/get`."""

    uri: str


class SkillList(CacheableResult):
    """Result of `skills/list`."""

    skills: list[dict[str, Any]]


class SkillEntry(CacheableResult):
    """Result of `skills/get`."""

    skill: dict[str, Any]


class Skills(Extension):
    """Serves the skills of a server; `words` are its instructions."""

    identifier = "io.modelcontextprotocol/skills"

    def __init__(self, calls: SessionCalls, words: str) -> None:
        self._calls = calls
        self._useless = () if GOING_BACK in words else ("undo", "branch", "adopt")
        opened = words.removeprefix(HOW).strip().splitlines()
        self._opened = "\n".join(["\n## Open in this server\n", *(f"- {line}" for line in opened)])

    def methods(self) -> Sequence[MethodBinding]:
        """Return the methods by which hosts find skills."""
        return (
            MethodBinding("skills/list", PaginatedRequestParams, self._list),
            MethodBinding("skills/get", SkillParams, self._get),
        )

    def pages(self) -> dict[str, Page]:
        """Return the files of all skills by their addresses."""
        return {
            address(name): Page(MIME, partial(self._text, name), name, header(name)["description"])
            for name in NAMES
        }

    async def _text(self, name: str) -> str:
        tools = {each.name for each in await self._calls.definitions()}.difference(self._useless)
        return "\n".join([*_lines(name, tools), self._opened, ""])

    async def _entry(self, name: str) -> dict[str, Any]:
        """Return the entry of a skill, with which hosts compare the file that they read."""
        data = (await self._text(name)).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        file = {"uri": address(name), "digest": digest, "size": len(data)}
        return {"uri": address(name), "frontmatter": header(name), "resources": [file]}

    async def _list(
        self, _: ServerRequestContext[Any, Any], __: PaginatedRequestParams
    ) -> SkillList:
        return SkillList(skills=[await self._entry(name) for name in NAMES], ttl_ms=LISTED_MS)

    async def _get(self, _: ServerRequestContext[Any, Any], params: SkillParams) -> SkillEntry:
        for name in NAMES:
            if params.uri == address(name):
                return SkillEntry(skill=await self._entry(name), ttl_ms=LISTED_MS)
        there = ", ".join(map(address, NAMES))
        unknown = f"{params.uri!r} is not a skill of this server. There are: {there}."
        raise MCPError(INVALID_PARAMS, escaped(clean(unknown)))


def address(name: str) -> str:
    """Return the address of a skill's only file."""
    return f"skill://{name}/SKILL.md"


def header(name: str) -> dict[str, str]:
    """Return the name and the description at the top of a skill's file."""
    pairs = (line.partition(": ") for line in _read(name)[1:3])
    return {key: text for key, _, text in pairs}


def _read(name: str) -> list[str]:
    return Path(__file__).with_name(f"{name}.md").read_text(encoding="utf-8").splitlines()


def _lines(name: str, tools: Collection[str]) -> Iterator[str]:
    """Yield the lines of a skill for a server with these tools."""
    for line in _read(name):
        needs, _, text = line.removeprefix(_OPTIONAL).partition("] ")
        if not line.startswith(_OPTIONAL):
            yield line
        elif set(needs.split()) <= set(tools):
            yield f"- {text}"
