"""A session with one notebook's worth of variables that can hibernate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.hibernation import IDLE
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, deliver, new_manager


@dataclass
class Notebook:
    """One session with a fake source and clock."""

    session: Session
    source: FakeSource
    clock: FakeClock
    folder: Path

    async def run(self, code: str) -> Cell:
        cell = self.session.submit(code, 0.0)
        with anyio.fail_after(60):
            await cell.finished.wait()
        deliver(self.session, cell)
        return cell

    async def hibernate(self, reason: str = IDLE, after_s: float = 3600.0) -> bool:
        self.clock.now += after_s
        with anyio.fail_after(60):
            return await self.session.hibernate(reason)

    @property
    def dumps(self) -> list[Path]:
        return list(self.folder.rglob("variables-*"))


@asynccontextmanager
async def notebook(folder: Path) -> AsyncIterator[Notebook]:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(folder, source, clock)
    async with manager.running():
        yield Notebook(await manager.create(Caller()), source, clock, folder)
