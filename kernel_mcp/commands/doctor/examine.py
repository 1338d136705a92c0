"""Examine the sandbox backends of this machine."""

from __future__ import annotations

import logging
import platform
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from kernel_mcp import __version__
from kernel_mcp.attached.source import description_of
from kernel_mcp.barriers import in_full, refusal_of
from kernel_mcp.commands.doctor.diagnosis import UNCOUNTED, Diagnosis, Examination
from kernel_mcp.commands.doctor.named_kernels import examine_kernels
from kernel_mcp.commands.doctor.trials import (
    CHECKPOINTS,
    LIMITS,
    TRIALS,
    UNTRIED,
    Trial,
    TrialKernel,
    coming_back,
    killed_server,
    through_grants,
    through_proxy,
    through_self_test,
)
from kernel_mcp.config.grants import restricted_to
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.build import Fitting, remark
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.own import remarks
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import ProgressCallback, sources
from kernel_mcp.errors import (
    ConfigError,
    EnvironmentBuildError,
    KernelMcpError,
    LaunchError,
    SandboxUnavailable,
)
from kernel_mcp.http.serving import bound
from kernel_mcp.identity.tokens import TokenFile
from kernel_mcp.kernel_context import kernel_assembly, own_environment_of
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess, Launcher
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.linux.process import find_program
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.policy import Policy, profile_in_words
from kernel_mcp.sandbox.base import ContainerOptions, Sandbox
from kernel_mcp.sandbox.remedies import surroundings
from kernel_mcp.sandbox.select import (
    AUTOMATIC,
    BACKENDS,
    WEAKER,
    proven_sandbox,
    select_sandbox,
)
from kernel_mcp.sandbox.self_test import REFUSED_CALL, Check, thorough_checks
from kernel_mcp.sessions.capacity import Capacity
from kernel_specs.template import immortal

logger = logging.getLogger(__name__)

UNCONFINED = "none"
SHORT_FOLDER = "/var/tmp"
"""Short enough for socket paths, at most 107 bytes."""


