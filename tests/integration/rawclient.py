"""A client that writes bytes and reads lines: what a well-behaved one would never send."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.integration.agent import command

MOST_BYTES = 64 * 1024 * 1024
PATIENCE_S = 60.0


class RawClient:
    """One server's two ends.

    `errors` are what came with no id; `failed` is whether the last tool reported an error.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.errors: list[dict[str, Any]] = []
        self.failed = False
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)
        self._number = 0

    @property
    def memory_bytes(self) -> int:
        """The most that the server has ever held, without pages it shares."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak.split()[1]) * 1024

    @property
    def descriptors(self) -> int:
        """The number of the server's open descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    @property
    def tasks(self) -> int:
        """Processes and threads of the server and its kernels."""
        found = 0
        pending = [self.process.pid]
        while pending:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                for task in Path(f"/proc/{pending.pop()}/task").iterdir():
                    found += 1
                    pending += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    async def send(self, line: bytes) -> None:
        """Write bytes as they are."""
        await self._stdin.send(line)

    async def answer(self, number: object) -> dict[str, Any]:
        """The answer with this id; others are dropped, and those without one kept in `errors`."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                line = await self._stdout.receive_until(b"\n", MOST_BYTES)
                said: dict[str, Any] = json.loads(line)
                if said.get("id", self) == number:
                    return said
                if "error" in said and said.get("id") is None:
                    self.errors.append(said)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A well-formed request and its answer."""
        self._number += 1
        number = f"ask-{self._number}"
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        await self.send(json.dumps(message).encode() + b"\n")
        return await self.answer(number)

    async def call(self, tool: str, **arguments: Any) -> str:
        """The text of a tool's answer."""
        answer = await self.ask("tools/call", name=tool, arguments=arguments)
        self.failed = bool(answer["result"].get("isError"))
        content = answer["result"]["content"]
        return "\n".join(block["text"] for block in content if block["type"] == "text")


@asynccontextmanager
async def raw_client(
    *flags: str,
    through: Callable[[list[str]], list[str]] = lambda argv: argv,
    log: Path | None = None,
) -> AsyncIterator[RawClient]:
    """A client that has shaken hands with a fresh server.

    The command goes `through` a function that may put another before it; `log` gets its stderr.
    """
    wanted = command("--warm", "0", *flags)
    with ExitStack() as stack:
        stderr = None if log is None else stack.enter_context(log.open("wb"))
        process = await anyio.open_process(
            through([wanted.command, *wanted.args]),
            stderr=stderr,
            env={**os.environ, **(wanted.env or {})},
            cwd=wanted.cwd,
        )
    async with process:
        client = RawClient(process)
        hello = {"name": "raw", "version": "1"}
        await client.ask(
            "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=hello
        )
        await client.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        yield client
        await client._stdin.aclose()
        with anyio.fail_after(PATIENCE_S):
            assert await process.wait() == 0
