"""Build one environment, without those of the operator's packages that cannot be resolved.

When the packages have no common solution, each is resolved alone, so that only those at fault are
left out. They are recorded beside the environment for `KEPT_S`, so that a restarted server need
not run uv for them again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel_mcp.config.values import close_to
from kernel_mcp.environments import folder as folders
from kernel_mcp.environments.build_sandbox import EXPORTED, BuildSandbox
from kernel_mcp.environments.folder import Spending
from kernel_mcp.environments.interpreters import Interpreter
from kernel_mcp.environments.metadata import DISTRIBUTIONS, EnvironmentSpec
from kernel_mcp.environments.pinned_requirements import exported
from kernel_mcp.environments.uv import ProgressCallback, UvResult
from kernel_mcp.errors import EnvironmentBuildError, UnfitPackages
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of a build.

    agent       requested by an agent: the environment is removed when old or over the limit
    most_bytes  bytes to download, and to unpack; 0 for no limit
    flag        the setting of that limit
    """

    agent: bool = False
    most_bytes: int = 0
    flag: str = "--install-size"


OPERATORS = Terms()
"""The operator's environments are built and kept without limits."""


BASE_PACKAGES = ("cloudpickle>=3,<4", "ipykernel>=7,<8", "ipython>=8,<10")
"""Packages of every environment. The bounds exclude versions whose private parts may differ."""
# Dependencies of ipykernel and IPython that a kernel here never uses: there is no debugger to
# talk to and no completion. They are a fifth of the download.
LEFT_OUT = ("debugpy", "jedi", "parso")
_DRAWN_BY = {
    "": "resvg-py",  # SVG, in every environment
    "altair": "vl-convert-python",  # its charts; 35 MB, with a JavaScript engine
}
"""Packages that render outputs of others which otherwise need a browser, by those others."""
TRIALS_AT_ONCE = 4
_EXCLUDES = "excludes.txt"
MOST_PLACES = 5


def implied(names: Iterable[str]) -> list[str]:
    """Return the optional packages that render outputs of `names`, such as vl-convert for altair.

    `""` gives those of every environment. A package that the index lacks for this Python is left
    out later.
    """
    return sorted({_DRAWN_BY[name] for name in names if name in _DRAWN_BY})


