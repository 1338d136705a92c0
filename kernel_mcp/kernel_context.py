"""Build what the kernels of a server need: folders, grants, launchers, environments, a factory.

Nothing here knows how sessions work. A first template starts from this alone, while the rest of the
server is still being imported.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from kernel_mcp import __version__
from kernel_mcp.barriers import Barrier
from kernel_mcp.config.grants import KINDS
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.own import OwnEnvironment, own_environment
from kernel_mcp.environments.store import EnvironmentStore, default_cache
from kernel_mcp.environments.uv import sources
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import exposed_mounts, usable_devices
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.mounts import MountGrants
from kernel_mcp.launch.network import granted_network
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.process import import_nothing_from, own_places
from kernel_mcp.output.text import Masks
from kernel_mcp.packages.requirements import InstallRules
from kernel_mcp.policy import TOOL_MODULES, Policy, profile_in_force
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.select import builder_for
from kernel_mcp.sessions.audit import AuditLog
from kernel_mcp.sessions.capacity import Capacity
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.persistence_setup import persistence_of
from kernel_mcp.sessions.pool import pool_folder_in, sweep_pools
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.storage import SessionFolders
from kernel_mcp.telemetry import Meters, Readiness

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from kernel_mcp.sessions.manager import SessionManager
    from kernel_mcp.sessions.session import Session

logger = logging.getLogger(__name__)

RETRIES_S = (30.0, 60.0, 300.0)
"""Seconds between attempts to prepare for kernels, as while there is no network."""
TEMPLATE_KERNELS = 1
"""Number of kernels that a template counts for in the system's limits."""


def shared_context(settings: Settings, sandbox: Sandbox) -> SharedContext[Session]:
    """Open the events of a server that has sessions. Raises ConfigError."""
    facts = {
        "pid": os.getpid(),
        "sandbox": sandbox.name,
        "profile": settings.profile,
        "allow": list(settings.allow),
        "python": settings.python,
        "requirements": str(settings.requirements or ""),
        "project": str(settings.project or ""),
        **{kind.field: kind.texts(settings) for kind in KINDS},
    }
    return SharedContext(open_events(settings, facts), _capacity(settings))


def open_events(settings: Settings, facts: Mapping[str, Any]) -> Events:
    """Open the audit trail and the meters, and record a server's start. Raises ConfigError."""
    masks, audit = Masks(settings.masked_values), None
    if settings.audit_log is not None:
        audit = AuditLog(settings.audit_log, masks=masks)
    events = Events(audit, meters_of(settings), audits_code=settings.audit_code)
    http = "{}:{}".format(*settings.http) if settings.http is not None else ""
    callers = callers_in_words(settings)
    events.note("server_start", {"version": __version__, **facts, "http": http, "callers": callers})
    return events


class PersistenceFactory(Protocol):
    """Factory of session persistence, see `persistence_of`."""

    def __call__(
        self,
        settings: Settings,
        state: Path,
        sandbox: str,
        permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
        /,
    ) -> tuple[Persistence | None, str]:
        """Return the persistence and "", or None and the reason why sessions are not persisted."""


@dataclass(frozen=True, slots=True)
class KernelContext:
    """The objects of a server that exist before the first session.

    `unpersisted_reason` is the reason why sessions are not persisted. `managers` is empty until
    sessions are served. `pool_size` is the number of pooled kernels, whose folders lie in
    `pool_folder`.
    """

    settings: Settings
    shared: SharedContext[Session]
    assembly: KernelAssembly
    folders: SessionFolders
    masks: Masks
    rules: InstallRules
    persistence: Persistence | None
    unpersisted_reason: str
    own_environment: OwnEnvironment | None
    templates: TemplateLauncher | None
    cold: LocalLauncher
    environments: EnvironmentStore
    factory: KernelFactory
    managers: list[SessionManager]
    pool_size: int
    pool_folder: Path
    readiness: Readiness = field(default_factory=Readiness)
    preparing: anyio.Lock = field(default_factory=anyio.Lock)

    async def prepare(self) -> None:
        """Build the environment and the template, once; retry while that fails."""
        async with self.preparing:
            pauses_s = itertools.chain(RETRIES_S, itertools.repeat(RETRIES_S[-1]))
            while not self.readiness.ready:
                with Barrier("preparing for kernels") as barrier:
                    await self.factory.warm_up()
                if barrier.failure is None:
                    self.readiness.ready = True
                    return
                self.readiness.reason = "preparing for kernels has failed; the log says why"
                await anyio.sleep(next(pauses_s))


@asynccontextmanager
async def kernel_assembly(
    settings: Settings,
    sandbox: Sandbox,
    own: OwnEnvironment | None,
    note: Callable[[str, Mapping[str, Any]], None] = lambda _event, _facts: None,
) -> AsyncIterator[KernelAssembly]:
    """Build what every start of a kernel needs, with all grants of the operator opened.

    `own` is the operator's environment; `note` writes audit events. Raises KernelMcpError.
    """
    async with AsyncExitStack() as stack:
        runs = stack.enter_context(RunDirectory.create(settings.state_dir))
        resources = ResourceManager.create(runs.path, sandbox.report())
        await stack.enter_async_context(resources.running())
        shown = exposed_mounts(settings, sandbox.name, runs.path.parent, default_cache())
        if own is not None:
            own.require_steady(shown)
        mounts = MountGrants(
            shown,
            runs.path,
            note,
            mount_method=sandbox.mount_method,
            fixed=(*own_places(), *settings.trusted_paths, *(own.fixed if own is not None else ())),
            devices=usable_devices(settings.devices, runs.path, sandbox.name),
            builder=partial(builder_for, sandbox),
        )
        stack.push_async_callback(mounts.aclose)
        import_nothing_from([each.mount.host for each in mounts.shown if each.mount.writable])
        await mounts.open()
        network = granted_network(settings, sandbox, runs.path, partial(note, "network"))
        stack.push_async_callback(network.aclose)
        await network.open()
        yield KernelAssembly(sandbox, runs, resources=resources, mounts=mounts, network=network)


