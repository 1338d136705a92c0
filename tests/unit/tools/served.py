"""All tools in this process, for a real client: real sessions and answers, fake kernels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
from mcp.client import Client

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.requirements import InstallRules, ScriptReader
from kernel_mcp.packages.result import InstallOutcome, PackageOutcome, PackageStatus
from kernel_mcp.policy import Policy
from kernel_mcp.protocol import Callers, build_mcp
from kernel_mcp.sandbox.select import NoSandbox
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.tool_context import ToolContext
from tests.integration.agent import Agent, Answer
from tests.unit.fake_kernels import FakeClock, FakeSource, FakeStore, Handed, new_manager

NOWHERE = cast(Any, None)
BESIDE = "beside"
"""The name of a package that has an environment of its own."""


class FakeInstaller:
    """Installs what the real rules admit; `state` is how it stands in the session then."""

    def __init__(self, settings: Settings) -> None:
        self.rules = InstallRules.of(settings)
        self.state = PackageStatus.WORKS

    async def install(
        self, session: Session, packages: Sequence[str], progress: ProgressCallback
    ) -> InstallOutcome:
        admitted = self.rules.admit(packages, standard_library=False)
        names = tuple(each.name for each in admitted)
        await progress("Resolved")
        return InstallOutcome(
            packages=tuple(
                PackageOutcome(name, "1.0", "", asked=True, modules=(name,), state=self.state)
                for name in names
            ),
            permitted=names,
        )


@dataclass(frozen=True)
class Served:
    """A server with a client, and what is behind it."""

    agent: Agent
    manager: SessionManager
    source: FakeSource
    store: FakeStore
    installer: FakeInstaller
    clock: FakeClock
    services: ToolContext

    @property
    def session(self) -> Session:
        """The newest session."""
        return self.manager.sessions[-1]

    async def call(self, tool: str, **arguments: Any) -> Answer:
        """A call that has to be answered."""
        with anyio.fail_after(60):
            return await self.agent.call(tool, **arguments)

    async def opened(self) -> Session:
        """The default session."""
        return await self.manager.resolve(Caller(), "")

    async def running(self) -> Cell:
        """The cell that runs, once there is one."""
        with anyio.fail_after(60):
            while True:
                for session in self.manager.sessions:
                    if session.kernel is not None and session.kernel.running is not None:
                        assert session.queue.current is not None
                        return session.queue.current
                await anyio.lowlevel.checkpoint()

    async def hanging(self) -> Session:
        """The default session with a cell that runs until it is stopped."""
        await self.call("execute", code="wait", wait=0)
        await self.running()
        return self.session

    async def died(self) -> None:
        """End the kernel of the newest session between two cells."""
        self.source.kernels[-1].die()
        with anyio.fail_after(60):
            while not self.session.notifications.pending:
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def served(
    folder: Path,
    source: FakeSource | None = None,
    links: Callable[[str], str] | None = None,
    callers: Callers | None = None,
    persistence: Persistence | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server with these settings; `links` are addresses of sessions, `callers` say who calls."""
    settings = Settings(**{"allow_install": ("kmtest", BESIDE), **options})
    source, clock, store = source or FakeSource(), FakeClock(), FakeStore(folder / "environment")
    manager = new_manager(folder, source, clock, persistence=persistence, **options)
    installer = FakeInstaller(settings)
    resources = ResourceManager(refusal="this is a test", grouped=True)
    services = ToolContext(
        settings=settings,
        shared=SharedContext(clock=clock),
        assembly=KernelAssembly(NoSandbox(), NOWHERE, resources=resources),
        manager=manager,
        task_key=lambda: b"key",
        factory=KernelFactory(
            settings=settings,
            policy=Policy.for_allow(settings.allow),
            environments=cast(EnvironmentStore, store),
            launcher=NOWHERE,
        ),
        installer=cast(Installer, installer),
        scripts=ScriptReader(settings, installer.rules, NOWHERE),
        interpreters={},
        persistence_summary="off",
    )
    mcp = build_mcp(services, callers or Handed(), links)
    async with manager.running(), Client(mcp, mode="legacy") as client:
        yield Served(Agent(client), manager, source, store, installer, clock, services)
