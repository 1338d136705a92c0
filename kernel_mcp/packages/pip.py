"""`ConfinedPip`: resolves and installs for a session, in the sandbox of installers."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from kernel_mcp.environments.failures import UvResult
from kernel_mcp.environments.uv import Progress, Uv
from kernel_mcp.errors import InstallError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.trees import remove_tree
from kernel_mcp.packages.builder import Builder, BuildRequest
from kernel_mcp.packages.interrupted import unless
from kernel_mcp.packages.layer import tree_size
from kernel_mcp.sandbox.base import Identity, SandboxCommand
from kernel_mcp.settings import MIB

SIZE_CHECK_S = 0.5
"""The size of a folder cannot be waited for."""


class ConfinedPip:
    """uv's pip for one operation, with a folder of its own for its files.

    With `source_builds` it runs again what fails for want of wheels, now with code of packages:
    in a cache of this operation alone, so that such code reaches no other session.
    """

    def __init__(
        self, uv: Uv, builder: Builder, *, scratch: Path, cache: Path, source_builds: bool
    ) -> None:
        self._uv = uv
        self._builder = builder
        self._scratch = scratch
        self._cache = cache
        self._source_builds = source_builds
        self._hostile = False

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, uv: Uv, builder: Builder, *, scratch: Path, source_builds: bool
    ) -> AsyncIterator[ConfinedPip]:
        """With the folder `scratch`, made for this block."""
        cache = Path((await uv.query(["cache", "dir"])).output)
        cache.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(mode=0o700)
        try:
            yield cls(uv, builder, scratch=scratch, cache=cache, source_builds=source_builds)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, scratch)

    async def resolve(
        self,
        environment: KernelEnvironment,
        *,
        wanted: Sequence[str],
        earlier: Sequence[str],
        present: Mapping[str, str],
        constraints: Sequence[str],
        excludes: Sequence[str],
        progress: Progress,
    ) -> dict[str, str]:
        """Versions of all that `wanted` needs, what is `present` being kept wherever possible.

        `earlier` are those of `wanted` that the session has been given before. Raises InstallError.
        """
        files = {
            "wanted.txt": wanted,
            "resolved.txt": [f"{name}=={version}" for name, version in present.items()],
            "constraints.txt": constraints,
            "excludes.txt": excludes,
        }
        for name, lines in files.items():
            (self._scratch / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths = {name: str(self._scratch / name) for name in files}
        args = [
            *("pip", "compile", "--quiet", "--no-header", "--no-annotate"),
            *("--constraints", paths["constraints.txt"], "--excludes", paths["excludes.txt"]),
            *("--output-file", paths["resolved.txt"], "--python", str(environment.python)),
            *("--", paths["wanted.txt"]),
        ]
        result = await self._run(args, environment, {}, None)
        if result.code:
            raise _failure(result, earlier)
        text = _content(self._scratch / "resolved.txt")
        pairs = (line.split(";")[0].strip().partition("==") for line in text.splitlines())
        found = {name: version for name, same, version in pairs if same}
        await progress(f"Resolved {len(found)} packages")
        return found

    async def install(
        self,
        environment: KernelEnvironment,
        pinned: Mapping[str, str],
        *,
        into: Path,
        seen_as: str,
        most_bytes: int,
        progress: Progress,
    ) -> None:
        """Put exactly these versions into a folder. Raises InstallError."""
        args = [
            *("pip", "install", "--no-deps", "--link-mode", "copy", "--compile-bytecode"),
            *("--target", seen_as, "--python", str(environment.python), "--"),
            *(f"{name}=={version}" for name, version in pinned.items()),
        ]
        result = await unless(
            lambda: _grown(into, most_bytes),
            lambda: self._run(args, environment, {into: seen_as}, progress),
        )
        size = await anyio.to_thread.run_sync(tree_size, into)
        if result is None or 0 < most_bytes < size:
            raise InstallError(
                f"These packages take more than {most_bytes // MIB} MiB (--install-size): nothing "
                "was installed. Ask for fewer or smaller ones."
            )
        if result.code:
            raise _failure(result)

    async def _run(
        self,
        args: Sequence[str],
        environment: KernelEnvironment,
        folders: Mapping[Path, str],
        progress: Progress | None,
    ) -> UvResult:
        if not self._hostile:
            result = await self._once(args, environment, folders, progress)
            if not (result.lacks_wheel and self._source_builds):
                return result
            self._hostile = True
            if progress is not None:
                await progress("There is no wheel for this; building from source in the sandbox")
        return await self._once(args, environment, folders, progress)

    async def _once(
        self,
        args: Sequence[str],
        environment: KernelEnvironment,
        folders: Mapping[Path, str],
        progress: Progress | None,
    ) -> UvResult:
        builds = [] if self._hostile else ["--no-build"]
        cache = self._scratch / "cache" if self._hostile else self._cache
        cache.mkdir(exist_ok=True)
        words = [*args[:2], *builds, *self._uv.sources.options(), *args[2:]]
        writable = {self._scratch: str(self._scratch), cache: str(cache), **folders}
        links = self._uv.sources.folders()
        owned = [self._scratch, *folders]
        async with self._builder.owner(owned, hostile=self._hostile) as identity:
            command = partial(self._command, identity, writable, [*environment.readonly, *links])
            return await self._uv.run(
                ["--cache-dir", str(cache), *words], progress, confined=command
            )

    def _command(
        self,
        identity: Identity | None,
        writable: Mapping[Path, str],
        readonly: Sequence[Path],
        argv: Sequence[str],
        env: Mapping[str, str],
    ) -> SandboxCommand:
        request = BuildRequest(
            argv=argv,
            env=env,
            writable=writable,
            readonly=[Path(self._uv.executable), *readonly],
            hostile=self._hostile,
        )
        return self._builder.command(request, identity)


def _failure(result: UvResult, earlier: Sequence[str] = ()) -> InstallError:
    cause = result.cause()
    if earlier and result.conflict:
        cause += (
            f" What was installed before counts too: {', '.join(earlier)}. Ask for those again in "
            "another version together with this, or drop them with reset(packages=true)."
        )
    return InstallError(
        f"Nothing was installed, the session is as it was: {cause}\n{result.said()}"
    )


def _content(path: Path) -> str:
    """The text of a file, unless code of packages has put something else in its place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="replace") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read()
    except OSError:
        pass
    raise InstallError(
        "Nothing was installed, the session is as it was: code of a package has put something "
        "else in the place of what was resolved. Do not use that package."
    )


async def _grown(folder: Path, most_bytes: int) -> None:
    """Return when a folder has grown too big: before it fills the disk. 0 is no limit."""
    if not most_bytes:
        await anyio.sleep_forever()
    while await anyio.to_thread.run_sync(tree_size, folder) <= most_bytes:
        await anyio.sleep(SIZE_CHECK_S)
