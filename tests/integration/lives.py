"""Servers that follow each other in one working folder, with one folder for state."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent

LEAN = ("--warm", "0", "--no-template")
ROOT = Path(__file__).parents[2]
_TELL = 'echo $$ > "$0"; exec "$@"'


@dataclass
class Life(Agent):
    """One server. `pid` is its process."""

    client: Client
    pid: int

    def kill(self) -> None:
        """End it with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Place:
    """Where servers work, and where they keep sessions."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def kept(self) -> Path:
        return self.root / "s" / "kept"

    def manifests(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.kept.glob("r/*/manifest.json")]
        return sorted(found, key=lambda each: str(each["name"]))

    async def saved(self, cell: int, name: str = "default") -> None:
        """Wait until the variables have been saved as of a cell."""
        with anyio.fail_after(60):
            while not any(
                each["name"] == name and each["cell"] == cell for each in self.manifests()
            ):
                await anyio.sleep(0.02)

    @asynccontextmanager
    async def life(
        self,
        *flags: str,
        work: Path | None = None,
        env: Mapping[str, str] | None = None,
        user: Callable[[list[str]], list[str]] = list,
    ) -> AsyncIterator[Life]:
        """A client of a new server, started by the command that `user` makes of it."""
        work = work or self.work
        work.mkdir(exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if k.startswith(("UV_", "XDG_"))}
        pid = self.root / "pid"
        command = [sys.executable, "-m", "kernel_mcp", "--state-dir", str(self.root / "s")]
        if "--template" in flags:
            command += [flag for flag in flags if flag != "--template"]
        else:
            command += [*flags, *LEAN]
        started = StdioServerParameters(
            command="sh",
            args=["-c", _TELL, str(pid), *user(command)],
            env={**inherited, "PYTHONPATH": str(ROOT), "HOME": str(self.root), **(env or {})},
            cwd=work,
        )
        async with Client(started) as client:
            yield Life(client, int(pid.read_text()))
