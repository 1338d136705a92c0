"""The packages of a session before an installation, and the outcome for each package after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kernel_mcp.environments.layer import Generation, Layer, versions
from kernel_mcp.environments.listed_files import normalised
from kernel_mcp.environments.metadata import DISTRIBUTIONS, provided_modules
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Present:
    """Packages of a session: the versions and modules of each, and the installs so far.

    requested  requirements of earlier installs
    permitted  modules that may be imported because of them
    folders    sys.path entries of the layer, in order
    """

    versions: Mapping[str, str]
    modules: Mapping[str, tuple[str, ...]]
    requested: tuple[Requirement, ...] = ()
    permitted: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, environment: KernelEnvironment, layer: Layer) -> Present:
        """Read the packages, modules and requirements of an environment and its session layer."""
        modules = {name: tuple(found) for name, found in provided_modules(environment).items()}
        return cls(
            versions={**versions(environment.packages), **layer.packages()},
            modules={**modules, **layer.modules()},
            requested=layer.requested(),
            permitted=layer.permitted(),
            folders=tuple(layer.folders()),
        )

    def satisfies(self, requirement: Requirement) -> bool:
        """Return True if a requirement is certainly met; never for one with extras or markers."""
        version = self.versions.get(requirement.name)
        if version is None or requirement.extras or requirement.marker is not None:
            return False
        return requirement.specifier.contains(version, prereleases=True)

    def lacks(self, generation: Generation) -> bool:
        """Return True if a generation adds a package, a requirement or a permitted module."""
        return bool(
            generation.packages
            or not set(generation.requested) <= set(self.requested)
            or not set(generation.permitted) <= self.permitted
        )


def all_versions(environment: KernelEnvironment, layer: Path | None) -> dict[str, str]:
    """Return the packages that a session's next kernel will have: version by name. Blocks."""
    added = {} if layer is None else Layer(layer).packages()
    return dict(sorted({**versions(environment.packages), **added}.items()))


_NOT_THE_POINT = frozenset(
    {"benchmarks", "conftest", "doc", "docs", "examples", "scripts", "setup", "test", "tests"}
)
_MOST_MODULES = 3


class PackageStatus(str, Enum):
    """State of a package in the live session, from best to worst."""

    NO_MODULE = "has no module to import"
    WORKS = "works"
    NOT_TRIED = "not tried"
    NEEDS_RESET = "needs a reset"
    HIDDEN = "hidden by a file of the workspace"
    FAILS = "fails"


Verdicts: TypeAlias = Mapping[str, tuple[str, str]]
"""A kernel's report on trial imports: by module, one of the words of `_STATES`, and details."""
_STATES = {
    "imported": PackageStatus.WORKS,
    "earlier": PackageStatus.NEEDS_RESET,
    "shadowed": PackageStatus.HIDDEN,
    "failed": PackageStatus.FAILS,
}
_BADNESS = tuple(PackageStatus)


@dataclass(frozen=True, slots=True)
class PackageOutcome:
    """Outcome for one package. `previous` is the version it replaces; empty if there was none."""

    name: str
    version: str
    previous: str
    asked: bool
    modules: tuple[str, ...]
    state: PackageStatus
    detail: str = ""

    @property
    def changed(self) -> bool:
        """True if this version was not installed before."""
        return self.previous != self.version


