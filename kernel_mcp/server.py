"""Composition root: build the parts of a server that serve sessions, on top of `kernel_context`."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.attached.interpreter import ATTACHED
from kernel_mcp.attached.source import AttachingSource
from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.settings import Settings
from kernel_mcp.endpoints.endpoints import KernelEndpoints
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.kernel_context import (
    KernelContext,
    PersistenceFactory,
    kernel_context,
)
from kernel_mcp.kernel_sources import named_sources
from kernel_mcp.kernels.factory import InterpreterSources, KernelSource
from kernel_mcp.launch.base import mark_of
from kernel_mcp.linux.proc import resident_bytes
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.lines import CellInstallations
from kernel_mcp.packages.requirements import ScriptReader
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sessions.admin import serving_admin, stop_sessions, summary_of
from kernel_mcp.sessions.bounds import OwnMemory, ServerBounds, memory_bound
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.persistence_setup import persistence_in_words, persistence_of
from kernel_mcp.sessions.pool import WarmPool
from kernel_mcp.sessions.principals import Others
from kernel_mcp.sessions.registry import SessionRegistry
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.store import SECRET_BYTES
from kernel_mcp.telemetry import Levels
from kernel_mcp.tool_context import ToolContext

SPARES_AT_FIRST = 1
"""Pooled kernels before the first session begins. Until a second one does, there is none: most
servers have one session, and a pooled kernel takes 11 MiB."""


@dataclass(frozen=True, slots=True)
class AppContext(ToolContext):
    """The parts of a running server."""

    pool: WarmPool
    kernels: KernelContext

    async def levels(self, calls: int) -> Levels:
        """Return the server's gauges; `calls` is the number of calls in progress."""
        sessions, templates = self.manager.sessions, self.kernels.templates
        used = resident = 0
        with Barrier("measuring the server"):
            resident = resident_bytes()
        for session in sessions:
            kernel = session.kernel
            if kernel is not None and kernel.exit is None:
                with Barrier("measuring a kernel", session.handle):
                    used += (await kernel.handle.limits.used()).memory_bytes
        return Levels(
            sessions=Counter(each.state for each in sessions),
            templates=Counter(templates.states if templates is not None else ()),
            spares=self.pool.ready,
            calls=calls,
            server_bytes=resident,
            kernels_bytes=used,
        )


@asynccontextmanager
async def app_context(
    settings: Settings,
    sandbox: Sandbox,
    shared: SharedContext[Session] | None = None,
    *,
    persistence_factory: PersistenceFactory = persistence_of,
    registry: SessionRegistry | None = None,
    others: Others | None = None,
) -> AsyncIterator[AppContext]:
    """Build a whole server; close its parts in reverse order. Raises KernelMcpError.

    `shared` and `persistence_factory` are those of `kernel_context`. `registry` assigns session
    handles; `others` are the servers with which this one shares quotas.
    """
    async with (
        kernel_context(
            settings, sandbox, shared, persistence_factory=persistence_factory
        ) as kernels,
        with_sessions(kernels, registry=registry, others=others) as app,
    ):
        yield app