async def examine_all(settings: Settings, progress: ProgressCallback) -> Diagnosis:
    """Examine the backends of `--sandbox`, or all but `none`. Raises ConfigError."""
    entrance = await anyio.to_thread.run_sync(_entrance, settings)
    environment, problem = None, ""
    store = EnvironmentStore(settings.cache_dir, sources=sources(settings))
    store.forget_unfit()
    listed = await store.read_pinned(settings)
    wanted = EnvironmentSpec.for_allow(settings.allow, python=settings.python, pinned=listed)
    fitting = Fitting(store, wanted)
    try:
        environment = await fitting.ensure(progress)
    except EnvironmentBuildError as error:
        problem = f"no kernel could be started: {error}"
    names = list(settings.sandbox)
    if names == ["auto"]:
        ordered = dict.fromkeys([*AUTOMATIC, *WEAKER, *BACKENDS])
        names = [name for name in ordered if name != UNCONFINED]
    found: dict[str, Examination] = {}
    failures: list[KernelMcpError] = []
    used, refusal = "", ""

    async def choose() -> None:
        nonlocal used, refusal
        used, refusal = await anyio.to_thread.run_sync(_used, settings)

    async def one(name: str) -> None:
        await progress(f"examining {name} …")
        try:
            found[name] = await examine(name, settings, environment, listed.origins)
        except Exception as error:  # the other backends are examined all the same
            if (refusal := refusal_of(error)) is not None:
                failures.append(refusal)
            else:
                logger.debug("examining %s failed", name, exc_info=error)
                found[name] = Examination(name, f"it could not be examined: {in_full(error)}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(choose)
        for name in names:
            tasks.start_soon(one, name)
    for failure in failures:
        raise failure
    versions = await anyio.to_thread.run_sync(_versions, environment)
    missing = [*entrance, *(remark(name, why) for name, why in fitting.unfit.items())]
    if environment is not None:
        told = remarks(environment, settings.mounts)[1:]
        flag = "--project" if settings.project else "--python"
        missing += [f"{flag}: {remark}" for remark in told]
    policy = profile_in_words(settings, used)
    variables, advised = tuple(map(str, settings.variables)), tuple(missing)
    examined = tuple(found[name] for name in names)
    if tight := Capacity.of_this_process().shortage(settings.max_sessions):
        advised = (*advised, f"{tight} (sessions are {settings.max_sessions}, --max-sessions)")
    attached = tuple([await description_of(each) for each in settings.attach])
    kernels: tuple[Check, ...] = ()
    if used and environment is not None and settings.kernels:
        await progress(f"trying {', '.join(each.name for each in settings.kernels)} …")
        with TemporaryDirectory(prefix="kernel-mcp-", dir=SHORT_FOLDER) as folder:
            kernels = await examine_kernels(settings, Path(folder))
    return Diagnosis(
        versions,
        examined,
        used,
        refusal,
        problem,
        policy,
        advised,
        variables,
        attached,
        kernels,
        tuple(each.about for each in settings.tool_servers),
    )


def _entrance(settings: Settings) -> list[str]:
    """Return the reasons why clients could not connect. Raises ConfigError for a bad tokens file.

    A busy port is only reported: a server with these flags may be what is listening there.
    """
    if settings.http is None:
        return []
    if settings.tokens is not None:
        TokenFile(settings.tokens)
    try:
        bound(settings.http).close()
    except ConfigError as busy:
        return [str(busy)]
    return []


async def examine(
    name: str,
    settings: Settings,
    environment: KernelEnvironment | None,
    files: Sequence[str] = (),
) -> Examination:
    """Examine one backend; without an `environment` no kernel is started.

    `files` are the flags whose files list packages.
    """
    try:
        options = ContainerOptions.of(settings)
        choose = partial(select_sandbox, name, container=options)
        sandbox = await anyio.to_thread.run_sync(choose)
        checks = await anyio.to_thread.run_sync(thorough_checks, sandbox)
    except SandboxUnavailable as refusal:
        return Examination(name, problem=str(refusal))
    async with AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kernel-mcp-", dir=SHORT_FOLDER))
        stack.callback(remove_tree, folder)
        found = _summed_up(checks)
        assembly, refused = await _opened(replace(settings, state_dir=folder), sandbox, stack)
        found += refused
        runs, mounts, network = assembly.runs, assembly.mounts, assembly.network
        if network:
            found.append(Check("network", True, f"open to {network.rules}"))
        report = assembly.report(settings.limits)
        report = replace(report, gaps=(*report.gaps, *mounts.gaps))
        if environment is not None:
            cold = LocalLauncher(assembly)
            opened = through_grants(mounts, settings, environment, files)
            inside = through_self_test(assembly, environment)
            trials = (inside, *TRIALS, *opened, *through_proxy(network))
            variables = (*settings.environ, *network.variables.items())
            runner = partial(_TrialRunner, environment=environment, variables=variables)
            parts = [runner(cold, runs.path, trials=trials).perform_all]
            wanted = settings.checkpoints != "off"
            forks = sandbox.forks and not settings.no_template
            if forks:
                forks_in = runs.path / "f"
                again = (Trial(CHECKPOINTS, coming_back),) if wanted else ()
                forking = TemplateLauncher(
                    assembly,
                    cold=_ForkedOnly(),
                    shared=(forks_in,),
                    checkpoints=wanted,
                )
                forked = runner(forking, forks_in, trials=(*trials, *again))
                parts.append(partial(_through_template, forking, environment, forked))
            orphan = partial(killed_server, name, environment, folder, options)
            parts.append(partial(anyio.to_thread.run_sync, orphan))
            found += await _beside_each_other(parts)
            if not (forks and wanted):
                found.append(Check(CHECKPOINTS, True, NO_TEMPLATE if wanted else OFF))
    return Examination(name, checks=tuple(found), report=report)


async def _opened(
    settings: Settings, sandbox: Sandbox, stack: AsyncExitStack
) -> tuple[KernelAssembly, list[Check]]:
    """Open what code is granted as a server would; if it cannot, nothing, with a failed check."""
    try:
        own = await own_environment_of(settings, sandbox)
        return await stack.enter_async_context(kernel_assembly(settings, sandbox, own)), []
    except (ConfigError, EnvironmentBuildError, LaunchError) as refusal:
        closed = restricted_to(settings, ())
        assembly = await stack.enter_async_context(kernel_assembly(closed, sandbox, None))
        return assembly, [Check("what code is granted", False, _NO_START, str(refusal))]


async def _beside_each_other(
    parts: Sequence[Callable[[], Awaitable[Sequence[Check]]]],
) -> list[Check]:
    """Run all parts concurrently; return their checks in the order of the parts."""
    found: dict[int, Sequence[Check]] = {}

    async def one(number: int) -> None:
        found[number] = await parts[number]()

    async with anyio.create_task_group() as tasks:
        for number in range(len(parts)):
            tasks.start_soon(one, number)
    return [check for number in range(len(parts)) for check in found[number]]


async def _through_template(
    launcher: TemplateLauncher,
    environment: KernelEnvironment,
    runner: _TrialRunner,
) -> list[Check]:
    """Run the self-test and the trials in kernels forked from a template; return the checks."""
    try:
        launcher.prepare(environment)
        if await launcher.ready(environment):
            found = _summed_up(list(launcher.checks(environment)))
            found += await runner.perform_all()
        else:
            refusal = launcher.refusal(environment)
            told = refusal or "none became ready here, so that all kernels start cold"
            found = [Check("a template is confined", not refusal, told, _FORKED_REMEDY)]
    finally:
        with anyio.CancelScope(shield=True):
            await launcher.aclose()
    return [replace(check, name=f"forked: {check.name}") for check in found]


OFF = "no: --checkpoints off"
NO_TEMPLATE = (
    "no: kernels are not forked from a template here, which takes bubblewrap and no --no-template"
)
_NO_START = "a server with these flags does not start in this sandbox"
_FORKED_REMEDY = "start the server with --no-template, and report this as a defect"


class _ForkedOnly:
    """Replaces cold starts, which would hide that a template cannot fork."""

    async def launch(self, request: LaunchRequest) -> KernelProcess:
        """Raise LaunchError."""
        raise LaunchError("the template could not fork a kernel")

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


class _TrialRunner:
    def __init__(
        self,
        launcher: Launcher,
        folder: Path,
        *,
        environment: KernelEnvironment,
        variables: tuple[tuple[str, str], ...],
        trials: Sequence[Trial],
    ) -> None:
        self._trials = trials
        self._variables = variables
        self._launcher = launcher
        self._folder = folder
        self._environment = environment
        self._count = 0
        self._target: TrialKernel | None = None

    async def perform_all(self) -> list[Check]:
        """Perform the trials one after the other, in one kernel for as long as that lives."""
        async with AsyncExitStack() as stack:
            found = [await self._performed(trial, stack) for trial in self._trials]
        return [check for checks in found for check in checks]

    async def _performed(self, trial: Trial, stack: AsyncExitStack) -> list[Check]:
        try:
            if self._target is None or self._target.kernel.dead.is_set():
                self._target = None
                await stack.aclose()
                self._target = await stack.enter_async_context(self._kernel())
            return await trial.perform(self._target)
        except (KernelMcpError, OSError) as error:
            said = f"could not be tried: {error}"[:300]
            return [Check(trial.name, False, said, UNTRIED, tried=False)]

    @asynccontextmanager
    async def _kernel(self) -> AsyncIterator[TrialKernel]:
        self._count += 1
        workspace = self._folder / f"w{self._count}"
        workspace.mkdir(mode=0o700, parents=True)
        policy = Policy.for_allow(("*",))
        handle = await self._launcher.launch(
            LaunchRequest(
                session="doctor",
                environment=self._environment,
                policy=policy,
                limits=LIMITS,
                workspace=workspace,
                variables=self._variables,
            )
        )
        kernel = Kernel(handle, environment=self._environment, policy=policy)
        try:
            await kernel.ready(30)
            handle.egress.open(None, lambda _record: None)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kernel.watch)
                yield TrialKernel(kernel, self._folder / f"r{self._count}")
                kernel.kill()
        finally:
            await kernel.aclose()


