"""A node of a fleet: a Ray actor that runs sessions on its machine, as a server does."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp import __version__
from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.grants import grant_names
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.cluster import NAMESPACE, FleetUnavailable, awaited, import_ray, secret_of
from kernel_mcp.fleet.collector import Collector
from kernel_mcp.fleet.members import LEASE_S, RENEW_S, Load, Member, alive
from kernel_mcp.fleet.persistence import DEFAULT_PERSIST, FLEET, FleetPersistence, factory_with
from kernel_mcp.fleet.registry import registry_of
from kernel_mcp.fleet.session_registry import FleetSessionRegistry
from kernel_mcp.fleet.session_table import SessionTable
from kernel_mcp.fleet.sessions import NodeSessions
from kernel_mcp.fleet.shared_store import SharedStore
from kernel_mcp.fleet.signed import Signed, keys_of
from kernel_mcp.fleet.storage import storage_of
from kernel_mcp.fleet.usage import FleetUsage, rows_of
from kernel_mcp.fleet.watchdog import boottime
from kernel_mcp.linux.deadline import Deadline
from kernel_mcp.linux.proc import available_memory
from kernel_mcp.linux.process import bare_program, keep_small, switch_often
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.select import begin_proof
from kernel_mcp.server import AppContext, app_context, stay_within_bounds, warm_up
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.start import prepare_process, proven
from kernel_mcp.telemetry.logs import log_to_stderr
from kernel_mcp.tools.local import LocalCalls

logger = logging.getLogger(__name__)

WATCHDOG = "kernel_mcp.fleet.watchdog"
AT_ONCE = 10_000
"""Concurrent calls of a node, most of which wait for cells."""
START_S = 120.0
"""Seconds after which a node that has not joined is killed."""
LAST_WORDS_S = 5.0
"""Seconds before that in which it reports what took long."""


def actor_name(node: str) -> str:
    """Return the name of a node's actor in the cluster."""
    return f"node-{node}"


