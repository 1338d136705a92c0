"""A client of revision 2026-07-28 that takes tasks, written from the specification alone."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tests.integration.agent import command
from tests.integration.rawclient import PATIENCE_S, RawClient

TASKS = "io.modelcontextprotocol/tasks"
VERSION = "2026-07-28"
MOST_POLLS_S = 120.0


class RefusedError(Exception):
    """A JSON-RPC error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.code: int = error["code"]


class TaskClient:
    """Declares `capabilities` on each request; it begins with no handshake."""

    def __init__(self, raw: RawClient, capabilities: Mapping[str, Any]) -> None:
        self.raw = raw
        self.capabilities = capabilities

    def meta(self) -> dict[str, Any]:
        return {
            "io.modelcontextprotocol/protocolVersion": VERSION,
            "io.modelcontextprotocol/clientCapabilities": self.capabilities,
            "io.modelcontextprotocol/clientInfo": {"name": "tasks", "version": "1"},
        }

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a request. Raises RefusedError."""
        answer = await self.raw.ask(method, **params, _meta=self.meta())
        if "error" in answer:
            raise RefusedError(answer["error"])
        found: dict[str, Any] = answer["result"]
        return found

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a tool, or a task."""
        return await self.ask("tools/call", name=tool, arguments=arguments)

    async def run(self, tool: str, **arguments: Any) -> str:
        """The text of a tool's answer, whether or not it takes a task on a busy machine."""
        found = await self.call(tool, **arguments)
        if found["resultType"] == "task":
            found = (await self.ended(found))["result"]
        return text_of(found)

    async def get(self, task: str) -> dict[str, Any]:
        return await self.ask("tasks/get", taskId=task)

    async def shows(self, task: Mapping[str, Any], message: str) -> dict[str, Any]:
        """Poll a task that runs until its status message is this; that state."""
        with anyio.fail_after(MOST_POLLS_S):
            while (state := await self.get(task["taskId"])).get("statusMessage") != message:
                assert state["status"] == "working", shown(state)
                await anyio.sleep(0.05)
        return state

    async def ended(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Poll a task as often as it says until it has ended; its last state."""
        with anyio.fail_after(MOST_POLLS_S):
            while task["status"] in ("working", "input_required"):
                await anyio.sleep(task["pollIntervalMs"] / 1000)
                task = await self.get(task["taskId"])
        return dict(task)


def text_of(result: Mapping[str, Any]) -> str:
    """The text of a tool's answer."""
    return "\n".join(each["text"] for each in result["content"] if each["type"] == "text")


@asynccontextmanager
async def task_client(
    *flags: str, capabilities: Mapping[str, Any] | None = None
) -> AsyncIterator[TaskClient]:
    """A client of a fresh server."""
    wanted = command("--warm", "0", *flags)
    process = await anyio.open_process(
        [wanted.command, *wanted.args],
        stderr=None,
        env={**os.environ, **(wanted.env or {})},
        cwd=wanted.cwd,
    )
    async with process:
        client = TaskClient(
            RawClient(process),
            {"extensions": {TASKS: {}}} if capabilities is None else capabilities,
        )
        yield client
        if process.returncode is None:
            await client.raw._stdin.aclose()
            with anyio.fail_after(PATIENCE_S):
                assert await process.wait() == 0


def shown(found: Mapping[str, Any]) -> str:
    """A result as one line, for messages of failed tests."""
    return json.dumps(found)[:2000]