async def own_environment_of(settings: Settings, sandbox: Sandbox) -> OwnEnvironment | None:
    """Return the environment that `--python` names, or None. Raises KernelMcpError."""
    work = partial(own_environment, settings.python, apart=_apart(sandbox))
    return await anyio.to_thread.run_sync(work)


@asynccontextmanager
async def kernel_context(
    settings: Settings,
    sandbox: Sandbox,
    shared: SharedContext[Session] | None = None,
    *,
    persistence_factory: PersistenceFactory = persistence_of,
) -> AsyncIterator[KernelContext]:
    """Build the context; tear it down in reverse order. Raises KernelMcpError.

    `shared` is given if the server has several tenant pools; by default it is built and closed
    here. `persistence_factory` builds the persistence of sessions.
    """
    async with AsyncExitStack() as stack:
        if shared is None:
            shared = shared_context(settings, sandbox)
            stack.callback(shared.events.close)
        masks = Masks(
            settings.masked_values
        )  # of this pool only: a masked value of another pool would confirm a guess
        if settings.workspace is not None:
            _make(settings.workspace)
        own = await own_environment_of(settings, sandbox)
        assembly = await stack.enter_async_context(
            kernel_assembly(settings, sandbox, own, shared.events.note)
        )
        assembly.resources.warn(settings.limits)
        run = assembly.runs
        folders = SessionFolders(
            workspaces=settings.workspace or run.path / "w",
            records=run.path / "r",
            layers=run.path / "p",
            keep=settings.workspace is not None,
            by_principal=settings.http is not None,
        )
        _make(folders.workspaces)
        rules = InstallRules.of(settings)
        persistence, unpersisted_reason = persistence_factory(
            settings, run.path.parent, sandbox.name, rules.admit
        )
        cold = LocalLauncher(assembly)
        templates = None
        if sandbox.forks and not settings.no_template:
            shared_folders = [folders.workspaces, folders.layers]
            if persistence is not None:
                shared_folders += [persistence.store.workspaces, persistence.store.layers]
            templates = TemplateLauncher(
                assembly,
                cold=cold,
                shared=shared_folders,
                variables=settings.kernel_environment,
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
        managers: list[SessionManager] = []
        factory = KernelFactory(
            settings=settings,
            policy=replace(
                Policy.for_allow(
                    settings.allow,
                    profile_in_force(settings.profile, confined=settings.confined),
                    rules.step,
                    settings.tools,
                ).with_modules(TOOL_MODULES * bool(settings.tool_servers)),
                confined=settings.confined,
                network=bool(assembly.network),
            ),
            environments=environments,
            launcher=launcher,
            templates=templates,
            requests=lambda: [each.request for manager in managers for each in manager.sessions],
            network=assembly.network,
            pinned=await environments.read_pinned(settings),
        )
        pool_size = _pool_size(settings, sandbox, run.path)
        pool_folder = folders.workspaces
        if folders.keep and pool_size:
            pool_folder = stack.enter_context(pool_folder_in(pool_folder))
        elif folders.keep:
            sweep_pools(pool_folder)
        yield KernelContext(
            settings=settings,
            shared=shared,
            assembly=assembly,
            folders=folders,
            masks=masks,
            rules=rules,
            persistence=persistence,
            unpersisted_reason=unpersisted_reason,
            own_environment=own,
            templates=templates,
            cold=cold,
            environments=environments,
            factory=factory,
            managers=managers,
            pool_size=pool_size,
            pool_folder=pool_folder,
        )


def _make(workspaces: Path) -> None:
    """Create the folder of all workspaces. Raises ConfigError."""
    try:
        workspaces.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the workspaces of sessions cannot be kept in {workspaces}: {error.strerror}; name a "
            "folder that can be made with --workspace"
        ) from error


def _apart(sandbox: Sandbox) -> bool:
    """Return True if kernels run as other users than the server, with fewer rights to read."""
    identity = sandbox.identity()
    sandbox.release(identity)
    return identity is not None


def callers_in_words(settings: Settings) -> str:
    """Return how callers are authenticated, in words for the audit trail."""
    if settings.http is None:
        return "one client on stdin and stdout"
    if settings.no_auth:
        return "everyone on this machine, as one"
    ways = {"tokens": settings.tokens, "issuer": settings.issuer}
    known = [name for name, there in ways.items() if there]
    return " and ".join(known) or "one token, made at the start"


def meters_of(settings: Settings) -> Meters:
    """Return the meters of a server on HTTP or of a node; on stdio a null object."""
    if settings.http is None and not settings.fleet_store:
        return Meters()
    from kernel_mcp.http.operations import meters_of_http

    return meters_of_http(settings)


def _pool_size(settings: Settings, sandbox: Sandbox, folder: Path) -> int:
    """Return the number of pooled kernels; 0 where a kernel sees its workspace's host path.

    Such a kernel could not be given to a session with another folder.
    """
    remapped = sandbox.guest_paths(folder, folder).workspace != str(folder)
    return settings.warm if remapped else 0


def _capacity(settings: Settings) -> Capacity:
    """Return the number of kernels that system limits allow. Raises ConfigError if none fits."""
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
