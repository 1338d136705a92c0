"""Fetch, unpack and compile packages in the sandbox of installers.

No code of packages runs: uv sees a base interpreter only and compiles nothing, since `.pth` files
would run. Python compiles afterwards, without site-packages, network or uv's cache. Only builds
from source run code of a package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import anyio

from kernel_mcp.environments.folder import Spending, discard, exclusive_now
from kernel_mcp.environments.progress import Milestones, cancel_on
from kernel_mcp.environments.uv import ProgressCallback, Uv, UvResult, run_command, silence
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Builder, BuildRequest, SandboxCommand
from kernel_mcp.sandbox.select import builder_for

INSTALL_TIMEOUT_S = 300.0
"""Seconds for all downloads, builds and unpacking of one agent's request."""
EXPORTED = "exported.txt"
COMPILE_S = 300.0
COMPILE_BYTES = 2 * 1024**3
"""Bytes of address space of one compiler process: the largest known sources take 1 GiB."""
MOST_JOBS = 8
_COMPILE = f"""\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({COMPILE_BYTES}, {COMPILE_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from compileall import compile_file
from concurrent.futures import ProcessPoolExecutor
from functools import partial
jobs, folder, known_as = int(sys.argv[1]), *sys.argv[2:]
moved = dict(stripdir=folder, prependdir=known_as) if known_as else dict()
found = []
for top, folders, names in os.walk(folder):
    folders[:] = [name for name in folders if name not in ("test", "tests")]
    found += [os.path.join(top, name) for name in names if name.endswith(".py")]
found.sort(key=lambda path: os.lstat(path).st_size, reverse=True)
parts = jobs * 16
even = [path for first in range(parts) for path in found[first::parts]]
with ProcessPoolExecutor(jobs) as pool:
    work = partial(compile_file, quiet=2, **moved)
    done = list(pool.map(work, even, chunksize=len(even) // parts + 1))
sys.exit(not all(done))
"""
"""Compiler of all files below a folder, except the packages' own tests: more than half of pandas,
numpy and matplotlib. Files go to the pool in chunks: a tenth of compileall's time."""
_TEMPORARY = ".tmp*"
"""Pattern of the leftovers of a killed uv in its cache."""
_LOCK = ".lock"
"""The file in uv's cache that each uv holds a shared lock on."""

logger = logging.getLogger(__name__)


