"""Read `pyproject.toml` and `uv.lock` of a project, or of a member of a uv workspace.

Packages that the lock takes from a folder are the project's own code: the project itself, members
of its workspace, and paths. Nothing of them is read or installed; their dependencies are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from kernel_mcp.environments.listed_files import (
    foreign,
    local_place,
    normalised,
    placed,
    places_in,
    refused,
    shown,
    table_of,
    tables_in,
    text_of,
    toml_of,
)
from kernel_mcp.environments.out_of_tree import code_of
from kernel_mcp.records import dataclass

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_named = _NAME.fullmatch
_UV_INDEXES = ("index", "index-url", "extra-index-url", "find-links")
_SOURCES = ("git", "url")
_FOLDERS = ("editable", "virtual", "directory")
"""Sources of a lock that are folders with code."""
_MOST_ABOVE = 8
"""Most folders between a member of a workspace and its root."""
_MOST_LOCAL = 200


@dataclass(frozen=True, slots=True)
class ProjectLock:
    """A project and the lock that lists its packages.

    text    text of pyproject.toml
    lock    text of uv.lock
    shape   the parts of pyproject.toml that decide what is installed, for the digest
    direct  names of the dependencies of the project and of its own packages
    local   names of its own packages, which are not installed
    code    modules of those, and the folder that each is imported from
    remark  remark on a lock that is older than the project, for people
    whole   words on the environment that has all of the project; empty without one
    """

    text: str = field(default="", compare=False, repr=False)
    lock: str = field(default="", repr=False)
    shape: str = field(default="", repr=False)
    direct: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    code: Mapping[str, Path] = field(default_factory=dict, compare=False)
    remark: str = field(default="", compare=False)
    whole: str = field(default="", compare=False)

    @property
    def absent(self) -> str:
        """Sentence on what the environment lacks of the project; empty without one."""
        names = shown(", ".join(self.local)) or "the project"
        told = f"code, metadata and scripts of {names} are not installed: --mount shows the code"
        return f"{told}; {self.whole}" if self.whole else ""


NO_PROJECT = ProjectLock()


def read_project(folder: Path, known: Collection[str], python: str) -> ProjectLock:
    """Read the project in `folder` for kernels of the Python `python`; blocks.

    `known` are the indexes of the operator. Raises ConfigError, which names the refused entry.
    """
    top = _locked_in(folder)
    text, lock = text_of(folder / "pyproject.toml", folder), text_of(top / "uv.lock", top)
    project = toml_of(text, folder / "pyproject.toml")
    _check_project(project, folder, known)
    locked = toml_of(lock, top / "uv.lock")
    packages = _check_lock(locked, top, known)
    local = {name: place for name, (_, place) in packages.items() if place is not None}
    own = os.path.relpath(folder, top)
    found = [name for name, place in local.items() if os.path.normpath(place) == own]
    if not found and top != folder:
        raise refused(
            f"{top / 'uv.lock'}", f"it has no member in {shown(own)}; run `uv lock` there"
        )
    table = table_of(project, "project")
    _check_python(str(table.get("requires-python", "")), python, folder)
    parts = ("name", "requires-python", "dependencies", "optional-dependencies")
    shape = [{part: table.get(part) for part in parts}, project.get("dependency-groups")]
    code: dict[str, Path] = {}
    for name, place in [*local.items(), (str(table.get("name", "")), own)]:
        inside = Path(os.path.realpath(top / place))
        if inside.is_relative_to(os.path.realpath(top)):
            code |= code_of(top / place if place != own else folder, _module(name))
    return ProjectLock(
        text,
        lock,
        json.dumps([*shape, table_of(table_of(project, "tool"), "uv")], default=str),
        _direct(found or local, packages),
        tuple(local),
        code,
        _newer(project, packages[found[0]][0], tables_in(locked.get("package"))) if found else "",
        f"--python {top / '.venv'}, which `uv sync` makes, has its metadata and scripts too",
    )


def _locked_in(folder: Path) -> Path:
    """Return the folder of the lock: `folder`, or the root of the uv workspace around it."""
    if not (folder / "uv.lock").exists():
        for above in folder.parents[:_MOST_ABOVE]:
            file = above / "pyproject.toml"
            if (above / "uv.lock").is_file() and file.is_file():
                uv = table_of(table_of(toml_of(text_of(file, above), file), "tool"), "uv")
                return above if "workspace" in uv else folder
    return folder


def _module(name: str) -> str:
    return normalised(name).replace("-", "_")


def _check_project(project: Mapping[str, Any], folder: Path, known: Collection[str]) -> None:
    place = str(folder / "pyproject.toml")
    uv = table_of(table_of(project, "tool"), "uv")
    for key in _UV_INDEXES:
        flag = "--find-links" if key == "find-links" else "--index-url"
        for given in places_in(uv.get(key)):
            if local_place(given, folder) not in known:
                raise refused(place, f"[tool.uv] {key} {foreign(given, flag)}")
    for name, source in table_of(uv, "sources").items():
        for entry in source if isinstance(source, list) else [source]:
            told = entry if isinstance(entry, dict) else {}
            kind = next((key for key in _SOURCES if key in told), "")
            if kind:
                raise refused(place, f"[tool.uv.sources] {shown(name)} {placed(kind)}")


def _check_lock(
    lock: Mapping[str, Any], folder: Path, known: Collection[str]
) -> dict[str, tuple[Mapping[str, Any], str | None]]:
    """Return the packages of a lock by name, with the folder of each that is the project's own.

    Raises ConfigError for packages from an archive, an address or an index that is not known.
    """
    place = str(folder / "uv.lock")
    found: dict[str, tuple[Mapping[str, Any], str | None]] = {}
    packages = lock.get("package", [])
    if packages != (tables := tables_in(packages)):
        raise refused(place, "it is not a lock of uv")
    for package in tables:
        name, source = str(package.get("name")), table_of(package, "source")
        kind, where = next(iter(source.items()), ("nowhere", ""))
        registry = source.get("registry")
        if isinstance(registry, str):
            if local_place(registry, folder) not in known:
                told = foreign(registry, "--index-url")
                raise refused(place, f"{shown(name)} comes from {told}")
            found[name] = package, None
        elif kind in _FOLDERS and _is_path(where) and len(source) == 1 and _named(name):
            found[name] = package, where
        else:
            raise refused(place, f"{shown(name)} {placed(kind)}")
    if sum(where is not None for _, where in found.values()) > _MOST_LOCAL:
        raise refused(place, f"more than {_MOST_LOCAL} of its packages are folders")
    return found


def _is_path(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _direct(
    roots: Iterable[str], packages: Mapping[str, tuple[Mapping[str, Any], str | None]]
) -> tuple[str, ...]:
    """Return the dependencies from an index that `roots` have, directly or by own packages."""
    found: dict[str, None] = {}
    ahead, seen = list(roots), set(roots)
    while ahead:
        package, _ = packages[ahead.pop(0)]
        for each in tables_in(package.get("dependencies")):
            name = str(each.get("name", ""))
            if packages.get(name, ({}, None))[1] is None:
                found[name] = None
            elif name not in seen:
                seen.add(name)
                ahead.append(name)
    return tuple(found)


def _newer(
    project: Mapping[str, Any], own: Mapping[str, Any], locked: Iterable[Mapping[str, Any]]
) -> str:
    """Return a remark on dependencies of a project that its lock lacks; empty if it has all.

    `own` is the project's entry among the `locked` packages.
    """
    from packaging.requirements import Requirement

    told = table_of(own, "metadata")
    parts = (
        *(own.get("dependencies"), told.get("requires-dist")),
        *table_of(own, "dev-dependencies").values(),
        *table_of(told, "requires-dev").values(),
    )
    known = {normalised(str(each.get("name"))) for part in parts for each in tables_in(part)}
    versions: dict[str, list[str]] = {}
    for package in locked:
        versions.setdefault(normalised(str(package.get("name"))), []).append(
            str(package.get("version", ""))
        )
    missing: dict[str, None] = {}
    groups = table_of(project, "dependency-groups").values()
    for asked in (table_of(project, "project").get("dependencies"), *groups):
        for text in asked if isinstance(asked, list) else []:
            with suppress(ValueError):  # invalid, which uv reports
                wanted = Requirement(text if isinstance(text, str) else "")
                name, fits = normalised(wanted.name), wanted.specifier.contains
                there = [each for each in versions.get(name, ()) if each]
                fitting = [each for each in there if fits(each, prereleases=True)]
                if name not in known or (there and not fitting):
                    missing[f"{name}{wanted.specifier if name in known else ''}"] = None
    if missing:
        names_lacking = shown(", ".join(missing))
        return (
            f" (its uv.lock is older than pyproject.toml and lacks {names_lacking}: run `uv lock`)"
        )
    return ""


def _check_python(wanted: str, python: str, folder: Path) -> None:
    """Raise ConfigError where the project is for other versions than the kernels'."""
    import platform

    from packaging.specifiers import SpecifierSet

    version = python or platform.python_version()
    if "/" in version or not wanted:
        return
    try:
        fits = SpecifierSet(wanted).contains(version if version.count(".") > 1 else f"{version}.99")
    except ValueError:  # invalid, which uv reports
        return
    if not fits:
        raise refused(
            f"{folder / 'pyproject.toml'}",
            f"the project is for Python {shown(wanted)}, and the kernels have {version}: start "
            "the server with --python VERSION",
        )