class Build:
    """One environment to build. The caller holds the exclusive lock on its folder."""

    def __init__(
        self,
        build_sandbox: BuildSandbox,
        interpreter: Interpreter,
        spec: EnvironmentSpec,
        terms: Terms,
    ) -> None:
        self._build_sandbox = build_sandbox
        self._interpreter = interpreter
        self._packages = tuple(map(str, spec.packages))
        self._pinned = spec.pinned
        self._files: list[str] = []
        names = set(spec.names)
        self._excludes = sorted(set(LEFT_OUT) - names)
        self._implied = [each for each in implied(["", *names]) if each not in names]
        self._terms = terms
        self._base: Sequence[str] = BASE_PACKAGES
        """Empty if files list versions that the kernel does not work with: it has others then."""

    async def run(self, folder: Path, progress: ProgressCallback, lock: int) -> None:
        """Build from nothing, replacing an old folder; installers inherit the descriptor `lock`.

        Raises EnvironmentBuildError, OSError; the folder is then removed.
        """
        await anyio.to_thread.run_sync(folders.remove, folder)
        try:
            await self._announce(progress)
            await anyio.to_thread.run_sync(folders.lay_out, folder, self._interpreter)
            await self._fill(folder, progress, lock)
            await anyio.to_thread.run_sync(self._finish, folder)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(folders.remove, folder)
            raise

    async def _announce(self, progress: ProgressCallback) -> None:
        names = ", ".join(self._wanted) or "the standard library only"
        await progress(f"Building a Python {self._interpreter.version} environment: {names}")
        if not (await self._build_sandbox.builder()).confined:
            await progress(
                "Packages are unpacked without a sandbox, as bubblewrap does not work here; none "
                "of their code runs meanwhile"
            )

    async def _fill(self, folder: Path, progress: ProgressCallback, lock: int) -> None:
        interpreter = self._interpreter
        excludes = folder / _EXCLUDES
        excludes.write_text("\n".join(self._excludes), encoding="utf-8")
        spending = Spending(self._terms.most_bytes, [folder])
        self._files = await self._write_pinned(folder / "listed", lock) if self._pinned else []
        await progress("Resolving")
        result = await self._install(folder, self._implied, spending, progress, lock)
        if (
            result is not None
            and result.code
            and any(name in result.output for name in self._implied)
        ):
            result = await self._install(folder, (), spending, progress, lock)
        if result is not None and result.conflict and self._files:
            self._base = ()
            excludes.write_text("", encoding="utf-8")
            apart = await self._install(folder, (), spending, progress, lock)
            result = result if apart is not None and apart.code else apart
        if result is None:
            raise self._too_big()
        if result.code:
            await self._sort_out(folder, result, progress)
            raise self._failed(result)
        await anyio.to_thread.run_sync(folders.tidy, folder, interpreter)
        await self._build_sandbox.compile(
            folders.site_packages(folder, interpreter),
            Path(interpreter.executable),
            readonly=interpreter.readonly,
            spending=spending,
            progress=progress,
            keep=lock,
        )
        if await anyio.to_thread.run_sync(spending.exceeded):
            raise self._too_big()

    async def _install(
        self,
        folder: Path,
        implied: Sequence[str],
        spending: Spending,
        progress: ProgressCallback,
        lock: int,
    ) -> UvResult | None:
        return await self._build_sandbox.run(
            [
                *("pip", "install", "--link-mode", "copy", "--no-compile-bytecode"),
                *("--excludes", str(folder / _EXCLUDES)),
                *("--python", self._interpreter.executable, "--prefix", str(folder)),
                *self._files,
                *("--", *self._base, *implied, *self._packages),
            ],
            readonly=self._interpreter.readonly,
            writable=[folder],
            spending=spending,
            progress=progress,
            keep=lock,
        )

    @property
    def _wanted(self) -> tuple[str, ...]:
        return (*self._packages, *self._pinned.origins)

    async def _write_pinned(self, folder: Path, lock: int) -> list[str]:
        """Write the listed requirements into `folder` and return the uv options that name them.

        Raises EnvironmentBuildError.
        """
        pinned, python = self._pinned, self._interpreter.executable
        folder.mkdir()
        lines = list(pinned.lines)
        if pinned.project.lock:
            (folder / "pyproject.toml").write_text(pinned.project.text, encoding="utf-8")
            (folder / "uv.lock").write_text(pinned.project.lock, encoding="utf-8")
            done = await self._build_sandbox.export(
                folder,
                python,
                without=pinned.project.local,
                readonly=self._interpreter.readonly,
                keep=lock,
            )
            if done.code:
                raise EnvironmentBuildError(
                    f"the lock of {pinned.origins[-1]} cannot be used: run `uv lock` there with "
                    f"uv {await self._build_sandbox.uv.version()}, as this server has.\n"
                    f"{done.said()}"
                )
            lines += exported((folder / EXPORTED).read_text(encoding="utf-8"))
        options: list[str] = []
        for name, option, found in (("r", "-r", lines), ("c", "-c", pinned.limits)):
            (folder / name).write_text("\n".join(line.text for line in found), encoding="utf-8")
            options += [option, str(folder / name)] if found else []
        return options

    def _failed(self, result: UvResult) -> EnvironmentBuildError:
        error = result.error(self._wanted or BASE_PACKAGES, self._interpreter.version)
        if places := self._pinned.named_in(result.output):
            return EnvironmentBuildError(f"{error}\nIt speaks of {'; '.join(places[:MOST_PLACES])}")
        return error

    async def _sort_out(self, folder: Path, result: UvResult, progress: ProgressCallback) -> None:
        """Raise UnfitPackages if some of the operator's packages cannot be resolved even alone."""
        if self._terms.agent or not self._packages or not result.conflict:
            return
        await progress("Trying each package alone")
        found: dict[str, UvResult | None] = {}
        turns = anyio.Semaphore(TRIALS_AT_ONCE)

        async def attempt(name: str) -> None:
            async with turns:
                found[name] = await self._alone(folder, name)

        async with anyio.create_task_group() as tasks:
            for name in ("", *self._packages):
                tasks.start_soon(attempt, name)
        base = found.pop("")
        if base is None or base.code:
            return
        unfit = {
            name: tried.cause()
            for name, tried in found.items()
            if tried is not None and tried.conflict
        }
        if unfit:
            raise UnfitPackages(unfit)

    async def _alone(self, folder: Path, package: str) -> UvResult | None:
        """Return uv's result for a dry run with `package` and the kernel's own packages.

        An empty `package` tries the kernel's packages only.
        """
        python = self._interpreter.executable
        return await self._build_sandbox.run(
            [
                *("pip", "install", "--dry-run", "--excludes", str(folder / _EXCLUDES)),
                *("--python", python, "--prefix", str(folder)),
                *("--", *BASE_PACKAGES, *filter(None, [package])),
            ],
            readonly=self._interpreter.readonly,
            writable=[folder],
            spending=Spending(0, [folder]),
        )

    def _finish(self, folder: Path) -> None:
        folders.tidy(folder, self._interpreter)  # again: the compiler has read hostile sources
        folders.seal(folder)
        folders.finish(
            folder,
            self._interpreter,
            self._wanted,
            agent=self._terms.agent,
            apart=not self._base,
        )

    def _too_big(self) -> EnvironmentBuildError:
        names = ", ".join(self._wanted) or "the standard library only"
        return EnvironmentBuildError(
            f"An environment with {names} takes more than {self._terms.most_bytes // MIB} MiB "
            f"({self._terms.flag}): it was not built. Ask for fewer or smaller packages."
        )


