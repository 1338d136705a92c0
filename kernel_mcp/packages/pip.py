"""`ConfinedPip`: resolves and installs for a session, in the sandbox of installers."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from kernel_mcp.environments.build_sandbox import BuildSandbox
from kernel_mcp.environments.folder import Spending
from kernel_mcp.environments.layer import SCRIPTS, retarget
from kernel_mcp.environments.uv import ProgressCallback, UvResult
from kernel_mcp.errors import InstallError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.units import MIB


class ConfinedPip:
    """uv's pip for one operation, with a folder for its files.

    With `source_builds` a command that fails for lack of wheels is repeated with builds, which run
    code of packages. They get a cache of this operation only, so that the code reaches no other
    session.
    """

    def __init__(
        self,
        build_sandbox: BuildSandbox,
        environment: KernelEnvironment,
        *,
        scratch: Path,
        most_bytes: int,
        source_builds: bool,
    ) -> None:
        self._build_sandbox = build_sandbox
        self._environment = environment
        self._scratch = scratch
        self._most_bytes = most_bytes
        self._spending = Spending(most_bytes, [scratch])
        self._source_builds = source_builds
        self._hostile = False

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        build_sandbox: BuildSandbox,
        environment: KernelEnvironment,
        *,
        scratch: Path,
        most_bytes: int,
        source_builds: bool,
    ) -> AsyncIterator[ConfinedPip]:
        """Create the folder `scratch`, and remove it after the block.

        `most_bytes` limits the bytes downloaded, and those unpacked; 0 for no limit.
        """
        scratch.mkdir(mode=0o700)
        try:
            yield cls(
                build_sandbox,
                environment,
                scratch=scratch,
                most_bytes=most_bytes,
                source_builds=source_builds,
            )
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, scratch)

    async def resolve(
        self,
        *,
        wanted: Sequence[str],
        earlier: Sequence[str],
        present: Mapping[str, str],
        constraints: Sequence[str],
        excludes: Sequence[str],
        progress: ProgressCallback,
    ) -> dict[str, str]:
        """Return versions of `wanted` and all dependencies; keep those `present` where possible.

        `earlier` are those of `wanted` that the session has from earlier installs. Raises
        InstallError.
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
            *("--output-file", paths["resolved.txt"], "--python", str(self._environment.bare)),
            *("--", paths["wanted.txt"]),
        ]
        result = await self._run(args, [], progress)
        if result.code:
            raise _failure(result, earlier)
        text = _content(self._scratch / "resolved.txt")
        pairs = (line.split(";")[0].strip().partition("==") for line in text.splitlines())
        found = {name: version for name, same, version in pairs if same}
        await progress(f"Resolved {len(found)} packages")
        return found

    async def install(
        self, pinned: Mapping[str, str], *, into: Path, known_as: str, progress: ProgressCallback
    ) -> None:
        """Install exactly these versions into a folder, which kernels will see at `known_as`.

        Raises InstallError.
        """
        environment = self._environment
        self._spending.watch(into)
        args = [
            *("pip", "install", "--no-deps", "--link-mode", "copy", "--no-compile-bytecode"),
            *("--target", str(into), "--python", str(environment.bare), "--"),
            *(f"{name}=={version}" for name, version in pinned.items()),
        ]
        result = await self._run(args, [into], progress)
        if result.code:
            raise _failure(result)
        base, python = environment.bare, environment.python
        await anyio.to_thread.run_sync(lambda: retarget(into / SCRIPTS, base=base, python=python))
        await self._build_sandbox.compile(
            into,
            base,
            readonly=environment.runtime,
            spending=self._spending,
            progress=progress,
            known_as=known_as,
        )
        if await anyio.to_thread.run_sync(self._spending.exceeded):
            raise self._too_big()

    async def _run(
        self, args: Sequence[str], folders: Sequence[Path], progress: ProgressCallback
    ) -> UvResult:
        if not self._hostile:
            result = await self._once(args, folders, progress)
            if not (result.lacks_wheel and self._source_builds):
                return result
            self._hostile = True
            await progress("There is no wheel for this; building from source in the sandbox")
        return await self._once(args, folders, progress)

    async def _once(
        self, args: Sequence[str], folders: Sequence[Path], progress: ProgressCallback
    ) -> UvResult:
        """Run uv once. Raises InstallError when it writes more than `most_bytes`."""
        result = await self._build_sandbox.run(
            args,
            readonly=self._environment.runtime,
            writable=[self._scratch, *folders],
            spending=self._spending,
            progress=progress,
            cache=self._scratch / "cache" if self._hostile else None,
        )
        if result is None:
            raise self._too_big()
        return result

    def _too_big(self) -> InstallError:
        return InstallError(
            f"These packages take more than {self._most_bytes // MIB} MiB (--install-size): "
            "nothing was installed. Ask for fewer or smaller ones."
        )


def _failure(result: UvResult, earlier: Sequence[str] = ()) -> InstallError:
    cause = result.cause()
    involved = [each for each in earlier if result.names(each)]
    if involved and result.conflict:
        cause += (
            f" What was installed before counts too: {', '.join(involved)}. Ask for those again in "
            "another version together with this, or drop them with reset(packages=true)."
        )
    return InstallError(
        f"Nothing was installed, the session is as it was: {cause}\n{result.said()}"
    )


def _content(path: Path) -> str:
    """Return the text of a regular file. Raises InstallError when package code replaced it."""
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