@asynccontextmanager
async def with_sessions(
    kernels: KernelContext, *, registry: SessionRegistry | None = None, others: Others | None = None
) -> AsyncIterator[AppContext]:
    """Build the parts that serve sessions, see `app_context`."""
    settings, shared, assembly = kernels.settings, kernels.shared, kernels.assembly
    folders, factory, mounts = kernels.folders, kernels.factory, assembly.mounts
    rules, environments, own = kernels.rules, kernels.environments, kernels.own_environment
    masks, persistence, run = kernels.masks, kernels.persistence, assembly.runs
    async with AsyncExitStack() as stack:
        pool = WarmPool(
            factory,
            size=kernels.pool_size,
            at_first=SPARES_AT_FIRST,
            folder=kernels.pool_folder,
            layers=folders.layers,
            capacity=shared.capacity,
            mark=lambda: (mounts.sights(), mark_of(own.sites) if own is not None else ()),
        )
        stack.push_async_callback(pool.aclose)
        installer = Installer(
            settings=settings,
            rules=rules,
            build_sandbox=environments.build_sandbox,
            sandbox=assembly.sandbox,
            factory=factory,
            scratch=run.path / "i",
        )
        workspace = partial(
            Workspace,
            disk_bytes=settings.limits.disk_bytes,
            mounts=mounts.shown,
            masked=masks.pieces if masks else iter,
            seen_at=lambda root: assembly.sandbox.guest_paths(root, root).workspace,
        )
        named = await anyio.to_thread.run_sync(named_sources, kernels)
        for each in named:
            stack.push_async_callback(each.aclose)
        if persistence is not None:
            persistence.interpreters |= {each.interpreter.name: each.interpreter for each in named}
        sources: dict[str, KernelSource] = {each.interpreter.name: each for each in named}
        if settings.attach:
            sources[ATTACHED] = AttachingSource(settings.attach, masks)
        manager = SessionManager(
            settings,
            InterpreterSources(pool, sources),
            replace(folders, workspace=workspace),
            shared,
            CellInstallations(installer, shared.checks),
            persistence,
            registry,
            others,
        )
        directory = manager.directory
        kernels.managers.append(manager)
        mounts.new_files.active_sessions = directory.at_work
        mounts.new_files.ended_sessions = directory.was_at_work
        mounts.new_files.running_sessions = lambda: [
            each for each in manager.sessions if each.kernel is not None
        ]
        assembly.network.remark = mounts.remark = directory.remark
        if kernels.templates is not None:
            kernels.templates.remark = directory.remark
        await stack.enter_async_context(manager.running())
        endpoints = KernelEndpoints(run.path / "f", lambda: manager.sessions)
        await stack.enter_async_context(endpoints.running())
        await stack.enter_async_context(
            serving_admin(
                run.path, partial(_answer_operator, run.path.name, settings, manager, endpoints)
            )
        )
        yield AppContext(
            settings=settings,
            shared=shared,
            assembly=assembly,
            manager=manager,
            factory=factory,
            installer=installer,
            interpreters={each.interpreter.name: each.interpreter for each in named},
            scripts=ScriptReader(settings, rules, environments.interpreters),
            persistence_summary=persistence_in_words(persistence, kernels.unpersisted_reason),
            task_key=_task_key(persistence),
            pool=pool,
            kernels=kernels,
        )


def _task_key(persistence: Persistence | None) -> Callable[[], bytes]:
    """Return a function that returns the key of tasks, which later servers share if possible."""
    if persistence is not None:
        return persistence.store.secret
    made = secrets.token_bytes(SECRET_BYTES)
    return lambda: made


async def _answer_operator(
    server: str,
    settings: Settings,
    manager: SessionManager,
    endpoints: KernelEndpoints,
    question: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return the answer to a question of `kernel-mcp sessions` or `lab`; errors are part of it.

    `server` identifies this one.
    """
    with Barrier("answering the operator") as barrier:
        if (found := await endpoints.answer(question)) is not None:
            return found
        if (handles := question.get("stop")) is not None:
            return {"stopped": await stop_sessions(manager, handles)}
    if barrier.failure is not None:
        return {"error": reason_of(barrier.failure)}
    now = time.monotonic()
    return {
        "server": server,
        "pid": os.getpid(),
        "http": "{}:{}".format(*settings.http) if settings.http is not None else "",
        "public_url": settings.public_url,
        "tokens": os.path.realpath(settings.tokens) if settings.tokens else "",
        "folder": str(Path.cwd()),
        "sessions": [await summary_of(each, now, settings) for each in manager.sessions],
    }


async def stay_within_bounds(settings: Settings, sessions: Callable[[], Sequence[Session]]) -> None:
    """Keep the server within its bounds of memory and disk, until cancelled.

    Beyond them the largest sessions lose old outputs, then waiting cells, then their kernel.
    """
    memory = OwnMemory()
    try:
        await ServerBounds(
            sessions, memory=memory, most_memory=memory_bound(settings.max_sessions)
        ).run()
    finally:
        memory.close()


async def attend(app: AppContext) -> None:
    """Hibernate or end idle sessions and keep the server within its bounds, until cancelled."""
    settings, manager = app.settings, app.manager
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(IdleHibernator(manager, settings.idle_timeout_s, time.monotonic).run)
        tasks.start_soon(stay_within_bounds, settings, lambda: manager.sessions)


async def warm_up(app: AppContext) -> None:
    """Prepare for kernels, then fill the pool."""
    await app.kernels.prepare()
    await app.pool.fill()
