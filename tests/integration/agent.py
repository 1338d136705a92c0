"""A notebook client for tests: the real server as a subprocess, driven by the SDK's own client."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp import StdioServerParameters
from mcp.client import Client

ERAS = ("legacy", "auto")
"""Client modes: the handshake era and, by discovery, the newest one."""

ANALYSIS = "numpy,pandas,matplotlib"
"""Packages of a test that needs any package: all of them share one environment."""

PREFIX = "[kernel-mcp] "
"""The beginning of every notice of the server."""

Progress = Callable[[float, float | None, str | None], Any]


@dataclass(frozen=True)
class Answer:
    """A tool result in the parts that tests look at."""

    result: types.CallToolResult

    @property
    def text(self) -> str:
        return "\n".join(
            block.text for block in self.result.content if isinstance(block, types.TextContent)
        )

    @property
    def images(self) -> list[types.ImageContent]:
        return [block for block in self.result.content if isinstance(block, types.ImageContent)]

    @property
    def links(self) -> list[types.ResourceLink]:
        return [block for block in self.result.content if isinstance(block, types.ResourceLink)]

    @property
    def cell(self) -> dict[str, Any]:
        """The machine-readable outcome."""
        meta = self.result.meta or {}
        found = meta["kernel-mcp/cell"]
        assert isinstance(found, dict)
        return found

    @property
    def status(self) -> str:
        return str(self.cell["status"])

    @property
    def data(self) -> dict[str, Any]:
        """The structured content."""
        assert isinstance(self.result.structured_content, dict)
        return self.result.structured_content

    @property
    def failed(self) -> bool:
        return self.result.is_error


def notices(answer: Answer) -> list[str]:
    """Return the server's notices: blocks of text, and the field of structured results."""
    texts = [block.text for block in answer.result.content if block.type == "text"]
    return [text for text in texts if text.startswith(PREFIX)]


def losses(answer: Answer) -> list[str]:
    """The notices that tell of lost variables."""
    return [text for text in notices(answer) if "lost" in text]


def lost(answer: Answer) -> list[str]:
    """The names that the machine-readable part of an answer calls lost."""
    meta = answer.result.meta or {}
    found = meta.get("kernel-mcp/cell") or meta.get("kernel-mcp/lost") or {"lost": []}
    return list(found["lost"])


class Agent:
    """Calls tools by name and wraps their results."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(
        self, tool: str, *, on_progress: Progress | None = None, **arguments: Any
    ) -> Answer:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            if on_progress is not None:
                on_progress(progress, total, message)

        return Answer(
            await self.client.call_tool(
                tool, arguments, progress_callback=report if on_progress else None
            )
        )

    async def run(self, code: str, **arguments: Any) -> Answer:
        """`execute`, expecting that the cell is run, however it ends.

        The first cell of a run of tests may find its environment being built, for minutes.
        """
        answer = await self.call("execute", code=code, **arguments)
        patience = {"wait": max(0.1, arguments["wait"])} if "wait" in arguments else {}
        while "running: kernels are being prepared" in answer.text:
            answer = await self.call("wait", session=arguments.get("session", ""), **patience)
        assert "kernel-mcp/cell" in (answer.result.meta or {}), answer.text
        return answer

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The text of a call that must end in a tool error."""
        answer = await self.call(tool, **arguments)
        assert answer.failed, answer.text
        return answer.text


UNPAUSED = """
import sys
from kernel_mcp.endpoints import endpoint
from kernel_mcp.sessions import checkpoints
checkpoints.PAUSE_S = endpoint.MEANT_S = 3600.0
from kernel_mcp.cli import main
sys.exit(main())
"""


def command(
    *flags: str, env: dict[str, str] | None = None, pauses: bool = True
) -> StdioServerParameters:
    """How the server is started; the environment cache of the user running the tests is used.

    No session is kept for the next server unless `--persist` is given. Without `pauses`, no
    checkpoint is made because the machine was slow between two calls, and no request comes too late
    for what it was meant for.
    """
    inherited = {key: value for key, value in os.environ.items() if key.startswith(("UV_", "XDG_"))}
    return StdioServerParameters(
        command=sys.executable,
        args=[*(("-m", "kernel_mcp") if pauses else ("-c", UNPAUSED)), *flags],
        env={"KERNEL_MCP_PERSIST": "off", **inherited, **(env or {})},
        cwd=Path(__file__).parents[2],
    )


@asynccontextmanager
async def agent(*flags: str, era: str = "auto", pauses: bool = True) -> AsyncIterator[Agent]:
    """A client of a fresh server with these flags.

    Kernels in reserve and templates, which only make starts fast, are left out unless `--warm` is
    given: a test starts one or two kernels.
    """
    lean = () if "--warm" in flags else ("--warm", "0", "--no-template")
    async with Client(command(*flags, *lean, pauses=pauses), mode=era) as client:
        yield Agent(client)
