"""`Installer`: adds packages to a live session, all of them or none.

They are resolved against all installed packages, unpacked into a staging folder and imported in a
short-lived process. Then one rename adds them to the session's layer, and its kernel imports them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.environments.build import BASE_PACKAGES, LEFT_OUT, implied
from kernel_mcp.environments.build_sandbox import INSTALL_TIMEOUT_S, BuildSandbox
from kernel_mcp.environments.layer import STAGING, Generation, Layer, versions
from kernel_mcp.environments.progress import cancel_on
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import InputError, InstallError, KernelMcpError, SessionNotFound
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.packages.pins import PinnedScript, header, installed_pins, locked, pins_of
from kernel_mcp.packages.pip import ConfinedPip
from kernel_mcp.packages.requirements import InstallRules
from kernel_mcp.packages.result import InstallOutcome, Present, principal
from kernel_mcp.packages.verify import try_imports, verify_live
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sessions.session import Session
from kernel_mcp.telemetry.spans import Span

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PINNED = (
    "cloudpickle", "ipykernel", "ipython", "jupyter-client", "jupyter-core", "pyzmq", "tornado",
    "traitlets",
)  # fmt: skip
"""Packages that the kernel itself runs on: they are never replaced."""


class Installer:
    """Adds packages to sessions. `scratch` is a folder of the server for temporary files."""

    def __init__(
        self,
        *,
        settings: Settings,
        rules: InstallRules,
        build_sandbox: BuildSandbox,
        sandbox: Sandbox,
        factory: KernelFactory,
        scratch: Path,
    ) -> None:
        self.rules = rules
        self._settings = settings
        self._build_sandbox = build_sandbox
        self._sandbox = sandbox
        self._factory = factory
        self._scratch = scratch

    async def install(
        self, session: Session, packages: Sequence[str | Requirement], progress: ProgressCallback
    ) -> InstallOutcome:
        """Add packages by name and import them in the session's kernel, while a cell may run.

        Raises InputError, InstallError, EnvironmentBuildError: then nothing has changed. Raises
        SessionNotFound when the session is closed meanwhile.
        """
        names = [str(each) for each in packages]
        try:
            with Span("install", session=session.handle, packages=len(names)):
                outcome = await self._install(session, packages, progress)
        except KernelMcpError as error:
            session.events.note("install", packages=names, outcome=str(error), done=False)
            raise
        session.events.note("install", packages=names, outcome=outcome.summary(), done=True)
        return outcome

    async def pinned(
        self, session: Session, modules: Iterable[str], code: str, progress: ProgressCallback
    ) -> PinnedScript:
        """Return code that imports `modules` as a script with the session's versions of packages.

        Raises EnvironmentBuildError.
        """
        environment, _ = await self._factory.environment(session.request, progress)
        layer = session.request.layer
        pins = await anyio.to_thread.run_sync(pins_of, modules, environment, layer)
        script = f"{header(pins, environment.version)}\n{code}".encode(errors="replace")
        made = await locked(self._build_sandbox, environment, script, self._folder())
        if made.lock:
            return made
        rest = await anyio.to_thread.run_sync(installed_pins, pins, environment, layer)
        return replace(made, requirements=rest)

    async def _install(
        self, session: Session, packages: Sequence[str | Requirement], progress: ProgressCallback
    ) -> InstallOutcome:
        asked = self.rules.admit(packages, standard_library=False)
        if not asked:
            raise InputError("packages is empty: name at least one, such as polars.")
        async with session.installing:
            session.installation = stop = anyio.Event()
            try:
                done = await cancel_on(
                    session.closing.wait, lambda: self._in_time(session, asked, stop, progress)
                )
            finally:
                session.installation = None
        if done is None:
            raise SessionNotFound("The session was closed while packages were being installed.")
        return done

    async def _in_time(
        self,
        session: Session,
        asked: tuple[Requirement, ...],
        stop: anyio.Event,
        progress: ProgressCallback,
    ) -> InstallOutcome:
        environment, _ = await self._factory.environment(session.request, progress)
        try:
            with anyio.fail_after(INSTALL_TIMEOUT_S):
                added = await cancel_on(
                    stop.wait,
                    lambda: self._add(session, environment, asked, progress),
                )
        except TimeoutError:
            raise InstallError(
                f"The installation was not done after {INSTALL_TIMEOUT_S:g} s and was stopped: "
                "nothing was installed, the session is as it was. What has been downloaded is "
                "kept, so that trying again goes further."
            ) from None
        if added is None:
            raise InstallError(
                "The installation was interrupted: nothing was installed, the session is as it was."
            )
        present, generation = added
        confined = (await self._build_sandbox.builder()).confined
        return await verify_live(
            session, asked, present=present, generation=generation, confined=confined
        )

    async def _add(
        self,
        session: Session,
        environment: KernelEnvironment,
        asked: tuple[Requirement, ...],
        progress: ProgressCallback,
    ) -> tuple[Present, Generation]:
        """Add the next generation to the layer; return the state before, and the generation."""
        assert session.request.layer is not None
        layer = Layer(session.request.layer)
        present = await anyio.to_thread.run_sync(Present.of, environment, layer)
        staging = await anyio.to_thread.run_sync(layer.stage)
        try:
            fetched: dict[str, str] = {}
            if not all(present.satisfies(each) for each in asked):
                fetched = await self._fetch(session, environment, layer, asked, present, progress)
            generation = await anyio.to_thread.run_sync(layer.describe, asked)
            modules = {**present.modules, **(generation.modules or {})}
            names = [each.name for each in asked]
            permitted = tuple(sorted({name for each in names for name in modules.get(each, ())}))
            generation = replace(generation, permitted=permitted)
            brought = versions(generation.packages)
            if brought.keys() != fetched.keys():
                raise InstallError(_incomplete(fetched.keys() ^ brought.keys()))
            tried = [
                module
                for each in names
                if each in brought
                for module in principal(each, modules.get(each, ()))
            ]
            if tried:
                await progress(f"Trying import {', '.join(tried)}")
                limits = session.request.limits or self._settings.limits
                places = [staging, *present.folders]
                await self._try(environment, places, tried, brought, limits)
            with anyio.CancelScope(shield=True):
                if present.lacks(generation):
                    await anyio.to_thread.run_sync(layer.commit, generation)
                else:
                    await anyio.to_thread.run_sync(layer.discard)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(layer.discard)
            raise
        return present, generation

    async def _fetch(
        self,
        session: Session,
        environment: KernelEnvironment,
        layer: Layer,
        asked: tuple[Requirement, ...],
        present: Present,
        progress: ProgressCallback,
    ) -> dict[str, str]:
        """Resolve against present packages, install those that differ; return their versions."""
        names = {each.name for each in asked}
        earlier = [each for each in present.requested if each.name not in names]
        own = self._factory.spec(session.request).packages
        pins = [f"{name}=={present.versions[name]}" for name in PINNED if name in present.versions]
        kept = environment.support.needs if environment.support is not None else ()
        named = names | {each.name for each in (*own, *earlier)}
        opened = ConfinedPip.opened(
            self._build_sandbox,
            environment,
            scratch=self._folder(),
            most_bytes=self._settings.install_bytes,
            source_builds=await self._builds_allowed(),
        )
        async with opened as pip:

            async def resolve(implied: Sequence[str]) -> Mapping[str, str]:
                return await pip.resolve(
                    wanted=[*BASE_PACKAGES, *implied, *map(str, (*own, *earlier, *asked))],
                    earlier=[str(each) for each in earlier],
                    present=present.versions,
                    constraints=[*pins, *self.rules.constraints, *kept],
                    excludes=sorted(set(LEFT_OUT) - named),
                    progress=progress,
                )

            along = [each for each in implied(names) if each not in present.versions]
            try:
                resolved = await resolve(along)
            except InstallError as error:
                if not any(name in str(error) for name in along):
                    if not kept:
                        raise
                    what = f"What packages of {environment.root} need of each other counts too."
                    raise InstallError(f"{error}\n{what}") from error
                resolved = await resolve(())
            differing = {
                name: version
                for name, version in resolved.items()
                if present.versions.get(name) != version
            }
            if differing:
                await pip.install(
                    differing,
                    into=layer.folder / STAGING,
                    known_as=self._known_as(session, layer),
                    progress=progress,
                )
        return differing

    async def _try(
        self,
        environment: KernelEnvironment,
        paths: Sequence[Path],
        modules: Sequence[str],
        brought: Mapping[str, str],
        limits: Limits,
    ) -> None:
        scratch = self._folder()
        scratch.mkdir(mode=0o700)
        try:
            failures = await try_imports(
                self._sandbox,
                environment,
                paths=paths,
                modules=modules,
                limits=limits,
                scratch=scratch,
            )
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, scratch)
        if failures:
            reasons = "\n".join(f"import {name}: {reason}" for name, reason in failures.items())
            tried = ", ".join(f"{name} {version}" for name, version in brought.items())
            raise InstallError(
                f"Nothing was installed, the session is as it was: after a trial installation of "
                f"{tried} this failed.\n{reasons}\nAsk for another version, or for what is missing."
            )

    def _known_as(self, session: Session, layer: Layer) -> str:
        """Return the path of the next generation as kernels see it, for the bytecode."""
        places = self._sandbox.guest_paths(session.request.workspace, self._scratch)
        folder = f"{places.layers}/0" if places.layers else str(layer.folder)
        return f"{folder}/{layer.next_name}"

    async def _builds_allowed(self) -> bool:
        """Return True if packages may be built from source, which runs their code.

        The operator must permit it. Builds must be sandboxed, unless kernels are not sandboxed.
        """
        wanted = bool(self._sandbox.report().enforced)
        boundary = (await self._build_sandbox.builder()).confined or not wanted
        return self._settings.allow_source_builds and boundary

    def _folder(self) -> Path:
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._scratch / secrets.token_hex(4)


def _incomplete(names: Iterable[str]) -> str:
    return (
        f"Nothing was installed, the session is as it was: what arrived differs from what was "
        f"resolved in {', '.join(sorted(names))}. Try again; if it stays so, the wheels of the "
        "index carry names or versions other than the index says."
    )