class BuildSandbox:
    """Runs uv and the compiler for packages, operations in parallel."""

    def __init__(self, uv: Uv, builder: Builder | None = None) -> None:
        self.uv = uv
        self._builder = builder
        self._finding = anyio.Lock()

    async def builder(self) -> Builder:
        """Return the sandbox of installers, chosen on the first call."""
        async with self._finding:
            if self._builder is None:
                self._builder = await anyio.to_thread.run_sync(builder_for)
        return self._builder

    async def run(
        self,
        args: Sequence[str],
        *,
        readonly: Sequence[Path],
        writable: Sequence[Path],
        spending: Spending,
        progress: ProgressCallback = silence,
        cache: Path | None = None,
        keep: int = -1,
    ) -> UvResult | None:
        """Run `uv pip ARG…` to its end; None when `spending` stopped it.

        With a `cache` of its own it may build from source: package code runs, as another user where
        possible.
        """
        builder = await self.builder()
        hostile = cache is not None
        shared = self.uv.cache
        (cache or shared).mkdir(parents=True, exist_ok=True)
        words = [
            *("--cache-dir", str(cache or shared), *args[:2]),
            *([] if hostile else ["--no-build"]),
            *self.uv.sources.options(),
            *args[2:],
        ]
        visible = [Path(self.uv.executable), *readonly, *self.uv.sources.folders()]
        changed = [*writable, *([] if hostile else [shared])]
        told = Milestones(progress)
        async with builder.owner(writable, hostile=hostile) as identity:

            def confined(argv: Sequence[str], env: Mapping[str, str]) -> SandboxCommand:
                request = BuildRequest(argv, env, changed, visible, hostile=hostile)
                return builder.command(request, identity)

            async def run() -> UvResult:
                return await self.uv.run(
                    words, told.take, keep=keep, confined=confined, started=spending.started
                )

            result = await cancel_on(spending.beyond, lambda: told.during(run))
        if result is None or result.code:
            await anyio.to_thread.run_sync(self.tidy)
        beyond = await anyio.to_thread.run_sync(spending.exceeded)
        return None if beyond else result

    async def export(
        self,
        folder: Path,
        python: str,
        *,
        without: Sequence[str],
        readonly: Sequence[Path],
        keep: int = -1,
    ) -> UvResult:
        """Write the packages that the lock in `folder` pins for `python` to its file `EXPORTED`.

        Packages in `without` are left out, their dependencies are not.
        `uv export` reads pyproject.toml and uv.lock, without network. The project's code is not in
        that folder, so none of it can run.
        """
        builder = await self.builder()
        words = [
            *("export", "--project", str(folder), "--frozen", "--no-emit-workspace", "--no-config"),
            *("--no-annotate", "--no-header", "--offline", "--no-cache", "--python", python, "-q"),
            *("--no-python-downloads", "--format", "requirements.txt"),
            *("--output-file", str(folder / EXPORTED)),
            *(f"--no-emit-package={name}" for name in without),
        ]

        def confined(argv: Sequence[str], env: Mapping[str, str]) -> SandboxCommand:
            visible = [Path(self.uv.executable), *readonly]
            request = BuildRequest(argv, env, [folder], visible, network=False)
            return builder.command(request, None)

        return await self.uv.run(words, keep=keep, confined=confined)

    async def lock(self, script: Path, python: Path, *, readonly: Sequence[Path]) -> UvResult:
        """Lock the packages of a script beside it, for the interpreter `python`.

        No package is built, so none of its code runs.
        """
        builder, shared = await self.builder(), self.uv.cache
        shared.mkdir(parents=True, exist_ok=True)
        words = [
            *(
                "lock",
                "--script",
                str(script),
                "--no-config",
                "--no-build",
                "--python",
                str(python),
            ),
            *("--no-python-downloads", "--cache-dir", str(shared), *self.uv.sources.options()),
        ]
        visible = [Path(self.uv.executable), *readonly, *self.uv.sources.folders()]
        changed = [script.parent, shared]
        async with builder.owner(changed[:1], hostile=False) as identity:

            def confined(argv: Sequence[str], env: Mapping[str, str]) -> SandboxCommand:
                return builder.command(BuildRequest(argv, env, changed, visible), identity)

            return await self.uv.run(words, confined=confined)

    async def compile(
        self,
        folder: Path,
        base: Path,
        *,
        readonly: Sequence[Path],
        spending: Spending,
        progress: ProgressCallback = silence,
        known_as: str = "",
        keep: int = -1,
    ) -> None:
        """Compile all Python sources below `folder` with the base interpreter `base`.

        `known_as` is the path that kernels see, if it differs. Files that fail are compiled by
        kernels on import.
        """
        builder = await self.builder()
        jobs = min(MOST_JOBS, os.cpu_count() or 1)
        request = BuildRequest(
            argv=[
                *(str(base), "-I", "-S", "-c", _COMPILE),
                *(str(jobs), str(folder), known_as),
            ],
            env={"LANG": "C.UTF-8"},
            writable=[folder],
            readonly=readonly,
            hostile=True,
            network=False,
        )

        async def run(identity: Identity | None) -> UvResult:
            command = builder.command(request, identity)
            return await run_command(command, keep=keep, started=spending.started)

        told = Milestones(progress)
        await told.tell("Compiling")
        with anyio.move_on_after(COMPILE_S):
            async with builder.owner([folder], hostile=True) as identity:
                done = await cancel_on(spending.beyond, lambda: told.during(lambda: run(identity)))
            if done is not None and done.code == 0:
                return
        logger.info("not everything in %s could be compiled ahead", folder)

    def tidy(self) -> None:
        """Remove leftovers of killed runs from uv's cache, unless uv is running; blocks."""
        with self._alone() as alone:
            if alone is not None:
                for path in self.uv.cache.glob(_TEMPORARY):
                    discard(path)

    def empty_cache(self) -> bool:
        """Empty uv's cache unless uv is running; return True if that was done. Blocks."""
        with self._alone() as alone:
            if alone is not None:
                for path in self.uv.cache.iterdir():
                    if path.name != _LOCK:
                        discard(path)
        return alone is not None

    def _alone(self) -> AbstractContextManager[int | None]:
        self.uv.cache.mkdir(parents=True, exist_ok=True)
        return exclusive_now(self.uv.cache / _LOCK)
