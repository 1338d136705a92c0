"""A store of environments and a stand-in for uv that can be held up."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import Uv
from kernel_mcp.sandbox.select import PlainBuilder

WORDS = ("pip", "install", "python", "find", "list")


FAKE = Path(__file__).parent / "fake_uv.py"


class Kit:
    """A cache folder and the calls that reached the stand-in."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.cache = root / "cache"
        self.log = root / "log"
        self.program = root / "uv"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        self.program.chmod(0o755)

    def store(
        self, extra: Mapping[str, str] | None = None, most_bytes: int = 0
    ) -> EnvironmentStore:
        """A store whose uv is the stand-in, with more variables in its environment."""
        environ = {"PATH": os.environ["PATH"], "FAKE_UV_LOG": str(self.log), **(extra or {})}
        uv = Uv(str(self.program), environ, self.cache.parent)
        return EnvironmentStore(self.cache, uv=uv, builder=PlainBuilder(), most_bytes=most_bytes)

    def calls(self) -> list[str]:
        """The first words of every call."""
        if not self.log.exists():
            return []
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [" ".join([word for word in call if word in WORDS]) for call in calls]


class Gate:
    """Stops the stand-in inside `pip install` until it is opened."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        os.mkfifo(root / "reached")
        os.mkfifo(root / "go")
        self._reached = os.open(root / "reached", os.O_RDWR | os.O_NONBLOCK)
        self._go = os.open(root / "go", os.O_RDWR)

    async def reached(self) -> None:
        """Return once the stand-in waits."""
        await anyio.wait_readable(self._reached)

    def open(self) -> None:
        """Let it go on; does nothing the second time."""
        for descriptor in (self._reached, self._go):
            if descriptor >= 0:
                os.close(descriptor)
        self._reached = self._go = -1


SPEC = EnvironmentSpec.for_allow(["numpy"])
