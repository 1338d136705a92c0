"""What is installed in an environment, read from its `*.dist-info` folders without running it.

The folders are the packages' own: names that are none are passed over, so that what is listed can
be shown, and a package that calls its module `subprocess` does not thereby open Python's own.
"""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kernel_mcp.environments.module_distributions import packages_for
from kernel_mcp.launch.base import KernelEnvironment

# `EnvironmentSpec`: what an environment is asked to hold.


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A Python (version, path, or empty for the server's own) and packages.

    `packages` have the names of distributions, each once and sorted.
    """

    python: str = ""
    packages: tuple[Requirement, ...] = ()

    @classmethod
    def for_allow(
        cls, allow: Iterable[str], *, python: str = "", packages: Iterable[Requirement] = ()
    ) -> EnvironmentSpec:
        """The operator's `--allow` entries and the packages one session asks for on top.

        Raises ConfigError for a bad entry.
        """
        return cls(python, tuple(sorted({*packages_for(allow), *packages}, key=str)))

    def __hash__(self) -> int:  # that of a requirement takes as long as parsing it
        return hash((self.python, *(each.name for each in self.packages)))


MAX_RECORD_BYTES = 64 * 1024 * 1024
"""The list of files of a package: the largest that are known have some 2 MiB."""
_SUFFIXES = (".py", ".so", ".pyd")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def import_names(env: KernelEnvironment, spec: EnvironmentSpec) -> frozenset[str]:
    """The modules that the packages of a spec provide, dotted below shared namespaces.

    `pillow` gives `PIL`; what those packages depend on gives nothing.
    """
    provided = provided_modules(env)
    return frozenset(name for each in spec.packages for name in provided.get(each.name, ()))


def provided_modules(env: KernelEnvironment) -> Mapping[str, Iterable[str]]:
    """The modules of every package in an environment."""
    root = env.python.parent.parent
    provided = noted_modules(root)
    if provided is None:
        sites = root.glob("lib/python3*/site-packages")
        return {name: dist for site in sites for name, dist in installed_modules(site).items()}
    return provided


def note_file(root: Path) -> Path:
    """Where it is noted what an environment holds: outside of its folder, which packages fill."""
    return root.with_name(f"{root.name}.json")


def noted_modules(root: Path) -> Mapping[str, Iterable[str]] | None:
    """The modules by package that are noted, or None when there is no usable note."""
    try:
        content = json.loads(note_file(root).read_text(encoding="utf-8"))
        modules = content["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return modules if isinstance(modules, dict) else None


def installed_modules(site_packages: Path) -> dict[str, tuple[str, ...]]:
    """Every installed distribution (normalised name) with the modules its RECORD lists."""
    return {
        name: tuple(sorted(_modules(folder / "RECORD")))
        for name, folder in _distributions(site_packages).items()
    }


def installed_versions(site_packages: Path) -> tuple[str, ...]:
    """Every installed distribution as `name==version`, sorted."""
    return tuple(
        f"{name}=={folder.stem.rpartition('-')[2]}"
        for name, folder in sorted(_distributions(site_packages).items())
    )


def _distributions(site_packages: Path) -> dict[str, Path]:
    return {
        str(canonicalize_name(folder.stem.rpartition("-")[0])): folder
        for folder in sorted(site_packages.glob("*.dist-info"))
        if _is_distribution(folder.stem)
    }


def _is_distribution(stem: str) -> bool:
    """Whether `NAME-VERSION` has a name and a version."""
    name, _, version = stem.rpartition("-")
    try:
        Version(version)
    except InvalidVersion:
        return False
    return version.isascii() and _NAME.fullmatch(name) is not None


def _modules(record: Path) -> set[str]:
    try:
        with open(os.open(record, _OPEN), encoding="utf-8", newline="") as lines:
            status = os.fstat(lines.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
                return set()
            files = [PurePosixPath(row[0]) for row in csv.reader(lines) if row]
    except (OSError, ValueError, csv.Error):
        return set()
    code = [file for file in files if _is_code(file)]
    packages = {file.parent for file in code if file.name.split(".")[0] == "__init__"}
    found = set()
    for file in code:
        top = _top(file, packages)
        # letters of other scripts can pass for those of this one, or show nothing at all
        named = all(part.isidentifier() and part.isascii() for part in top)
        if named and top[0] not in sys.stdlib_module_names:
            found.add(".".join(top))
    return found


def _is_code(file: PurePosixPath) -> bool:
    return file.suffix in _SUFFIXES and not file.is_absolute() and ".." not in file.parts


def _top(file: PurePosixPath, packages: set[PurePosixPath]) -> tuple[str, ...]:
    """The outermost package of a file, or its own dotted name when no folder has `__init__`."""
    for depth in range(1, len(file.parts)):
        if PurePosixPath(*file.parts[:depth]) in packages:
            return file.parts[:depth]
    return (*file.parts[:-1], file.name.split(".")[0])