@dataclass(frozen=True, slots=True)
class InstallOutcome:
    """All packages of one `install`, requested ones first.

    unfit      requested packages that do not support this Python or platform
    permitted  modules that code may import from now on
    confined   True if the installer ran in a sandbox
    trouble    the reason why the imports could not be tried; empty when they were
    """

    packages: tuple[PackageOutcome, ...]
    unfit: tuple[str, ...] = ()
    permitted: tuple[str, ...] = ()
    confined: bool = True
    trouble: str = ""

    @property
    def failed(self) -> bool:
        """True if a requested package does not work, or its import could not be tried."""
        bad = (PackageStatus.FAILS, PackageStatus.NOT_TRIED)
        return bool(self.trouble) or any(each.asked and each.state in bad for each in self.packages)

    @property
    def needs_reset(self) -> bool:
        """True if the session uses an older version of a package until a reset."""
        return any(each.state is PackageStatus.NEEDS_RESET for each in self.packages)

    def summary(self) -> str:
        """Return the result as text, failures first."""
        asked = [each for each in self.packages if each.asked]
        rest = [each for each in self.packages if not each.asked]
        asked.sort(key=lambda each: each.state is not PackageStatus.FAILS)
        lines = [_sentence(each) for each in asked]
        lines += [_unfit(name) for name in self.unfit]
        if rest:
            lines.append(f"With them: {', '.join(_short(each) for each in rest)}.")
        if self.needs_reset:
            lines.append(
                "Call reset to change over to the new versions; variables are lost then, the "
                "packages stay."
            )
        lines.append(self.trouble or "The installation changed no variable.")
        if not self.confined:
            lines.append("The installer ran without a sandbox of its own.")
        return "\n".join(lines)

    def sentences(self, names: Collection[str]) -> list[str]:
        """Return a sentence on each requested package among these names."""
        asked = [each for each in self.packages if each.asked and each.name in names]
        return [*map(_sentence, asked), *(_unfit(name) for name in self.unfit if name in names)]


def principal(package: str, modules: Iterable[str]) -> tuple[str, ...]:
    """Return up to three modules whose import shows that a package works.

    Modules named like the package are preferred, then public ones.
    """
    known = [name for name in modules if name.split(".")[0].lower() not in _NOT_THE_POINT]
    exact = [
        name for name in known if normalised(name) == package or DISTRIBUTIONS.get(name) == package
    ]
    public = [name for name in known if not name.startswith("_")]
    return tuple((exact or public or known)[:_MOST_MODULES])


def judge(
    name: str,
    version: str,
    *,
    previous: str,
    asked: bool,
    modules: Sequence[str],
    verdicts: Verdicts,
) -> PackageOutcome:
    """Return the outcome for a package: the worst state of its modules counts."""
    state, detail = PackageStatus.WORKS if modules else PackageStatus.NO_MODULE, ""
    if any(module not in verdicts for module in modules):
        state = PackageStatus.NOT_TRIED
    for module in modules:
        word, reason = verdicts.get(module, ("", ""))
        # in an unchanged package, the loaded module is the one that would be imported now
        found = (
            PackageStatus.WORKS if word == "earlier" and previous == version else _STATES.get(word)
        )
        if found is not None and _BADNESS.index(found) > _BADNESS.index(state):
            state, detail = found, f"import {module}" + (f": {reason}" if reason else "")
    return PackageOutcome(name, version, previous, asked, tuple(modules), state, detail)


def _sentence(each: PackageOutcome) -> str:
    what = f"{each.name} {each.version}"
    if each.changed:
        done = f"Installed {what}" + (f" in place of {each.previous}" if each.previous else "")
    else:
        done = f"{what} was there already"
    imports = ", ".join(each.modules)
    match each.state:
        case PackageStatus.WORKS:
            return f"{done}: import {imports} works in this session."
        case PackageStatus.NEEDS_RESET:
            older = each.previous or "another version"
            return f"{done}, but this session has loaded {older} and goes on with it until a reset."
        case PackageStatus.HIDDEN:
            return (
                f"{done}, but a file of the workspace hides it: {each.detail}. Rename that file, "
                "then import again."
            )
        case PackageStatus.FAILS:
            return f"{done}, but it cannot be used in this session: {each.detail}"
        case PackageStatus.NO_MODULE:
            return f"{done}; it has no module to import."
        case _:
            return f"{done}; whether import {imports} works is not known."


def _unfit(name: str) -> str:
    return f"{name}: left out, it is not for this Python or platform."


def _short(each: PackageOutcome) -> str:
    text = f"{each.name} {each.version}"
    if each.previous and each.changed:
        text += f" (before: {each.previous})"
    if each.state in (PackageStatus.FAILS, PackageStatus.HIDDEN):
        text += f" ({each.state.value}: {each.detail})"
    return text