KEPT_S = 3600.0
"""Seconds after which packages that could not be resolved are tried again."""
_LIKENESS = 0.75
FAMILIAR = sorted(
    {
        *DISTRIBUTIONS.values(),
        *[
            "altair",
            "bokeh",
            "dask",
            "duckdb",
            "jinja2",
            "lxml",
            "matplotlib",
            "networkx",
            "nltk",
            "numpy",
            "openpyxl",
            "pandas",
            "plotly",
            "polars",
            "pyarrow",
            "pydantic",
            "requests",
            "scipy",
            "seaborn",
            "spacy",
            "statsmodels",
            "sympy",
            "tabulate",
            "tensorflow",
            "torch",
            "tqdm",
            "transformers",
            "xarray",
            "xgboost",
        ],
    }
)
"""Packages whose names are often misspelt."""


def note_unfit(file: Path, sight: str, unfit: Mapping[str, str]) -> None:
    """Record the packages that cannot be resolved, with the reasons, for the uv digest `sight`."""
    with suppress(OSError):  # the next start tries them again
        file.write_text(json.dumps({"sight": sight, "unfit": dict(unfit)}), encoding="utf-8")


def noted_unfit(file: Path, sight: str, *, ever: bool = False) -> dict[str, str]:
    """Return the packages recorded by `note_unfit` under the same `sight`, with the reasons.

    Empty when the record is missing, unreadable or, unless `ever`, older than `KEPT_S`.
    """
    try:
        if not ever and time.time() - file.stat().st_mtime > KEPT_S:
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["sight"] != sight:
            return {}
        return {str(name): str(why) for name, why in content["unfit"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def remark(package: str, why: str) -> str:
    """Return a sentence for the operator with the reason why a package is left out."""
    return f"{package} of --allow or --profile is left out: {why}{_meant(package, why)}"


def brief(package: str, why: str) -> str:
    """Return a sentence for a model with the reason why a package is not installed."""
    first, _, _ = why.partition(". ")
    return (
        f"{package} of --allow or --profile is not installed: {first}.{_meant(package, why)} The "
        "operator can correct it; nothing else is affected."
    )


def _meant(package: str, why: str) -> str:
    from packaging.requirements import Requirement

    name = Requirement(package).name
    close = close_to(name, FAMILIAR, cutoff=_LIKENESS) if "no package" in why else []
    return f" Was {close[0]} meant?" if close and close[0] != name else ""


class Store(Protocol):
    """The store that builds environments and records the packages that cannot be resolved."""

    async def ensure(
        self, spec: EnvironmentSpec, progress: ProgressCallback, terms: Terms
    ) -> KernelEnvironment:
        """Return the environment of `spec`, built if missing. Raises EnvironmentBuildError."""

    def unfit(self, spec: EnvironmentSpec) -> Mapping[str, str]:
        """Return the packages of `spec` that are known to be unavailable, with the reasons."""


class Fitting:
    """The environment of `wanted`, without the packages that cannot be resolved.

    `spec` is what remains of it, `unfit` the reason for each package that was dropped.
    """

    def __init__(self, store: Store, wanted: EnvironmentSpec) -> None:
        self.spec = wanted
        self.unfit: dict[str, str] = {}
        self._store = store
        self._drop(store.unfit(wanted))

    @property
    def remarks(self) -> list[str]:
        """Sentences for a model, one for each package that was dropped."""
        return [brief(name, why) for name, why in self.unfit.items()]

    async def ensure(
        self, progress: ProgressCallback, terms: Terms = OPERATORS
    ) -> KernelEnvironment:
        """Return the environment of `spec`, from which unavailable packages are dropped first.

        Raises EnvironmentBuildError.
        """
        try:
            return await self._store.ensure(self.spec, progress, terms)
        except UnfitPackages as error:
            self._drop(error.unfit)
            for name, why in error.unfit.items():
                await progress(remark(name, why))
        return await self.ensure(progress, terms)

    def _drop(self, unfit: Mapping[str, str]) -> None:
        for name, why in unfit.items():
            if name not in self.unfit:
                logger.warning("%s", remark(name, why))
        self.unfit |= unfit
        self.spec = self.spec.without(unfit)
