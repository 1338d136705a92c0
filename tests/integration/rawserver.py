"""The real server as a subprocess whose stdin and stdout a test holds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]

HELLO = [
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    },
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
]


class RawServer:
    """The server as a subprocess whose stdin and stdout the test holds."""

    def __init__(
        self,
        state: Path,
        *flags: str,
        stderr: IO[bytes] | None = None,
        through: Sequence[str] = (),
    ) -> None:
        """`through` is the beginning of a command line that starts the rest of it."""
        self.state = state
        self.process = subprocess.Popen(
            [*through, sys.executable, "-m", "kernel_mcp", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
            env={**os.environ, "KERNEL_MCP_STATE_DIR": str(state)},
        )
        for message in HELLO:
            self.send(message)
        self.read(1)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, number: int) -> dict[str, object]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            message = json.loads(line)
            if message.get("id") == number:
                assert isinstance(message, dict)
                return message
        pytest.fail("the server closed its output")

    def execute(self, number: int, code: str, *, answer: bool = True) -> None:
        self.call(number, "execute", answer=answer, code=code, wait=30)

    def call(
        self, number: int, tool: str, *, answer: bool = True, **arguments: object
    ) -> dict[str, object]:
        """Call a tool; nothing is returned where its `answer` is not waited for."""
        params = {"name": tool, "arguments": arguments}
        self.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
        return self.read(number) if answer else {}

    def descendants(self) -> set[int]:
        """Every process below the server."""
        found: set[int] = set()
        waiting = [self.process.pid]
        while waiting:
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # it has ended meanwhile
                for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                    children = [int(pid) for pid in (task / "children").read_text().split()]
                    found.update(children)
                    waiting += children
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