class Node:
    """The actor. Its methods are called from other machines, with plain values."""

    def __init__(self, name: str, life: str, place: str, settings: str) -> None:
        """Read the settings from the file `settings` of this machine, and remove the file."""
        path = Path(settings)
        self._settings: Settings = pickle.loads(path.read_bytes())
        path.unlink()
        self._member = Member(name, life, place, __version__)
        self._over = asyncio.Event()
        self._ended = asyncio.Event()
        self._sessions: NodeSessions | None = None
        self._local: LocalCalls | None = None
        self._app: AppContext | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._deadline: Deadline | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._registry: Any = None
        self._failure = ""
        self._stage = "the proof of the sandbox"
        self._until = 0.0

    async def start(self) -> tuple[int, int]:
        """Start the node; return the ids of its process and watchdog. Raises KernelMcpError."""
        # Ray starts its workers with SIGINT blocked. Kernels would inherit that, and cells could
        # not be interrupted.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _reset_niceness()
        keep_small()
        switch_often()
        log_to_stderr(self._settings.log_level, self._settings.log_format)
        prepare_process(self._settings)
        until = boottime() + START_S
        self._deadline = Deadline()
        self._deadline.set(until)
        self._watchdog = subprocess.Popen(
            bare_program(WATCHDOG, str(os.getpid()), str(until)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        watching = await anyio.to_thread.run_sync(_number_of, self._watchdog)
        begun = asyncio.Event()
        self._spawn(self._run(begun))
        with anyio.move_on_after(START_S - LAST_WORDS_S) as patience:
            await begun.wait()
        if patience.cancelled_caught:
            waited_s = START_S - LAST_WORDS_S
            raise KernelMcpError(
                f"node {self._member.name} was not ready after {waited_s:g} s: {self._stage} takes "
                "too long. Is the machine overloaded? The log of this process is Ray's"
            )
        if self._failure:
            raise KernelMcpError(self._failure)
        return os.getpid(), watching

    async def leave(self, within_s: float) -> dict[str, str]:
        """Give all sessions to other nodes and end.

        Returns reasons by handle for sessions that could not be given away. Their last save stays.
        """
        kept = await self.drain(within_s)
        self._over.set()
        await self._ended.wait()
        return kept

    async def drain(self, within_s: float) -> dict[str, str]:
        """See `NodeSessions.drain`."""
        return await self._own_sessions.drain(within_s)

    async def stop_draining(self) -> None:
        """Accept sessions again."""
        self._own_sessions.draining = False

    async def about(self) -> dict[str, Any]:
        """Return what fronts need before they serve: tools, instructions, version."""
        assert self._local is not None
        assert self._app is not None
        tools = await self._local.definitions()
        return {
            "version": __version__,
            "tools": [each.model_dump(mode="json", by_alias=True) for each in tools],
            "words": self._app.instructions(),
            "files": "files" in self._settings.tools,
        }

    async def metrics(self) -> str:
        """Return the metrics in the format of Prometheus; empty without prometheus-client."""
        if self._app is None or self._sessions is None:
            return ""
        levels = await self._app.levels(self._sessions.calls)
        found = self._app.shared.events.meters.text(levels)
        return "" if found is None else found[0].decode()

    async def call(
        self, asked: Mapping[str, Any], tell: ProgressCallback | None = None
    ) -> dict[str, Any]:
        """See `NodeSessions.call`. A node that has ended answers that the session has moved."""
        if self._sessions is None:
            return {"moved": ""}
        return await self._sessions.call(asked, tell)

    async def follow(self, asked: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer a call as `call` does; yield progress messages, then the reply."""
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def tell(text: str) -> None:
            said.put_nowait({"progress": text})

        async def answer() -> None:
            reply: dict[str, Any] = {"cancelled": True}  # the front does not repeat the call
            try:
                reply = await self.call(asked, tell)
            finally:
                said.put_nowait(reply)

        self._spawn(answer())  # it continues if the stream is abandoned
        while True:
            one = await said.get()
            yield one
            if "progress" not in one:
                return

    async def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """See `NodeSessions.read`."""
        return {"moved": ""} if self._sessions is None else await self._sessions.read(asked)

    async def cancel(self, number: str) -> None:
        """See `NodeSessions.cancel`."""
        if self._sessions is not None:
            self._sessions.cancel(number)

    async def delivered(self, number: str) -> None:
        """See `NodeSessions.delivered`."""
        if self._sessions is not None:
            self._sessions.delivered(number)

    async def revoked(self, number: str) -> None:
        """See `NodeSessions.revoked`."""
        if self._sessions is not None:
            self._sessions.revoked(number)

    async def idle_s(self, principal: str, kind: str) -> float | None:
        """Return the idle seconds of the principal's session that would be evicted next.

        None without one; see `Others`. The registry has the current usage of this node when this
        returns.
        """
        if self._sessions is None or self._app is None:
            return None
        await self._tell_uses()
        return self._app.manager.admission.idle_s(principal, kind)

    async def evict_one(self, principal: str, kind: str) -> bool:
        """Evict the session of `idle_s`. Return True if it was done; see `Others`."""
        if self._sessions is None or self._app is None:
            return False
        done = await self._app.manager.admission.evict_one(principal, kind)
        await self._tell_uses()
        return done

    async def _tell_uses(self) -> None:
        await self._registry.use.remote(self._member.name, self._uses())

    @property
    def _own_sessions(self) -> NodeSessions:
        if self._sessions is None:
            raise FleetUnavailable(f"node {self._member.name} is starting or has ended")
        return self._sessions

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, begun: asyncio.Event) -> None:
        """Run the node until it ends; a failure is stored."""
        with Barrier("running a node") as barrier:
            try:
                await self._live(begun)
            finally:
                self._sessions = None
        if barrier.failure is not None:
            self._failure = reason_of(barrier.failure)
        begun.set()
        self._ended.set()

    async def _live(self, begun: asyncio.Event) -> None:
        settings = self._settings
        ray = import_ray()
        registry = self._registry = registry_of(ray, make=True)
        member = self._member
        keys = keys_of(settings.fleet_key, secret_of(settings.fleet))
        signed = Signed(storage_of(settings.fleet_store), *keys)
        table = SessionTable(signed, member.name, member.life)
        kept: list[FleetPersistence] = []
        loop = asyncio.get_running_loop()

        async def until_over(node: str, life: str, most_s: float) -> bool:
            return bool(await registry.until_over.remote(node, life, most_s))

        async def is_over(node: str, life: str) -> bool:
            return await until_over(node, life, 0.0)

        def overtaken(handle: str) -> None:
            if self._sessions is not None:
                loop.call_soon_threadsafe(self._sessions.overtaken, handle)

        async def is_first() -> bool:
            there = alive([Member.of(row) for row in await registry.rows.remote()])
            return min((each.name for each in there), default="") == member.name

        persist = settings.persist or DEFAULT_PERSIST

        def make(state: Path) -> SharedStore:
            return SharedStore(
                state / FLEET / member.name,
                table,
                most_bytes=persist.bytes,
                most_s=persist.seconds,
                most_files_bytes=settings.limits.disk_bytes,
                overtaken=overtaken,
            )

        session_registry = FleetSessionRegistry(member.name, is_over, lambda: kept[0])
        others = FleetUsage(member.name, registry, ray, partial(_actor_of, ray))
        options = ContainerOptions.of(settings)
        async with AsyncExitStack() as stack:
            sandbox = await proven(begin_proof(*settings.sandbox, container=options))
            self._stage = "the start of the server"
            persistence_factory = factory_with(make, kept)
            app = await stack.enter_async_context(
                app_context(
                    settings,
                    sandbox,
                    persistence_factory=persistence_factory,
                    registry=session_registry,
                    others=others,
                )
            )
            self._app, self._local = app, LocalCalls(app)
            admits = partial(_has_all_grants, settings)
            sessions = NodeSessions(
                self._local, app.manager, kept[0], session_registry, until_over, admits
            )
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(
                IdleHibernator(app.manager, settings.idle_timeout_s, app.shared.clock).run
            )
            tasks.start_soon(stay_within_bounds, settings, lambda: app.manager.sessions)
            tasks.start_soon(warm_up, app)
            collector = Collector(table, is_over, most_s=persist.seconds)
            tasks.start_soon(collector.run, is_first)
            self._stage = "the start of the registry, a process on the head,"
            await self._join(registry)
            self._sessions = sessions
            tasks.start_soon(self._renew, registry, others)
            begun.set()
            await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _join(self, registry: Any) -> None:
        """Join the fleet, which begins the lease. Raises KernelMcpError if it is refused.

        A fresh registry may answer only when its process has started, after the lease that was
        asked for. So the node asks again until a whole answer fits into the lease.
        """
        left_s = 0.0
        while left_s < LEASE_S / 2:
            asked = boottime()
            if refusal := await registry.join.remote(self._member.row()):
                raise KernelMcpError(refusal)
            left_s = asked + LEASE_S - boottime()
        self._extend_deadline(asked + LEASE_S)

    async def _renew(self, registry: Any, others: FleetUsage) -> None:
        """Renew the lease until cancelled, and exchange load and usage with the registry.

        Kills this process if the lease is over.
        """
        member = self._member
        while True:
            asked = boottime()
            if asked > self._until:  # a restarted registry would not know that the lease is over
                self._end_all()
            with Barrier("renewing the lease of a node"):
                now = replace(member, load=self._load(), draining=self._own_sessions.draining)
                renewing = registry.renew.remote(now.row(), self._uses())
                try:
                    held, uses = await asyncio.wait_for(awaited(renewing), LEASE_S / 2)
                    if not held:
                        self._end_all()
                    others.update(uses)
                    self._extend_deadline(asked + LEASE_S)
                except asyncio.TimeoutError:
                    logger.warning("the head of the fleet does not answer")
            await anyio.sleep(RENEW_S)

    def _extend_deadline(self, until: float) -> None:
        """Extend the deadline of this process's timer and of the watchdog to `until`.

        It is a time by CLOCK_BOOTTIME. After it, either of them kills the process.
        """
        assert self._watchdog is not None
        assert self._deadline is not None
        self._deadline.set(until)
        assert self._watchdog.stdin is not None
        os.write(self._watchdog.stdin.fileno(), f"{until}\n".encode())
        self._until = until

    @staticmethod
    def _end_all() -> None:
        logger.critical(
            "the lease of this node was over, and others go on with its sessions: it ends, and "
            "with it all that runs in them"
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def _uses(self) -> dict[str, dict[str, int]]:
        assert self._app is not None
        return rows_of(self._app.manager.admission.uses())

    def _load(self) -> Load:
        assert self._app is not None
        found = self._app.manager.sessions
        return Load(
            free_bytes=available_memory(),
            sessions=len(found),
            busy=sum(each.state == "busy" for each in found),
            most=self._settings.max_sessions,
            environments=self._own_sessions.environments,
        )


def _has_all_grants(settings: Settings, grants: tuple[str, ...]) -> bool:
    """Return True if `grants` names all grants of the node, which its sessions can use.

    Questions are left out: each call says if its principal may be asked.
    """
    settings = replace(settings, ask=())
    return grant_names(settings, grants) == grant_names(settings)


def _actor_of(ray: Any, node: str) -> Any:
    """Return the actor of another node, or None if it has ended."""
    try:
        return ray.get_actor(actor_name(node), NAMESPACE)
    except ValueError:
        return None


def _number_of(watchdog: subprocess.Popen[bytes]) -> int:
    """Return the process id of the watchdog, which the started process forks before it exits."""
    assert watchdog.stdout is not None
    with watchdog.stdout as lines:
        pid = int(lines.readline())
    watchdog.wait()
    return pid


def _reset_niceness() -> None:
    """Reset the niceness to 0, as Ray starts its workers with a lower priority."""
    if os.nice(0) > 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except OSError:
            logger.warning(
                "cells of this node run at niceness %d: start its machine with "
                "RAY_worker_niceness=0 in the environment of `ray start`",
                os.nice(0),
            )


def start_options(node_id: str, name: str) -> dict[str, Any]:
    """Return Ray's options for the actor of a node: only on its machine, and never restarted."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "name": actor_name(name),
        "max_concurrency": AT_ONCE,
        "max_restarts": 0,
        "max_task_retries": 0,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
