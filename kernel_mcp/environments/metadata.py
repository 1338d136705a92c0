"""What is installed in an environment, read from its `*.dist-info` folders without running it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_mcp.environments.spec import EnvironmentSpec
from kernel_mcp.launch.base import KernelEnvironment

MANIFEST = "kernel-mcp.json"

_SUFFIXES = (".py", ".so", ".pyd")


def import_names(env: KernelEnvironment, spec: EnvironmentSpec) -> frozenset[str]:
    """The modules that the packages of a spec provide, dotted below shared namespaces.

    `pillow` gives `PIL`; what those packages depend on gives nothing.
    """
    wanted = {str(canonicalize_name(Requirement(text).name)) for text in spec.packages}
    provided = provided_modules(env)
    return frozenset(name for dist in wanted for name in provided.get(dist, ()))


def provided_modules(env: KernelEnvironment) -> Mapping[str, Iterable[str]]:
    """The modules of every package in an environment."""
    root = env.python.parent.parent
    provided = _recorded(root / MANIFEST)
    if provided is None:
        sites = root.glob("lib/python3*/site-packages")
        return {name: dist for site in sites for name, dist in installed_modules(site).items()}
    return provided


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
        for folder in site_packages.glob("*.dist-info")
    }


def _modules(record: Path) -> set[str]:
    try:
        with record.open(encoding="utf-8", newline="") as lines:
            files = [PurePosixPath(row[0]) for row in csv.reader(lines) if row]
    except OSError:
        return set()
    code = [file for file in files if _is_code(file)]
    packages = {file.parent for file in code if file.name.split(".")[0] == "__init__"}
    found = set()
    for file in code:
        top = _top(file, packages)
        if all(part.isidentifier() for part in top):
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


def _recorded(manifest: Path) -> Mapping[str, Iterable[str]] | None:
    """The `modules` a manifest holds, or None when there is no usable one."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        modules = content["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return modules if isinstance(modules, dict) else None
