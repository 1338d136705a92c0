"""From a session's request to a live kernel: environment, policy, launch, channels."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.environments.build import Fitting, Terms
from kernel_mcp.environments.build_sandbox import INSTALL_TIMEOUT_S
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.metadata import EnvironmentSpec, import_names, provided_modules
from kernel_mcp.environments.out_of_tree import unseen, unseen_code
from kernel_mcp.environments.own import remarks
from kernel_mcp.environments.pinned_requirements import NOTHING, PinnedRequirements
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.kernels.channels import Floods
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.launch.base import START_TIMEOUT_S, KernelEnvironment, LaunchRequest, Replay
from kernel_mcp.launch.network import Network
from kernel_mcp.launch.process import KernelProcess, Launcher
from kernel_mcp.launch.rundir import compile_guest
from kernel_mcp.network.secrets import Vault
from kernel_mcp.output.text import Masks
from kernel_mcp.policy import DATA_MODULES, NextStep, Policy
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

from kernel_mcp.kernels.kernel import Kernel


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """A session's request for its kernels.

    python, packages  empty for those of the server's own environment
    beside            True for a second kernel in the workspace of another one
    layer             folder of packages installed by the session; None if it can install none
    limits            limits of the session; None for the server's
    network           requested hosts; None for all that the operator grants
    tools             requested tool servers; None for all that the operator grants
    interpreter       the kind of kernel
    replay            set for a kernel that repeats cells
    """

    session: str
    workspace: Path
    python: str = ""
    packages: tuple[Requirement, ...] = ()
    beside: bool = False
    layer: Path | None = None
    limits: Limits | None = None
    network: tuple[str, ...] | None = None
    tools: tuple[str, ...] | None = None
    interpreter: Interpreter = PYTHON
    replay: Replay | None = None

    @property
    def layers(self) -> tuple[Path, ...]:
        """Folders of packages besides those of the environment."""
        repeated = None if self.replay is None else self.replay.layer
        return tuple(each for each in (self.layer, repeated) if each is not None)

    @property
    def has_tools(self) -> bool:
        """True if its code may call tools."""
        return self.replay is None or "tools" in self.replay.opened

    @property
    def at_home(self) -> bool:
        """True if the server's own environment satisfies it."""
        return not (self.python or self.packages)

    @property
    def ordinary(self) -> bool:
        """True if any kernel of the server satisfies it, such as a pooled one."""
        own = self.beside or self.interpreter.name or self.limits is not None or self.replay
        return self.at_home and not own


async def log_progress(text: str) -> None:
    """Write a progress report to the log."""
    logger.info(text)


class KernelSource(Protocol):
    """Starts kernels that are ready for cells."""

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel. Raises KernelMcpError."""


class InterpreterSources:
    """The `KernelSource` of all interpreters: one source for each, by the interpreter's name."""

    def __init__(self, python: KernelSource, others: Mapping[str, KernelSource]) -> None:
        """`python` starts this server's own kernels."""
        self._sources = {PYTHON.name: python, **others}

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel of the requested interpreter. Raises KernelMcpError."""
        return await self._sources[request.interpreter.name].start(request, progress)


KERNEL_MODULE = "kernel_mcp.kernels.kernel"
"""Module that the first start of a kernel imports in a thread. An earlier import would delay the
server's first answer."""

FRESH_S = 600.0
"""Seconds before a used environment is looked up in the store again."""

_NOBODY = KernelRequest("", Path("/"))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Built:
    """An environment, the modules its packages provide, and the policy that allows those."""

    environment: KernelEnvironment
    modules: frozenset[str]
    policy: Policy
    since: float = field(default_factory=time.monotonic)

    @property
    def fresh(self) -> bool:
        environment = self.environment
        in_time = time.monotonic() < self.since + FRESH_S
        return in_time and environment.python.exists() and not environment.stale

    @property
    def whole(self) -> list[str]:
        """Modules that a template imports: the top-level modules of the packages.

        For an operator's own environment, also those of `DATA_MODULES` that it contains.
        """
        support = self.environment.support
        there = chain.from_iterable(support.modules.values()) if support is not None else ()
        return sorted(
            {name for name in self.modules if "." not in name} | DATA_MODULES.intersection(there)
        )


