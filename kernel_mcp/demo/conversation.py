"""A client that talks to the server over stdio and does not believe it: every answer is checked."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import ImageContent, TextContent

from kernel_mcp.demo.steps import Step
from kernel_mcp.demo.transcript import Transcript
from kernel_mcp.linux.process import own_module

_CELL = "kernel-mcp/cell"
_WAIT_S = 60
_BUILDING = ("Building", "Resolved", "Downloading", "Prepared", "Installed", "Bytecode")


class DemoError(Exception):
    """The server did not do what the demo promises."""


@dataclass(slots=True)
class Answer:
    """All that came back for one call, follow-up calls included."""

    text: str = ""
    status: str = ""
    pictures: list[bytes] = field(default_factory=list)
    seconds: float = 0.0


class Conversation:
    """Calls tools, prints what was said, raises DemoError on any other answer than promised."""

    def __init__(self, client: Client, transcript: Transcript) -> None:
        self._client = client
        self._transcript = transcript

    async def run(self, step: Step) -> Answer:
        """Run one step as a cell and check how it ended."""
        self._transcript.title("execute", step.title)
        self._transcript.code(step.code)
        answer = await self._call("execute", {"code": step.code, "wait": _WAIT_S})
        while answer.status in ("queued", "running"):
            more = await self._call("wait", {"wait": _WAIT_S})
            more.text = answer.text + more.text
            more.seconds += answer.seconds
            answer = more
        self._transcript.answer(_described(answer), answer.seconds)
        if answer.status != step.status:
            raise DemoError(f"the cell ended with {answer.status!r} instead of {step.status!r}")
        if step.expects not in answer.text:
            raise DemoError(f"the answer does not say {step.expects!r}")
        if step.picture and not answer.pictures:
            raise DemoError("no picture came back")
        return answer

    async def tell(self, tool: str, title: str, shown: str, **arguments: Any) -> Answer:
        """Call any other tool and print its answer."""
        self._transcript.title(tool, title)
        self._transcript.code(shown)
        answer = await self._call(tool, arguments)
        self._transcript.answer(answer.text, answer.seconds)
        return answer

    async def interrupt(self, code: str) -> None:
        """Start a cell that would go on for long and stop it after its first output."""
        self._transcript.title("execute", "Start something that takes an hour")
        self._transcript.code(code)
        begun = await self._call("execute", {"code": code, "wait": 1.5})
        self._transcript.answer(begun.text, begun.seconds)
        if begun.status != "running":
            raise DemoError(f"the cell is {begun.status!r} instead of 'running'")
        stopped = await self.tell("interrupt", "Stop it", "interrupt()")
        if "KeyboardInterrupt" not in stopped.text and "interrupted" not in stopped.text:
            raise DemoError("the answer does not say that the cell was interrupted")

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        result = await self._client.call_tool(tool, arguments, progress_callback=self._progress)
        answer = Answer(seconds=time.perf_counter() - started)
        answer.status = str(((result.meta or {}).get(_CELL) or {}).get("status", ""))
        for block in result.content:
            if isinstance(block, TextContent):
                answer.text += block.text if block.text.endswith("\n") else block.text + "\n"
            elif isinstance(block, ImageContent):
                answer.pictures.append(base64.b64decode(block.data))
        if isinstance(result.structured_content, dict) and "note" in result.structured_content:
            answer.text = str(result.structured_content["note"])
        if result.is_error:
            raise DemoError(f"the tool {tool} failed: {answer.text.strip()}")
        return answer

    async def _progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Show how an environment is built; what a cell prints comes again with its answer."""
        if message and message.startswith(_BUILDING):
            self._transcript.note(f"   … {message}")


@asynccontextmanager
async def connect(flags: Sequence[str], transcript: Transcript) -> AsyncIterator[Conversation]:
    """Start `kernel-mcp` with these flags as a process of its own and talk to it over stdio."""
    program, *arguments = own_module("kernel_mcp", *flags)
    server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        yield Conversation(client, transcript)


def _described(answer: Answer) -> str:
    pictures = [f"[picture, {len(data) / 1024:.0f} KB]" for data in answer.pictures]
    return "\n".join([answer.text.rstrip("\n"), *pictures]).strip("\n")
