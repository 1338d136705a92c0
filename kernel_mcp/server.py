"""Composition root: builds every part, serves, and takes all parts down again."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import resource
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from kernel_mcp import __version__
from kernel_mcp.attached.source import AttachingSource
from kernel_mcp.barriers import Barrier, explained, reason_of
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import LEAST_MASKED
from kernel_mcp.environments.own import own_environment
from kernel_mcp.environments.store import EnvironmentStore, default_cache
from kernel_mcp.environments.uv import sources
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.fronts.fronts import Fronts
from kernel_mcp.host_folders import shown_folders, usable_devices
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.launch.base import mark_of
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.doors import Doors
from kernel_mcp.launch.network import opened
from kernel_mcp.launch.readiness import Inspector
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.proc import resident_bytes
from kernel_mcp.linux.process import ENDING, end_soon, import_nothing_from, own_places, stay
from kernel_mcp.output.text import Masks
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.lines import CellInstallations
from kernel_mcp.packages.requirements import InstallRules, ScriptReader
from kernel_mcp.policy import Policy, profile_entries, profile_in_force
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.services import Services
from kernel_mcp.sessions.audit import Audit, open_audit
from kernel_mcp.sessions.bounds import OwnMemory, ServerBounds, memory_bound
from kernel_mcp.sessions.capacity import Capacity
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.keeping import Keeping, keeping_of, kept_in_words
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.measuring import Measured
from kernel_mcp.sessions.pool import WarmPool, spare_folder, sweep_spares
from kernel_mcp.sessions.principals import Others
from kernel_mcp.sessions.reaper import Reaper
from kernel_mcp.sessions.roll import Roll
from kernel_mcp.sessions.roster import answering, described
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.storage import SessionFolders
from kernel_mcp.telemetry import Levels, Meters, Readiness
from kernel_mcp.telemetry.logs import Lines
from kernel_mcp.wire import stdio_wire

if TYPE_CHECKING:
    from packaging.requirements import Requirement

logger = logging.getLogger(__name__)

NEW_OBJECTS = 20_000
"""Of those that may be parts of cycles, so many more than before have the young ones looked at."""
SWITCH_S = 0.0005
"""Seconds that a thread may keep the event loop waiting (`sys.setswitchinterval`)."""


PROTOCOL = "kernel_mcp.protocol"
"""Imports the MCP SDK."""
TOOLS = "kernel_mcp.tools.topics"
"""What the first request for tools needs besides."""
TEMPLATE_S = 0.2
"""Seconds that the start of a template has before the SDK is imported: it takes longer than that
to build an environment."""
RETRIES_S = (30.0, 60.0, 300.0)
"""Seconds between attempts to prepare for kernels, as while there is no network."""
SPARES_AT_FIRST = 1
"""Most servers have a single session, for which a further one of 11 MiB would wait in vain."""
TEMPLATE_KERNELS = 1
"""A template counts as one kernel in the system's limits."""


@dataclass(frozen=True, slots=True)
class Parts(Services):
    """The parts of a running server."""

    pool: WarmPool
    readiness: Readiness
    templates: TemplateLauncher | None

    async def levels(self, calls: int) -> Levels:
        """What the server has now, with so many calls that are being answered."""
        sessions = self.manager.sessions
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
            templates=Counter(self.templates.states if self.templates is not None else ()),
            spares=self.pool.ready,
            calls=calls,
            server_bytes=resident,
            kernels_bytes=used,
        )


class Commons:
    """What all parts of a server share that has them several times; see `web`."""

    def __init__(self, settings: Settings, sandbox: Sandbox) -> None:
        """Raises ConfigError."""
        self.masks = Masks(settings.hidden)
        self.meters = meters_of(settings)
        self.audit = Measured(_audit(settings, sandbox, self.masks), self.meters)
        self.capacity = _capacity(settings)
        self.managers: list[SessionManager] = []
        self.checks = Checks()

    @property
    def sessions(self) -> list[Session]:
        """Every open session of the server."""
        return [session for manager in self.managers for session in manager.sessions]

    async def aclose(self) -> None:
        """The server has ended."""
        await self.checks.aclose()
        self.audit.note("server_end", {})
        self.audit.close()


class Keep(Protocol):
    """Makes what keeps sessions beyond the end of a server, see `keeping_of`."""

    def __call__(
        self,
        settings: Settings,
        state: Path,
        sandbox: str,
        permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
        /,
    ) -> tuple[Keeping | None, str]:
        """That, or None and why nothing does."""


