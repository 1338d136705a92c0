"""Check requested packages against `--allow-install`; find the packages and Python of a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON, parse_entry
from kernel_mcp.config.requirements import python as read_python
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.environments.metadata import (
    EnvironmentSpec,
    distribution_for,
    packages_for,
    requirement_for,
)
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import EnvironmentBuildError, InputError, InstallError, KernelMcpError
from kernel_mcp.launch.base import START_TIMEOUT_S
from kernel_mcp.policy.source import (
    ScriptMetadata,
    ScriptMetadataError,
    line_of_key,
    script_metadata,
)
from kernel_mcp.records import dataclass
from kernel_specs.restricted.config import INSTALLERS

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    from kernel_mcp.sessions.session import Session


MAX_PACKAGES = 50
_SHOWN = 30


_OPERATORS = ("===", "==", "~=", "!=", "<=", ">=", "<", ">")
MAX_LIST_CHARS = 8192
"""Characters of one text that is read as a list; fifty names with versions have some 2,000."""


def listed(packages: str | Sequence[str]) -> list[str]:
    """Return one entry per package; texts such as `pandas>=2, matplotlib` are split.

    A text that is not such a list stays as it is.
    """
    texts = [packages] if isinstance(packages, str) else packages
    return [entry for text in texts for entry in _entries(text)]


def _entries(text: str) -> list[str]:
    found = _parts(text) if len(text) <= MAX_LIST_CHARS else [text]
    # otherwise the text is one requirement with a marker, or no requirement
    return found if all(map(_is_entry, found)) else [text]


def _parts(text: str) -> list[str]:
    """Split a list at blanks and commas, except those within one requirement."""
    spans: list[tuple[int, int]] = []
    place = depth = 0
    for word in text.replace(",", " ").split():
        start = text.index(word, place)
        place = start + len(word)
        goes_on = depth > 0 or word.startswith(("[", "(", ")", *_OPERATORS))
        if spans and (goes_on or text.endswith(_OPERATORS, 0, spans[-1][1])):
            spans[-1] = (spans[-1][0], place)
        else:
            spans.append((start, place))
        depth += sum(map(word.count, "[(")) - sum(map(word.count, "])"))
    return [text[start:end] for start, end in spans]


def _is_entry(text: str) -> bool:
    try:
        return parse_entry(text).marker is None
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class InstallRules:
    """Rules for the packages that agents add by `install`, `create_session` and `run_script`.

    permitted   names of packages, each with the operator's version specifier or ""
    everything  True if all others may be added too
    tool        True if agents have the tool `install`
    """

    permitted: MappingProxyType[str, str]
    everything: bool = False
    tool: bool = True

    @classmethod
    def of(cls, settings: Settings) -> InstallRules:
        """Return the rules of `--allow-install`; packages of `--allow` are permitted as well.

        Raises ConfigError.
        """
        entries = (*settings.allow, *settings.allow_install)
        named = packages_for(entries, "--allow-install")
        found = {each.name: str(each.specifier) for each in named}
        every = "*" in settings.allow_install
        return cls(MappingProxyType(found), every, tool="packages" in settings.tools)

    @property
    def constraints(self) -> tuple[str, ...]:
        """The operator's version specifiers as requirements."""
        return tuple(f"{name}{spec}" for name, spec in self.permitted.items() if spec)

    def admit(
        self, packages: Iterable[str | Requirement], *, standard_library: bool = True
    ) -> tuple[Requirement, ...]:
        """Return the requirements for requested packages, with modules mapped to packages.

        With `standard_library` its modules are skipped, else refused. Raises InputError for
        anything but the name of a package, InstallError for packages that the operator does not
        permit.
        """
        asked = list(packages)
        if len(asked) > MAX_PACKAGES:
            raise InputError(
                f"{len(asked)} packages at once are too many: pass at most {MAX_PACKAGES}."
            )
        admitted: dict[str, Requirement] = {}
        refused: list[str] = []
        for each in asked:
            requirement = _read(each)
            if requirement is None:
                if not standard_library:
                    raise InputError(
                        f"{str(each).strip()!r} is part of Python itself and needs no installation."
                    )
                continue
            if not self.everything and requirement.name not in self.permitted:
                refused.append(requirement.name)
            admitted[requirement.name] = requirement
        if refused:
            raise InstallError(self._refusal(refused))
        return tuple(admitted.values())

    def describe(self) -> str:
        """Return the permitted packages for people: at most 30 names, or "any package"."""
        if self.everything:
            return "any package"
        names = sorted(self.permitted)
        shown = ", ".join(names[:_SHOWN])
        return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown

    def step(self, module: str, *, once: bool) -> str:
        """Return a sentence on how a model gets a module, as `NextStep` does; empty if built in.

        For an installer such as pip, the step is how to add packages. `once` is for `run_script`.
        """
        if module.partition(".")[0] in INSTALLERS:
            return self._installers_step(once=once)
        name = distribution_for(module)
        if name is None:
            return ""
        if not (self.everything or name in self.permitted):
            return f"Start the server with --allow {name} to have it."
        if once:
            return f'Pass dependencies=["{name}"] to run_script to have it.'
        if not self.tool:
            return f'create_session(packages=["{name}"]) opens a session that has it.'
        return f'install(packages=["{name}"]) adds it to this session.'

    def _installers_step(self, *, once: bool) -> str:
        if not (self.everything or self.permitted):
            return "Start the server with --allow-install NAMES to let sessions add packages."
        if once:
            return "Pass dependencies=[...] to run_script to have packages."
        return "`%pip install NAME` as a line of its own in a cell adds a package."

    def _refusal(self, names: list[str]) -> str:
        listed = ", ".join(names)
        permitted = self.describe()
        return (
            f"This server does not permit installing {listed}: nothing was changed. "
            f"Permitted: {permitted or 'nothing'}. The operator can start the server with "
            f"--allow-install {','.join(names)} (or --allow-install '*')."
        )