class Templates(Protocol):
    """Template processes, one per environment, which import modules ahead and fork kernels."""

    def prepare(self, environment: KernelEnvironment, preload: Sequence[str] = ()) -> None:
        """Start a template of `environment` that imports `preload`; returns at once."""

    async def ready(self, environment: KernelEnvironment) -> bool:
        """Wait until that template is ready or has failed; return True if it can fork."""

    def refusal(self, environment: KernelEnvironment) -> str:
        """Return the reason if that template is refused, as its kernels are not confined, or ""."""


class KernelFactory:
    """The `KernelSource` that builds the environment, then launches a kernel and connects to it."""

    def __init__(
        self,
        *,
        settings: Settings,
        policy: Policy,
        environments: EnvironmentStore,
        launcher: Launcher,
        templates: Templates | None = None,
        requests: Callable[[], Iterable[KernelRequest]] = tuple,
        network: Network | None = None,
        pinned: PinnedRequirements = NOTHING,
    ) -> None:
        """`templates` prepares a template for the server's own environment; `launcher` forks it.

        `requests` returns the requests of all sessions; environments of no request may be removed.
        Kernels have the variables of `network`, and trust its certificates. `pinned` are the
        packages that the operator's files list.
        """
        self._listed = pinned
        self._variables = tuple(network.variables.items()) if network is not None else ()
        self._vault = network.vault if network is not None else Vault()
        self._settings = settings
        self._policy = policy
        self._environments = environments
        self._launcher = launcher
        self._templates = templates
        self._requests = requests
        self._built: dict[EnvironmentSpec, _Built] = {}
        self._own = Fitting(environments, self._spec(_NOBODY))
        self._masks = Masks(settings.masked_values)
        self._floods = Floods()
        self.begun = anyio.Event()
        """Set once the first template was started, or its start has failed."""

    async def environment(
        self, request: KernelRequest, progress: ProgressCallback
    ) -> tuple[KernelEnvironment, Policy]:
        """Return the environment of a request, built if missing, and its policy.

        Raises EnvironmentBuildError.
        """
        spec = self.spec(request)
        built = self._built.get(spec)
        if built is None or not built.fresh:
            environment = await self._ensure(request, progress)
            if self._vault:
                environment = replace(
                    environment,
                    readonly=(*environment.readonly, *self._vault.visible_paths),
                    replaced=self._vault.replaced(environment.readonly),
                )
            spec = self.spec(request)  # without packages that turned out to be unavailable
            await compile_guest(environment)
            names = import_names(environment, spec)
            provided = await anyio.to_thread.run_sync(provided_modules, environment)
            present = chain.from_iterable(provided.values())
            policy = self._policy.with_modules(names).with_installed(present)
            mounts = self._settings.mounts
            project = self._listed.project
            own_code = unseen_code(project.code, mounts, project.local)
            told = {name: f"{each}; {project.whole}" for name, each in own_code.items()}
            if hidden := unseen(environment, mounts) or told:
                policy = replace(policy, step=_MountFirst(hidden, policy.step))
            first = self._built.get(spec) is None
            built = self._built[spec] = _Built(environment, names, policy)
            if first and spec == self._own.spec:
                for remark in remarks(environment, mounts)[1:]:
                    logger.warning("the environment of kernels: %s", remark)
            if first and built.whole and self._templates is not None and request.at_home:
                await progress(f"Preloading {', '.join(built.whole)}; starting a kernel")
        if self._templates is not None and request.at_home:
            self._templates.prepare(built.environment, built.whole)
        return built.environment, _fitting(built.policy, request)

    async def _ensure(
        self, request: KernelRequest, progress: ProgressCallback
    ) -> KernelEnvironment:
        if self.spec(request) == self._own.spec:
            terms = Terms(most_bytes=self._settings.cache_bytes, flag="--cache-size")
            return await self._own.ensure(progress, terms)
        self._release_unused()
        own, _ = await self.environment(_NOBODY, progress)
        most = self._settings.install_bytes
        # the environment includes the operator's packages, which do not count towards the limit
        most += self._environments.size(own) if most else 0
        try:
            with anyio.fail_after(INSTALL_TIMEOUT_S if request.packages else None):
                spec = self.spec(request)
                return await self._environments.ensure(spec, progress, Terms(True, most))
        except TimeoutError:
            raise EnvironmentBuildError(
                f"Building an environment with {', '.join(map(str, request.packages))} was not "
                f"done after {INSTALL_TIMEOUT_S:g} s and was stopped. What has been downloaded is "
                "kept: try again, or ask for fewer packages."
            ) from None

    def _release_unused(self) -> None:
        used = {self._own.spec, *map(self.spec, self._requests())}
        for spec in self._built.keys() - used:
            del self._built[spec]
            self._environments.release(spec)

    async def warm_up(self) -> None:
        """Build the server's own environment and its template. Raises EnvironmentBuildError."""
        try:
            environment, _ = await self.environment(_NOBODY, log_progress)
        finally:
            self.begun.set()
        if self._templates is not None:
            await self._templates.ready(environment)
        await anyio.to_thread.run_sync(self._environments.evict)

    def about(self, environment: KernelEnvironment) -> list[str]:
        """Return remarks on an environment of the operator's, or of a project of theirs."""
        found = remarks(environment, self._settings.mounts, built=bool(self._listed))
        absent = self._listed.project.absent
        return [*found, absent] if absent else found

    def refusal(self, environment: KernelEnvironment) -> str:
        """Return the reason if no kernels of `environment` are forked from a template, or ""."""
        return "" if self._templates is None else self._templates.refusal(environment)

    @property
    def missing(self) -> Iterable[str]:
        """The operator's packages that are known to be unavailable."""
        return self._own.unfit

    @property
    def remarks(self) -> list[str]:
        """Sentences for the model on the operator's packages that are not available."""
        return self._own.remarks

    @property
    def origins(self) -> tuple[str, ...]:
        """The flags whose files list packages of the kernels."""
        return self._listed.origins

    async def uv_version(self) -> str:
        """Return the version of uv that builds environments; empty if unknown."""
        return await self._environments.uv_version()

    def prepared(self, request: KernelRequest) -> bool:
        """Return True if a kernel can start without building an environment."""
        return self.spec(request) in self._built

    def version(self, request: KernelRequest) -> str:
        """Return the Python version that runs a request's code; empty before it is known."""
        built = self._built.get(self.spec(request))
        return "" if built is None else built.environment.version

    def policy(self, request: KernelRequest) -> Policy:
        """Return the import policy for a request's code; never builds an environment."""
        spec = self.spec(request)
        built = self._built.get(spec)
        if built is None:
            return self._policy.with_modules(spec.names)
        return _fitting(built.policy, request)

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel for `request`. Raises EnvironmentBuildError, LaunchError."""
        if KERNEL_MODULE not in sys.modules:
            await anyio.to_thread.run_sync(import_module, KERNEL_MODULE)
        environment, policy = await self.environment(request, progress)
        handle = await self._launcher.launch(
            LaunchRequest(
                session=request.session,
                environment=environment,
                policy=policy,
                limits=request.limits or self._settings.limits,
                workspace=request.workspace,
                layers=request.layers,
                replay=request.replay,
                variables=(*self._settings.kernel_environment, *self._variables),
                tools=bool(self._settings.tool_servers) and request.has_tools,
            )
        )
        kernel = self._connect(handle, environment, policy)
        try:
            await kernel.ready(START_TIMEOUT_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel

    def _connect(
        self, handle: KernelProcess, environment: KernelEnvironment, policy: Policy
    ) -> Kernel:
        return Kernel(
            handle,
            environment=environment,
            policy=policy,
            masks=self._masks,
            floods=self._floods,
        )

    def spec(self, request: KernelRequest) -> EnvironmentSpec:
        """Return the Python and packages that a request requires."""
        if request.python or request.packages:
            return self._spec(request).without(self._own.unfit)
        return self._own.spec

    def _spec(self, request: KernelRequest) -> EnvironmentSpec:
        return EnvironmentSpec.for_allow(
            self._settings.allow,
            python=request.python or self._settings.python,
            packages=request.packages,
            pinned=self._listed,
        )


@dataclass(frozen=True, slots=True)
class _MountFirst:
    """Advice on missing modules: first on those in folders that are not mounted."""

    hidden: Mapping[str, str]
    otherwise: NextStep

    def __call__(self, module: str, *, once: bool) -> str:
        found = self.hidden.get(module.partition(".")[0])
        return self.otherwise(module, once=once) if found is None else f"{found}."


def _fitting(policy: Policy, request: KernelRequest) -> Policy:
    for layer in map(Layer, request.layers):
        if not layer.empty:
            present = chain.from_iterable(layer.modules().values())
            policy = policy.with_modules(layer.permitted()).with_installed(present)
    return policy
