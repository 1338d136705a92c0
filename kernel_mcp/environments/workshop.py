"""Where packages are fetched, unpacked and compiled: in the sandbox of installers.

No code of packages runs. uv is told of a base interpreter only and compiles nothing, since it would
start that with their `.pth` files. Python compiles afterwards, without site-packages, the network
and uv's cache. Only where builds from source are allowed does a package run code of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import anyio

from kernel_mcp.environments.failures import UvResult
from kernel_mcp.environments.lock import exclusive_now
from kernel_mcp.environments.spending import Spending
from kernel_mcp.environments.uv import Progress, Uv, run_command
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.packages.builder import Builder, BuildRequest, builder_for
from kernel_mcp.packages.interrupted import unless
from kernel_mcp.sandbox.base import SandboxCommand

COMPILE_S = 300.0
COMPILE_BYTES = 2 * 1024**3
"""Address space of one process that compiles: the largest sources that are known take 1 GiB."""
MOST_JOBS = 8
_COMPILE = f"""\
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({COMPILE_BYTES}, {COMPILE_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import compileall
sys.exit(not compileall.main())
"""
_TEMPORARY = ".tmp*"
"""What a uv that was stopped leaves in its cache."""
_LOCK = ".lock"
"""The file in its cache that every uv holds a shared lock on."""

logger = logging.getLogger(__name__)


class Workshop:
    """Runs uv and the compiler for packages, one operation beside the other."""

    def __init__(self, uv: Uv, builder: Builder | None = None) -> None:
        """Without a `builder` the best of this machine is found when it is first needed."""
        self.uv = uv
        self._builder = builder
        self._finding = anyio.Lock()

    async def builder(self) -> Builder:
        """What confines the installers."""
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
        progress: Progress | None = None,
        cache: Path | None = None,
        keep: int = -1,
    ) -> UvResult | None:
        """Run `uv pip ARG…` to its end; None when it was stopped for writing too much.

        With a `cache` of its own it may build from source: code of packages runs, as another user
        where there is one.
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
        async with builder.owner(writable, hostile=hostile) as identity:

            def confined(argv: Sequence[str], env: Mapping[str, str]) -> SandboxCommand:
                request = BuildRequest(argv, env, changed, visible, hostile=hostile)
                return builder.command(request, identity)

            result = await unless(
                spending.beyond,
                lambda: self.uv.run(
                    words, progress, keep=keep, confined=confined, started=spending.started
                ),
            )
        if result is None or result.code:
            await anyio.to_thread.run_sync(self.tidy)
        beyond = await anyio.to_thread.run_sync(spending.exceeded)
        return None if beyond else result

    async def compile(
        self,
        folder: Path,
        base: Path,
        *,
        readonly: Sequence[Path],
        spending: Spending,
        known_as: str = "",
        keep: int = -1,
    ) -> None:
        """Compile all Python sources below `folder` with the base interpreter `base`.

        `known_as` is where kernels see the folder, if that is not its own name.

        What cannot be compiled stays as it is: it is compiled by each kernel that imports it.
        """
        builder = await self.builder()
        moved = ["-s", str(folder), "-p", known_as] if known_as else []
        jobs = min(MOST_JOBS, os.cpu_count() or 1)
        request = BuildRequest(
            argv=[
                *(str(base), "-I", "-S", "-c", _COMPILE),
                *("-q", "-q", "-j", str(jobs), *moved, str(folder)),
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

        with anyio.move_on_after(COMPILE_S):
            async with builder.owner([folder], hostile=True) as identity:
                done = await unless(spending.beyond, lambda: run(identity))
            if done is not None and done.code == 0:
                return
        logger.info("not everything in %s could be compiled ahead", folder)

    def tidy(self) -> None:
        """Remove what stopped runs have left in uv's cache, unless another one uses it; blocks."""
        with self._alone() as alone:
            if alone is not None:
                for path in self.uv.cache.glob(_TEMPORARY):
                    _discard(path)

    def empty_cache(self) -> bool:
        """Remove all that uv has cached, unless somebody uses it: whether that was done. Blocks."""
        with self._alone() as alone:
            if alone is not None:
                for path in self.uv.cache.iterdir():
                    if path.name != _LOCK:
                        _discard(path)
        return alone is not None

    def _alone(self) -> AbstractContextManager[int | None]:
        self.uv.cache.mkdir(parents=True, exist_ok=True)
        return exclusive_now(self.uv.cache / _LOCK)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
