"""`Build`: makes one environment in its folder."""

from __future__ import annotations

from pathlib import Path

import anyio
from packaging.requirements import Requirement

from kernel_mcp.config.settings import MIB
from kernel_mcp.environments import folder as folders
from kernel_mcp.environments.interpreters import Interpreter
from kernel_mcp.environments.spending import Spending
from kernel_mcp.environments.terms import Terms
from kernel_mcp.environments.uv import Progress
from kernel_mcp.environments.workshop import Workshop
from kernel_mcp.errors import EnvironmentBuildError

BASE_PACKAGES = ("cloudpickle>=3,<4", "ipykernel>=7,<8")
# Dependencies of ipykernel and IPython that a kernel here never uses: there is no debugger to
# talk to and no completion. They are a fifth of the download.
LEFT_OUT = ("debugpy", "jedi", "parso")
_EXCLUDES = "excludes.txt"


class Build:
    """One environment to be made. Whoever runs it holds the lock on its folder alone."""

    def __init__(
        self, workshop: Workshop, interpreter: Interpreter, packages: tuple[str, ...], terms: Terms
    ) -> None:
        self._workshop = workshop
        self._interpreter = interpreter
        self._packages = packages
        self._terms = terms

    async def run(self, folder: Path, progress: Progress | None, lock: int) -> None:
        """Make it from nothing, whatever is there; the descriptor `lock` is passed on.

        Raises EnvironmentBuildError, OSError: then nothing is left.
        """
        await anyio.to_thread.run_sync(folders.remove, folder)
        try:
            if progress is not None:
                await self._announce(progress)
            await anyio.to_thread.run_sync(folders.lay_out, folder, self._interpreter)
            await self._fill(folder, progress, lock)
            await anyio.to_thread.run_sync(self._finish, folder)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(folders.remove, folder)
            raise

    async def _announce(self, progress: Progress) -> None:
        names = ", ".join(self._packages) or "the standard library only"
        await progress(f"Building a Python {self._interpreter.version} environment: {names}")
        if not (await self._workshop.builder()).confined:
            await progress(
                "Packages are unpacked without a sandbox, as bubblewrap does not work here; none "
                "of their code runs meanwhile"
            )

    async def _fill(self, folder: Path, progress: Progress | None, lock: int) -> None:
        """Install and compile."""
        interpreter = self._interpreter
        asked = {Requirement(package).name for package in self._packages}
        excludes = folder / _EXCLUDES
        excludes.write_text("\n".join(sorted(set(LEFT_OUT) - asked)), encoding="utf-8")
        spending = Spending(self._terms.most_bytes, [folder])
        result = await self._workshop.run(
            [
                *("pip", "install", "--link-mode", "copy", "--no-compile-bytecode"),
                *("--excludes", str(excludes)),
                *("--python", interpreter.executable, "--prefix", str(folder)),
                *("--", *BASE_PACKAGES, *self._packages),
            ],
            readonly=interpreter.readonly,
            writable=[folder],
            spending=spending,
            progress=progress,
            keep=lock,
        )
        if result is None:
            raise self._too_big()
        if result.code:
            raise result.error(self._packages or BASE_PACKAGES, interpreter.version)
        await anyio.to_thread.run_sync(folders.tidy, folder, interpreter)
        if progress is not None:
            await progress("Compiling")
        await self._workshop.compile(
            folders.site_packages(folder, interpreter),
            Path(interpreter.executable),
            readonly=interpreter.readonly,
            spending=spending,
            keep=lock,
        )
        if await anyio.to_thread.run_sync(spending.exceeded):
            raise self._too_big()

    def _finish(self, folder: Path) -> None:
        folders.tidy(folder, self._interpreter)  # once more: the compiler has read what is hostile
        folders.seal(folder)
        folders.finish(folder, self._interpreter, self._packages, agent=self._terms.agent)

    def _too_big(self) -> EnvironmentBuildError:
        names = ", ".join(self._packages) or "the standard library only"
        return EnvironmentBuildError(
            f"An environment with {names} takes more than {self._terms.most_bytes // MIB} MiB "
            f"({self._terms.flag}): it was not built. Ask for fewer or smaller packages."
        )
