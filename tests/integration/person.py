"""A person's program beside the agent: Jupyter's own client on the front of a session."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from jupyter_client.asynchronous.client import AsyncKernelClient

PATIENCE_S = 60.0
Message = dict[str, Any]


async def join(state: Path, session: str = "") -> Path:
    """The connection file that `kernel-mcp sessions join` prints."""
    words = ["sessions", "join", *([session] if session else []), "--state-dir", str(state)]
    done = await anyio.run_process([sys.executable, "-m", "kernel_mcp", *words])
    return Path(done.stdout.decode().strip())


class Person:
    """Sends requests and reads what comes of them."""

    def __init__(self, client: AsyncKernelClient) -> None:
        self.client = client
        self.heard: list[Message] = []
        """All of iopub so far."""

    def send(self, kind: str, channel: str = "shell", **content: Any) -> str:
        """Send a request; its id."""
        message = self.client.session.msg(kind, content)
        getattr(self.client, f"{channel}_channel").send(message)
        return str(message["header"]["msg_id"])

    def run(self, code: str, **options: Any) -> str:
        """Request the execution of a cell, and return the id of the request."""
        usual = {"silent": False, "store_history": True, "stop_on_error": True}
        return self.send("execute_request", code=code, **{**usual, **options})

    async def reply(self, request: str, channel: str = "shell") -> Message:
        """The content of the reply to a request; replies to others before it are dropped."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                ready = getattr(self.client, f"{channel}_channel")
                message: Message = await ready.get_msg()
                if message["parent_header"]["msg_id"] == request:
                    content: Message = message["content"]
                    return content

    async def ask(self, kind: str, channel: str = "shell", **content: Any) -> Message:
        """The content of the reply to a new request."""
        return await self.reply(self.send(kind, channel, **content), channel)

    async def hear(self) -> Message:
        """The next message of iopub."""
        with anyio.fail_after(PATIENCE_S):
            message: Message = await self.client.iopub_channel.get_msg()
        self.heard.append(message)
        return message

    async def until_idle(self, request: str = "", code: str = "") -> list[Message]:
        """The messages of a cell, from `busy` to `idle`, known by its request or its code."""
        while True:
            last = await self.hear()
            if last["msg_type"] == "execute_input" and code and last["content"]["code"] == code:
                request = last["parent_header"]["msg_id"]
            idle = last["content"].get("execution_state") == "idle"
            if request and idle and last["parent_header"].get("msg_id") == request:
                return [m for m in self.heard if m["parent_header"].get("msg_id") == request]


def brief(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """Types of messages, with what they say of it."""
    return [(m["msg_type"], _gist(m["content"])) for m in messages]


def _gist(content: Message) -> Any:
    for name in ("execution_state", "code", "text", "ename"):
        if name in content:
            return content[name]
    return content.get("data", {}).get("text/plain", content)


@asynccontextmanager
async def person(state: Path, session: str = "") -> AsyncIterator[Person]:
    """Jupyter's client on the front of a session."""
    client = AsyncKernelClient()
    client.load_connection_file(str(await join(state, session)))
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=PATIENCE_S)
        yield Person(client)
    finally:
        client.stop_channels()