def _read(asked: str | Requirement) -> Requirement | None:
    """Return a requirement, None for the standard library. Raises InputError if not PEP 508."""
    try:
        return requirement_for(asked)
    except ValueError as error:
        raise InputError(
            f"{error}. Packages are given by name, such as polars or 'pandas>=2,<3'; nothing was "
            "changed."
        ) from None


SCRIPT_FILE = "script.py"
"""File name of the script in its workspace."""
_MINORS = range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)


@dataclass(frozen=True, slots=True)
class Needs:
    """The packages and Python of a script; both empty if the server's environment suffices."""

    packages: tuple[Requirement, ...]
    python: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why a script cannot run, and the line of the script that causes it."""

    line: int
    reason: str


class ScriptReader:
    """Turns scripts and arguments into needs that the operator permits."""

    def __init__(self, settings: Settings, rules: InstallRules, interpreters: Interpreters) -> None:
        self._settings = settings
        self._rules = rules
        self._interpreters = interpreters

    async def needs(
        self, script: str, dependencies: Sequence[str], python: str, progress: ProgressCallback
    ) -> Needs:
        """Return the packages and Python that a script with these further dependencies needs.

        An empty `python` accepts every version that fits the script.

        Raises InputError for metadata or arguments that cannot be used, InstallError for packages
        the operator does not permit, EnvironmentBuildError when no Python fits.
        """
        metadata = script_metadata(script) or ScriptMetadata()
        packages = self.packages([*metadata.dependencies, *dependencies])
        return Needs(packages, await self._version(metadata, python, progress))

    async def judge(
        self, script: str, dependencies: Sequence[str], python: str
    ) -> tuple[Needs, list[Problem]]:
        """Return the result of `needs`, and the problems for which `needs` would raise.

        Malformed metadata counts as none, and is no such problem. Nothing is fetched.
        """
        problems: list[Problem] = []
        packages: tuple[Requirement, ...] = ()
        version = ""
        try:
            metadata = script_metadata(script) or ScriptMetadata()
        except ScriptMetadataError:
            metadata = ScriptMetadata()
        try:
            packages = self.packages([*metadata.dependencies, *dependencies])
        except KernelMcpError as error:
            problems.append(Problem(line_of_key(script, "dependencies") or 1, str(error)))
        try:
            version = await self._version(metadata, python, None)
        except KernelMcpError as error:
            problems.append(Problem(line_of_key(script, "requires-python") or 1, str(error)))
        return Needs(packages, version), problems

    async def _version(
        self, metadata: ScriptMetadata, python: str, progress: ProgressCallback | None
    ) -> str:
        if metadata.requires_python is None:
            return await self.python(python, progress)
        return await self._fitting(metadata.requires_python, python, progress)

    async def _find(self, version: str, progress: ProgressCallback | None) -> Interpreter:
        """Return the interpreter for an agent's version; without `progress` none is fetched."""
        fetch = self._rules.everything
        if progress is not None:
            return await self._interpreters.find(version, progress, fetch=fetch)
        try:
            return await self._interpreters.find(version)
        except EnvironmentBuildError:
            offered = await self._interpreters.offered(version) if fetch else ""
            if not offered:
                raise
            return Interpreter("", offered, "cpython", "", "")

    def packages(self, wanted: Sequence[str | Requirement]) -> tuple[Requirement, ...]:
        """Return the packages to add to the server's own. Raises InputError, InstallError."""
        admitted = self._rules.admit(wanted)
        if not admitted:
            return ()
        own = EnvironmentSpec.for_allow(self._settings.allow).packages
        return tuple(sorted(set(admitted) - set(own), key=str))

    async def python(self, wanted: str, progress: ProgressCallback | None) -> str:
        """Return a checked version; empty for the server's own. Without `progress` none is fetched.

        Raises InputError, EnvironmentBuildError.
        """
        if not wanted.strip():
            return ""
        if "/" in wanted:
            raise InputError(
                f"python={wanted!r}: pass a version such as 3.12; a path is the operator's choice "
                "(--python)."
            )
        try:
            version = read_python(wanted)
        except ValueError:
            raise InputError(
                f"python={wanted!r}: pass a version from {_pair(OLDEST_PYTHON)} to "
                f"{_pair(NEWEST_PYTHON)}, such as 3.12."
            ) from None
        own = await self._interpreters.find(self._settings.python, fetch=True)
        if "/" in self._settings.python and f"{own.version}.".startswith(f"{version}."):
            return ""
        found = await self._find(version, progress)
        return "" if found == own else version

    async def _fitting(self, requires: str, wanted: str, progress: ProgressCallback | None) -> str:
        """Return the Python for a script with `requires-python`; empty for the server's own."""
        from packaging.specifiers import SpecifierSet

        fits = SpecifierSet(requires)
        if wanted.strip():
            version = await self.python(wanted, progress)
            found = await self._find(version or self._settings.python, progress)
            if not fits.contains(found.version, prereleases=True):
                raise InputError(
                    f"The script says requires-python = {requires!r}, and python={wanted!r} is "
                    f"{found.version}. Leave python empty to have one chosen that fits."
                )
            return version
        own = await self._interpreters.find(self._settings.python, fetch=True)
        if fits.contains(own.version, prereleases=True):
            return ""
        minors = [minor for minor in _MINORS if _may_fit(fits, minor)]
        for version in (f"3.{minor}" for minor in minors):
            known = self._interpreters.recalled(version)
            if known is not None and fits.contains(known.version, prereleases=True):
                return version
        for version in await self._interpreters.versions():
            if fits.contains(version, prereleases=True):
                return await self._short(version, fits)
        for version in (f"3.{minor}" for minor in minors if self._rules.everything):
            if await self._interpreters.offered(version):
                return await self.python(version, progress)
        if minors:
            return await self.python(f"3.{minors[0]}", progress)
        raise EnvironmentBuildError(
            f"The script says requires-python = {requires!r}; kernels run on Python "
            f"{_pair(OLDEST_PYTHON)} to {_pair(NEWEST_PYTHON)}. Nothing was run."
        )

    async def _short(self, version: str, fits: SpecifierSet) -> str:
        """Return `3.12` for `3.12.1` if that fits too: the next script then needs no search."""
        short = version.rpartition(".")[0]
        found = await self._interpreters.find(short)
        return short if fits.contains(found.version, prereleases=True) else version


async def expect_script(session: Session, progress: ProgressCallback) -> None:
    """Make the next cell of a fresh session begin and end as a script does.

    Raises KernelMcpError when there is no kernel.
    """
    kernel = await session.ensure_kernel(progress)
    kernel.policy = replace(kernel.policy, once=True)
    await kernel.begin_script(SCRIPT_FILE, START_TIMEOUT_S)


def plain(script: str) -> str:
    """Return a script without the byte order mark."""
    return script.removeprefix("\ufeff")


def _may_fit(fits: SpecifierSet, minor: int) -> bool:
    """Return True if a release of Python 3.`minor` meets the specifier; none has 40 releases."""
    return any(fits.contains(f"3.{minor}.{patch}") for patch in range(40))


def _pair(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