@asynccontextmanager
async def parts(
    settings: Settings,
    sandbox: Sandbox,
    commons: Commons | None = None,
    *,
    keep: Keep = keeping_of,
    roll: Roll | None = None,
    others: Others | None = None,
) -> AsyncIterator[Parts]:
    """Build all parts; close them in reverse order. Raises KernelMcpError.

    `commons` are those of a server that has others beside them. `keep` makes what keeps sessions,
    `roll` gives out their handles, `others` are servers that count as one with this one.
    """
    async with AsyncExitStack() as stack:
        if commons is None:
            commons = Commons(settings, sandbox)
            stack.push_async_callback(commons.aclose)
        meters, audit = commons.meters, commons.audit
        masks = Masks(settings.hidden)  # not those of all: they would tell whether a guess is right
        run = stack.enter_context(RunDirectory.create(settings.state_dir))
        resources = ResourceManager.create(run.path, sandbox.report())
        await stack.enter_async_context(resources.running())
        resources.warn(settings.limits)
        folders = SessionFolders(
            workspaces=settings.workspace or run.path / "w",
            records=run.path / "r",
            layers=run.path / "p",
            keep=settings.workspace is not None,
            by_principal=settings.http is not None,
        )
        folders.workspaces.mkdir(mode=0o700, parents=True, exist_ok=True)
        inspector = Inspector(sandbox)
        rules = InstallRules.of(settings)
        state = run.path.parent
        keeping, unkept = keep(settings, state, sandbox.name, rules.admit)
        own = await anyio.to_thread.run_sync(
            partial(own_environment, settings.python, apart=_apart(sandbox))
        )
        shown = shown_folders(settings, sandbox.name, state, default_cache())
        if own is not None:
            own.require_steady(shown)
        doors = Doors(
            shown,
            run.path,
            audit.note,
            shows=sandbox.shows,
            fixed=(*own_places(), *settings.obeyed, *(own.fixed if own is not None else ())),
            devices=usable_devices(settings.devices, run.path, sandbox.name),
        )
        stack.push_async_callback(doors.aclose)
        import_nothing_from([each.mount.host for each in doors.shown if each.mount.writable])
        await doors.open()
        network = opened(settings, sandbox, run.path, partial(audit.note, "network"))
        stack.push_async_callback(network.aclose)
        await network.open()
        opened_doors = doors.opened(network=bool(network))
        report = resources.report(sandbox.report(opened_doors), settings.limits)
        cold = LocalLauncher(
            sandbox, run, resources=resources, inspector=inspector, doors=doors, network=network
        )
        templates = None
        if sandbox.forks and not settings.no_template:
            shared = [folders.workspaces, folders.layers]
            if keeping is not None:
                shared += [keeping.store.workspaces, keeping.store.layers]
            templates = TemplateLauncher(
                sandbox,
                run,
                cold=cold,
                shared=shared,
                resources=resources,
                inspector=inspector,
                doors=doors,
                network=network,
                variables=settings.environ,
                checkpoints=settings.checkpoints != "off",
            )
        launcher = templates or cold
        stack.push_async_callback(launcher.aclose)
        environments = EnvironmentStore(
            settings.cache_dir,
            sources=sources(settings),
            builder=sandbox.builder(),
            most_bytes=settings.cache_bytes,
            apart=_apart(sandbox),
        )
        factory = KernelFactory(
            settings=settings,
            policy=replace(
                Policy.for_allow(
                    profile_entries(settings),
                    profile_in_force(settings.profile, confined=settings.confined),
                    rules.step,
                    settings.tools,
                ),
                confined=settings.confined,
                network=bool(network),
            ),
            environments=environments,
            launcher=launcher,
            templates=templates,
            requests=lambda: [session.request for session in manager.sessions],
            variables=network.variables,
            vault=network.vault,
            listed=await environments.listed(settings),
        )
        spares = _spares(settings, sandbox, run.path)
        waiting = folders.workspaces
        if folders.keep and spares:
            waiting = stack.enter_context(spare_folder(waiting))
        elif folders.keep:
            sweep_spares(waiting)
        capacity = commons.capacity
        pool = WarmPool(
            factory,
            size=spares,
            at_first=SPARES_AT_FIRST,
            folder=waiting,
            layers=folders.layers,
            capacity=capacity,
            mark=lambda: (doors.sights(), mark_of(own.sites) if own is not None else ()),
        )
        stack.push_async_callback(pool.aclose)
        installer = Installer(
            settings=settings,
            rules=rules,
            workshop=environments.workshop,
            sandbox=sandbox,
            factory=factory,
            scratch=run.path / "i",
        )
        manager = SessionManager(
            settings=settings,
            source=AttachingSource(pool, settings.attach, masks) if settings.attach else pool,
            folders=folders,
            workspace=partial(
                Workspace,
                disk_bytes=settings.limits.disk_bytes,
                mounts=doors.shown,
                masked=masks.pieces if masks else iter,
            ),
            clock=time.monotonic,
            audit=audit,
            capacity=capacity,
            checks=commons.checks,
            preparation=CellInstallations(installer, commons.checks),
            keeping=keeping,
            everyone=lambda: commons.sessions,
            roll=roll,
            others=others,
        )
        commons.managers.append(manager)
        stack.callback(commons.managers.remove, manager)
        doors.at_work = lambda: [each.ledger.add for each in manager.at_work]
        await stack.enter_async_context(manager.running())
        fronts = Fronts(run.path / "f", lambda: manager.sessions)
        await stack.enter_async_context(fronts.running())
        await stack.enter_async_context(
            answering(run.path, partial(_told, settings, manager, fronts))
        )
        yield Parts(
            settings=settings,
            manager=manager,
            factory=factory,
            installer=installer,
            scripts=ScriptReader(settings, rules, environments.interpreters),
            sandbox=sandbox,
            resources=resources,
            report=report,
            audit=audit,
            clock=time.monotonic,
            doors=doors,
            network=network,
            kept=kept_in_words(keeping, unkept),
            meters=meters,
            readiness=Readiness(),
            templates=templates,
            pool=pool,
        )