def _used(settings: Settings) -> tuple[str, str]:
    try:
        sandbox = proven_sandbox(*settings.sandbox, container=ContainerOptions.of(settings))
    except SandboxUnavailable as refusal:
        return "", str(refusal)
    return sandbox.name, ""


def _summed_up(checks: list[Check]) -> list[Check]:
    """Merge the checks of single system calls into one, unless they fail."""
    calls = [check for check in checks if check.name.endswith(REFUSED_CALL)]
    others = [check for check in checks if check not in calls]
    if not calls:
        return others
    held = sum(check.passed for check in calls)
    failed = [check for check in calls if not check.passed]
    summary = Check("dangerous system calls refused", not failed, f"{held} of {len(calls)}")
    return [*others, summary, *failed]


def _versions(environment: KernelEnvironment | None) -> dict[str, str]:
    from kernel_mcp.sandbox.landlock.rules import version

    found = {
        "kernel-mcp": __version__,
        "python": platform.python_version(),
        "linux": f"{platform.release()} {platform.machine()}",
        "bubblewrap": _bubblewrap(),
        "you": surroundings(),
        "landlock": f"version {version()}" if version() else "not available",
    }
    if environment is not None:
        found["kernel"] = f"Python {environment.version}{_uncounted(environment.version)}"
        for package in environment.packages:
            name, _, number = package.partition("==")
            if name in ("ipykernel", "ipython"):
                found[name] = number
    return found


def _uncounted(version: str) -> str:
    """Return a remark for a Python version without immortal objects; empty for the others."""
    tried = immortal.TRIED
    if version in tried:
        return ""
    return f" ({UNCOUNTED}: on in {', '.join(tried)})"


def _bubblewrap() -> str:
    program = find_program("bwrap")
    if program is None:
        return "not installed"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip().removeprefix("bubblewrap ") or "unknown"