def _apart(sandbox: Sandbox) -> bool:
    """Whether kernels run as users of their own, who may not read all that the server may."""
    identity = sandbox.identity()
    sandbox.release(identity)
    return identity is not None


def _audit(settings: Settings, sandbox: Sandbox, masks: Masks) -> Audit:
    """The audit trail, with the start of this server written. Raises ConfigError."""
    audit = open_audit(settings.audit_log, masks)
    facts = {
        "version": __version__,
        "pid": os.getpid(),
        "sandbox": sandbox.name,
        "profile": settings.profile,
        "allow": list(settings.allow),
        "python": settings.python,
        "requirements": str(settings.requirements or ""),
        "project": str(settings.project or ""),
        "mounts": [str(mount) for mount in settings.mounts],
        "network": list(settings.network),
        "secrets": list(map(str, settings.secrets)),
        "devices": list(map(str, settings.devices)),
        "variables": [each.name for each in settings.variables],
        "attach": list(map(str, settings.attach)),
        "http": "{}:{}".format(*settings.http) if settings.http is not None else "",
        "callers": callers_in_words(settings),
    }
    audit.note("server_start", facts)
    return audit


async def _told(
    settings: Settings, manager: SessionManager, fronts: Fronts, question: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the operator is told of this server, who asks with `kernel-mcp sessions`."""
    with Barrier("answering the operator") as barrier:
        if (found := await fronts.answer(question)) is not None:
            return found
    if barrier.failure is not None:
        return {"error": reason_of(barrier.failure)}
    now = time.monotonic()
    return {
        "pid": os.getpid(),
        "http": "{}:{}".format(*settings.http) if settings.http is not None else "",
        "folder": str(Path.cwd()),
        "sessions": [await described(each, now) for each in manager.sessions],
    }


def callers_in_words(settings: Settings) -> str:
    """How the server knows who calls, for the audit trail."""
    if settings.http is None:
        return "one client on stdin and stdout"
    if settings.no_auth:
        return "everyone on this machine, as one"
    ways = {"tokens": settings.tokens, "issuer": settings.issuer}
    known = [name for name, there in ways.items() if there]
    return " and ".join(known) or "one token, made at the start"


def meters_of(settings: Settings) -> Meters:
    """Those that `/metrics` shows; on stdin and stdout nobody could ask for them."""
    if settings.http is None:
        return Meters()
    from kernel_mcp.http.operations import meters_of_http

    return meters_of_http()


def _capacity(settings: Settings) -> Capacity:
    """The kernels that the system's limits allow. Raises ConfigError when no session fits."""
    capacity = Capacity.of_this_process()
    beside = 0 if settings.no_template else TEMPLATE_KERNELS
    if reason := capacity.shortage(beside + 1):
        raise ConfigError(f"the system has no room for a single session: {reason}")
    if reason := capacity.shortage(beside + settings.max_sessions):
        logger.warning(
            "the system has room for some %d sessions with a kernel at a time instead of %d "
            "(--max-sessions); others are refused: %s",
            (capacity.kernels() or 0) - beside,
            settings.max_sessions,
            reason,
        )
    return capacity


def _spares(settings: Settings, sandbox: Sandbox, folder: Path) -> int:
    """Number of spare kernels: none where they would see their folder by its name."""
    remapped = sandbox.guest_paths(folder, folder).workspace != str(folder)
    return settings.warm if remapped else 0


async def run_stdio(settings: Settings, sandbox: Future[Sandbox]) -> None:
    """Serve one client on stdin and stdout until it closes them or a signal arrives."""
    async with (
        parts(settings, await proven(sandbox)) as built,
        stdio_wire() as wire,
        anyio.create_task_group() as tasks,
    ):
        words = built.instructions()
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        tasks.start_soon(wire.greet, words)
        tasks.start_soon(warm_up, built)
        with anyio.move_on_after(TEMPLATE_S):
            await built.factory.begun.wait()
        protocol = await anyio.to_thread.run_sync(_begin_import().result)
        collect_seldom()
        tasks.start_soon(Reaper(built.manager, settings.idle_timeout_s, time.monotonic).run)
        tasks.start_soon(stay_within_bounds, settings, lambda: built.manager.sessions)
        await protocol.serve_stdio(built, wire, words)
        tasks.cancel_scope.cancel()


def _begin_import() -> Future[ModuleType]:
    """Import the MCP SDK in a thread; meanwhile other processes prepare a first kernel."""
    sysconfig.get_config_vars()  # Python does not bear that two threads are the first to ask
    executor = ThreadPoolExecutor(1, "import")
    importing = executor.submit(import_module, PROTOCOL)
    executor.submit(import_module, TOOLS)
    executor.shutdown(wait=False)
    return importing


def collect_seldom() -> None:
    """End the pause of the garbage collector, which looks at what was imported no more.

    Of many sessions it has much to look at: by its own measure it did so every few cells.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


async def proven(sandbox: Future[Sandbox]) -> Sandbox:
    """What `begin_proof` has found. Raises SandboxUnavailable."""
    return await anyio.to_thread.run_sync(sandbox.result)


async def stay_within_bounds(settings: Settings, sessions: Callable[[], Sequence[Session]]) -> None:
    """Have sessions give up what the server holds for them when that is too much."""
    memory = OwnMemory()
    try:
        await ServerBounds(
            sessions, memory=memory, most_memory=memory_bound(settings.max_sessions)
        ).run()
    finally:
        memory.close()


async def warm_up(built: Parts) -> None:
    """Import what kernels need, and again while that fails."""
    for pause_s in itertools.chain(RETRIES_S, itertools.repeat(RETRIES_S[-1])):
        with Barrier("preparing for kernels") as barrier:
            await built.factory.warm_up()
            built.readiness.ready = True
            await built.pool.fill()
        if barrier.failure is None:
            return
        built.readiness.reason = "preparing for kernels has failed; the log says why"
        await anyio.sleep(pause_s)


async def cancel_on_signal(scope: anyio.CancelScope) -> None:
    """Have the first signal end the server in order, and none after it cut the last saves short."""
    try:
        with anyio.open_signal_receiver(*ENDING) as signals:
            async for number in signals:
                logger.info("stopping on %s", signal.Signals(number).name)
                end_soon()
                scope.cancel()
    finally:
        stay()


def _allow_many_files() -> None:
    """Raise RLIMIT_NOFILE to its hard limit: a session takes some twenty descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _mask_log(settings: Settings) -> None:
    """Keep values of variables out of the log, and say which stay in outputs."""
    if masks := Masks(settings.hidden):
        for handler in logging.getLogger().handlers:
            if isinstance(handler.formatter, Lines):
                handler.formatter.hide = masks.anywhere
    for each in settings.variables:
        if each.short:
            logger.warning(
                "--env %s: outputs show its value: one of less than %d characters cannot be masked "
                "without masking ordinary text.",
                each.name,
                LEAST_MASKED,
            )


def _leave_no_core() -> None:
    """Have no memory of this process written to disk; 1 counts for programs that take it, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def prepare_process(settings: Settings) -> None:
    """Have this process be fit for sessions: log, core dumps, descriptors, threads."""
    _mask_log(settings)
    if settings.secrets:
        _leave_no_core()
    _allow_many_files()
    sys.setswitchinterval(SWITCH_S)


def serve(
    settings: Settings,
    sandbox: Future[Sandbox],
    run: Callable[[Settings, Future[Sandbox]], Awaitable[None]] = run_stdio,
) -> int:
    """Have `run` serve until it is told to stop; its exit code."""
    prepare_process(settings)
    with Barrier("serving") as barrier:
        try:
            anyio.run(run, settings, sandbox)
        except KernelMcpError as error:
            print(f"kernel-mcp: {error}", file=sys.stderr)
            return 1
    if barrier.failure is not None:
        print(f"kernel-mcp: {explained(barrier.failure, 'serving')}", file=sys.stderr)
        return 1
    return 0
