"""Read a virtual or conda environment of the operator's, which kernels then use unchanged.

Its content may come from a cloned repository, so nothing of it is run or imported outside the
sandbox of a kernel. Version, base and packages are read from files. A base that these name becomes
readable to kernels only if it holds the standard library of a Python.

A second environment, built by this server for the same minor version, supplies the packages that
the kernel itself needs.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON, parse_entry
from kernel_mcp.environments.build import BASE_PACKAGES
from kernel_mcp.environments.interpreters import Interpreter
from kernel_mcp.environments.layer import versions
from kernel_mcp.environments.listed_files import normalised
from kernel_mcp.environments.metadata import (
    installed_modules,
    installed_needs,
    installed_versions,
)
from kernel_mcp.environments.out_of_tree import (
    OPEN,
    SYSTEM,
    is_below,
    outside_of,
    small_text,
    unseen,
)
from kernel_mcp.errors import ConfigError, EnvironmentBuildError
from kernel_mcp.launch.base import KernelEnvironment, Outside, Support, mark_of
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_VENV, _CONDA = "pyvenv.cfg", "conda-meta"
_OF_A_VENV = (_VENV, "bin", "include", "lib", "lib64", "libexec", "share", "ssl")
"""Entries of a virtual environment that kernels see, no others: it may be the folder of a project,
and a `pip.conf` in it holds keys."""
_OF_A_BASE = ("bin", "include", "lib", "lib64", "libexec", "openssl", "ssl")
"""Entries that kernels see of the base that `pyvenv.cfg` names. The base may be a home folder, or a
folder that a project names to expose it. `share` is left out: no Python needs it, and in `~/.local`
other programs use it."""
_HIDDEN = frozenset((_CONDA, "conda-bld", "condabin", "envs", "etc", "pkgs", "shell"))
"""Entries of a conda environment that kernels do not see: other environments, caches, settings."""
_MACHINES = {"x86_64": 62, "aarch64": 183}
"""e_machine of elf(5)."""
_MOST_LINKS = 20
_MOST_OUTSIDE = 20
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")
_PROGRAM = re.compile(r"python(\d+\.\d+)")
# bound: 255 characters, a file's name
_CONDA_PYTHON = re.compile(r"python-(\d+\.\d+\.\d+)\w*-[^-]+\.json")
_ANEW = "Make it anew (`uv venv --clear`, `python3 -m venv --clear` or `conda create`)"
_SLOW = (
    "most of its packages have no bytecode, and kernels, which may write none there, compile them "
    "at each import: `uv pip install --compile-bytecode`, or `python -m compileall` in it, helps"
)
_KERNELS_OWN = ("cloudpickle", "ipykernel", "ipython", "jupyter-client", "traitlets")
"""Packages that the kernel is written against: other major versions are untested."""


@dataclass(frozen=True, slots=True)
class OwnEnvironment:
    """One environment as its files describe it.

    sites     folders of packages: its own, then those of its base if it includes them
    readonly  paths that kernels see: its own entries, its base, links on the way to that
    outside   packages that lie outside of it, by name
    links     symlinks on the way to its interpreter and to its base
    """

    root: Path
    interpreter: Interpreter
    sites: tuple[Path, ...]
    readonly: tuple[Path, ...]
    outside: Mapping[str, Outside] = field(default_factory=dict)
    links: tuple[Path, ...] = ()

    @property
    def minor(self) -> str:
        """Its Python as `3.12`."""
        return self.interpreter.version.rpartition(".")[0]

    @property
    def fixed(self) -> tuple[Path, ...]:
        """Folders that sessions may not change, as kernels run the programs in them."""
        return tuple(dict.fromkeys([self.root, Path(self.interpreter.prefix)]))

    def require_steady(self, mounts: Iterable[Mount]) -> None:
        """Raise ConfigError if a mount lets sessions redirect a link to the interpreter."""
        for mount in mounts:
            for link in self.links:
                if (
                    mount.writable
                    and is_below(link, [mount.host])
                    and not is_below(link, self.fixed)
                ):
                    raise ConfigError(
                        f"--mount {mount}: {link} leads to the Python of --python {self.root}, and "
                        "sessions could lead it elsewhere. Mount the folder read-only, or make the "
                        "environment with a Python that is not named by that link."
                    )

    def versions(self) -> dict[str, str]:
        """Return its packages with their versions; the first of `sites` that has one counts."""
        found: dict[str, str] = {}
        for site in reversed(self.sites):
            found |= versions(installed_versions(site))
        return found

    def lacks(self, wanted: Iterable[Requirement]) -> tuple[Requirement, ...]:
        """Return the requirements in `wanted` that this environment does not meet."""
        found = self.versions()
        return tuple(
            each
            for each in wanted
            if each.extras
            or each.name not in found
            or not each.specifier.contains(found[each.name], prereleases=True)
        )

    def _needs(self, needs: Iterable[Requirement], there: Mapping[str, str]) -> dict[str, bool]:
        """Return the applicable `needs` whose package is in `there`: True if its version fits."""
        version = self.interpreter.version
        here = {"extra": "", "python_version": self.minor, "python_full_version": version}
        found: dict[str, bool] = {}
        for need in needs:
            name = normalised(need.name)
            with suppress(ValueError):  # a number with more digits than int() accepts
                if name in there and _applies(need, here):
                    met = need.specifier.contains(there[name], prereleases=True)
                    found[f"{name}{need.specifier}"] = met
        return found

    def above(self, ours: KernelEnvironment, wanted: Iterable[Requirement]) -> KernelEnvironment:
        """Return the combination that kernels run in: this one and `ours` on one sys.path. Blocks.

        `wanted` are the requirements that `ours` was built for. `ours` is last on sys.path, unless
        its packages or the kernel do not work with the versions of this environment: then first.
        """
        site = _site_of(ours)
        theirs, added = self.versions(), versions(ours.packages)
        base = [parse_entry(each) for each in BASE_PACKAGES]
        met = self._needs([*base, *wanted, *installed_needs(site)], theirs)
        untried = any(
            name in theirs and _major(theirs[name]) != _major(added.get(name, ""))
            for name in _KERNELS_OWN
        )
        first = untried or not all(met.values())
        packages = {**theirs, **added} if first else {**added, **theirs}
        among = [need for place in self.sites for need in installed_needs(place)]
        kept = self._needs(among, packages)
        modules: dict[str, tuple[str, ...]] = {}
        for place in (*reversed(self.sites), site) if first else (site, *reversed(self.sites)):
            modules |= installed_modules(place)
        replaced = {
            name: f"{version} in place of {theirs[name]}"
            for name, version in added.items()
            if first and theirs.get(name, version) != version
        }
        return KernelEnvironment(
            python=self.root / "bin/python",
            readonly=(*self.readonly, site, *ours.runtime),
            version=self.interpreter.version,
            packages=tuple(f"{name}=={packages[name]}" for name in sorted(packages)),
            base=ours.base,
            support=Support(
                site=site,
                first=first,
                sites=self.sites,
                runtime=ours.runtime,
                mark=mark_of(self.sites),
                modules=modules,
                replaced=replaced,
                outside=self.outside,
                needs=tuple(need for need, holds in kept.items() if holds),
                compiled=_compiled(self.sites[0]),
            ),
        )


def own_folder(given: str) -> Path | None:
    """Return the environment's folder that `--python` names, as such or by its `bin/python`.

    None for a version, and for an interpreter outside of any environment. Raises OSError.
    """
    if "/" not in given:
        return None
    path = Path(given)
    named = path.parent.parent if path.parent.name == "bin" and not path.is_dir() else path
    root = Path(os.path.realpath(named))  # a link could lead elsewhere at the next start
    known = (root / _VENV).is_file() or (root / _CONDA).is_dir()
    return root if known else None


def own_version(given: str) -> str:
    """Return the version of the Python that `--python` names; empty if no file has it. Blocks.

    Raises EnvironmentBuildError for an environment that cannot be used.
    """
    if "/" not in given:
        return given if given[:1].isdigit() else ""
    if (found := own_environment(given)) is not None:
        return found.interpreter.version
    program = _PROGRAM.fullmatch(Path(os.path.realpath(given)).name)
    return "" if program is None else program[1]


def own_environment(given: str, *, apart: bool | None = None) -> OwnEnvironment | None:
    """Return the environment that `--python` names; None if it names none. Blocks.

    With `apart`, kernels run as other users and need its files readable by all; by default those
    of a root server do. Raises EnvironmentBuildError for an environment that cannot be used.
    """
    path = Path(given)
    try:
        root = own_folder(given)
        if root is None:
            if "/" in given and path.is_dir():
                why = f"it is a folder without {_VENV} or {_CONDA}, and so no environment"
                _refuse(path, why, "Name the folder of one")
            if "/" in given and not path.exists():
                why = "there is no such program or folder, and so it does not run as a Python"
                _refuse(path, why, "Make it")
            return None
        found = _of_conda(root) if (root / _CONDA).is_dir() else _of_venv(root)
        _readable(found, os.geteuid() == 0 if apart is None else apart)
    except OSError as error:
        _refuse(path, f"{error.filename} cannot be read: {error.strerror}", "Allow it")
    except ValueError as error:
        _refuse(path, f"a file of it cannot be read: {error}")
    return found


def remarks(
    environment: KernelEnvironment, mounts: Sequence[Mount], *, built: bool = False
) -> list[str]:
    """Return remarks for the operator on an environment of theirs; none for an ordinary one.

    `built` is True if it was built here, of packages that the kernel does not work with.
    """
    support = environment.support
    if support is None:
        return []
    found = [f"packages of {environment.root}, read-only; nothing of it was built"]
    if built:
        found = ["what the kernel needs comes from an environment of its own, for other versions"]
    if support.replaced:
        pinned = ", ".join(f"{name} {how}" for name, how in sorted(support.replaced.items()))
        found.append(f"the kernel needs other versions than are there; code sees {pinned}")
    if not support.compiled:
        found.append(_SLOW)
    return [*found, *dict.fromkeys(unseen(environment, mounts).values())]


def _of_venv(root: Path) -> OwnEnvironment:
    lines = small_text(root / _VENV).splitlines()
    words = {name.strip().lower(): text.strip() for name, _, text in map(_parted, lines)}
    told = _VERSION.match(words.get("version_info", "") or words.get("version", ""))
    if told is None:
        _refuse(root, f"its {_VENV} names no version")
    version = _checked(root, told[0])
    home = Path(words.get("home", ""))
    names = (f"python{_minor(version)}", "python3", "python")
    base = next((home / name for name in names if (home / name).exists()), None)
    if not home.is_absolute() or base is None:
        _refuse(root, f"its base interpreter is gone from {home}")
    real = Path(os.path.realpath(base))
    prefix = _prefix(root, real, version)
    site = root / f"lib/python{_minor(version)}/site-packages"
    sites = [site]
    if words.get("include-system-site-packages", "").lower() == "true":
        sites += _system_sites(prefix, _minor(version))
    return _described(root, base, version, prefix, sites, _shown(root, _OF_A_VENV))


def _of_conda(root: Path) -> OwnEnvironment:
    names = (entry.name for entry in (root / _CONDA).iterdir())
    told = next(filter(None, map(_CONDA_PYTHON.fullmatch, names)), None)
    if told is None:
        _refuse(root, "there is no Python in it (`conda install python` adds one)")
    version = _checked(root, told[1])
    python = root / "bin/python"
    prefix = _prefix(root, Path(os.path.realpath(python)), version)
    site = root / f"lib/python{_minor(version)}/site-packages"
    return _described(root, python, version, prefix, [site], _seen(root))


def _described(
    root: Path,
    base: Path,
    version: str,
    prefix: Path,
    sites: Sequence[Path],
    readonly: Sequence[Path],
) -> OwnEnvironment:
    if not sites[0].is_dir() or not is_below(Path(os.path.realpath(sites[0])), readonly):
        _refuse(root, f"it has no {sites[0].relative_to(root)}, so another Python made it")
    python = root / "bin/python"
    program = Path(os.path.realpath(python))
    target = _PROGRAM.match(program.name)
    if not python.exists():
        _refuse(root, f"{python} leads nowhere")
    if target is not None and target[1] != _minor(version):
        _refuse(root, f"it is of Python {_minor(version)}, and {python} is Python {target[1]} now")
    real = os.path.realpath(base)
    interpreter = Interpreter(real, version, "cpython", str(prefix), str(prefix))
    below = [*readonly, *_seen(prefix)]
    if not program.is_file() or not is_below(program, [*below, *SYSTEM]):
        _refuse(root, f"{python} leads to {program}, which is neither in it nor in its base")
    ways = dict.fromkeys(path for start in (python, base) for path in _ways(start))
    links = [path for path in ways if not is_below(path, [*below, *SYSTEM])]
    outside = outside_of(sites[0], below)
    if len(outside) > _MOST_OUTSIDE:
        why = f"{len(outside)} of its packages are not in it, as {next(iter(outside))}"
        _refuse(root, why, "Install them with `uv pip install --link-mode copy`")
    seen = tuple(dict.fromkeys([*below, *_named(prefix, links)]))
    met = tuple(dict.fromkeys(link for start in (python, base) for link in _links(start)))
    return OwnEnvironment(root, interpreter, tuple(sites), seen, outside, met)


def _checked(root: Path, version: str) -> str:
    major, minor = map(int, version.split(".")[:2])
    if not OLDEST_PYTHON <= (major, minor) <= NEWEST_PYTHON:
        oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST_PYTHON, NEWEST_PYTHON))
        _refuse(root, f"it is of Python {version}, and kernels run on Python {oldest} to {newest}")
    return version if version.count(".") == 2 else f"{version}.0"


def _prefix(root: Path, real: Path, version: str) -> Path:
    """Return the folder that the base interpreter `real` is installed in.

    Raises OSError, and EnvironmentBuildError for a program that kernels cannot run on.
    """
    with open(os.open(real, OPEN), "rb") as file:
        head = file.read(20)
    machine = _MACHINES.get(platform.machine())
    if not head.startswith(b"\x7fELF"):
        _refuse(root, f"its base {real} is no program for Linux")
    if machine is not None and int.from_bytes(head[18:20], "little") != machine:
        _refuse(root, f"its base {real} is for another machine than {platform.machine()}")
    prefix, name = real.parent.parent, f"python{_minor(version)}"
    if real.name == f"{name}t":
        _refuse(root, f"its base {real} has no global lock, and the kernel's packages need one")
    if not any((prefix / folder / name / "os.py").is_file() for folder in ("lib", "lib64")):
        _refuse(root, f"its base {real} has no standard library of Python {_minor(version)}")
    return prefix


def _system_sites(prefix: Path, minor: str) -> list[Path]:
    places = [prefix / f"lib/python{minor}/site-packages"]
    if str(prefix) == "/usr":
        places = [Path(f"/usr/local/lib/python{minor}/dist-packages"), *places]
        places.append(Path("/usr/lib/python3/dist-packages"))
    return [place for place in places if place.is_dir()]


def _seen(prefix: Path) -> list[Path]:
    """Return the entries of a Python's installation that kernels see.

    Settings and environments of conda are left out. Raises OSError.
    """
    if is_below(prefix, SYSTEM):
        return [prefix]
    if not (prefix / _CONDA).is_dir():
        return _shown(prefix, _OF_A_BASE)
    names = sorted(entry.name for entry in prefix.iterdir())
    return _shown(prefix, [each for each in names if each not in _HIDDEN and each[0] != "."])


def _shown(root: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of those `names` that exist, without links to anything outside of them."""
    found = {root / name: Path(os.path.realpath(root / name)) for name in names}
    own = [path for path, real in found.items() if path == real and path.exists()]
    return [path for path, real in found.items() if path.exists() and is_below(real, own)]


def _ways(path: Path) -> Iterator[Path]:
    """Yield the paths that a chain of symlinks passes from `path` on, without the final file."""
    for _ in range(_MOST_LINKS):
        if os.path.realpath(path) == str(path):
            return
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _links(path: Path) -> Iterator[Path]:
    """Yield each symlink met while resolving `path`, folders included, by its resolved location."""
    place, left = Path("/"), [*reversed(path.parts)]
    for _ in range(_MOST_LINKS * len(left)):
        if not left:
            return
        place = Path(os.path.normpath(place / left.pop()))
        if place.is_symlink():
            yield place
            left += reversed(place.readlink().parts)
            place = place.parent


def _named(prefix: Path, links: Iterable[Path]) -> list[Path]:
    """Return the paths that kernels need to follow `links` to a program.

    For a link below an alias of `prefix`, these are the alias's entries; others stay as they are.
    """
    found: list[Path] = []
    for link in links:
        parent = link.parent.parent
        if Path(os.path.realpath(parent)) == prefix:
            found += [parent / path.relative_to(prefix) for path in _seen(prefix)]
        else:
            found.append(link)
    return found


def _compiled(site: Path) -> bool:
    """Return True if at least half of the packages have bytecode."""
    folders = [path.parent for path in site.glob("*/__init__.py")]
    return sum((folder / "__pycache__").is_dir() for folder in folders) * 2 >= len(folders)


def _readable(found: OwnEnvironment, apart: bool) -> None:
    """Raise EnvironmentBuildError if kernels may not read it, judged by the upper folders."""
    real = Path(found.interpreter.executable)
    site = found.sites[0]
    entries = [Path(entry) for entry in os.scandir(site)]
    files = [entry / name for entry in entries for name in ("__init__.py", "METADATA")]
    above = [real.parent, real, found.root / "bin", *reversed(site.parents[:2]), site]
    looked = [*above, *entries, *files]
    for path in looked:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        folder = stat.S_ISDIR(mode)
        if not apart and not os.access(path, os.R_OK | (os.X_OK if folder else 0)):
            _refuse(found.root, f"this server's user may not read {path}", "Allow it")
        needed = 0o005 if folder else 0o004
        if apart and mode & needed != needed:
            why = "sessions of a root server run as users of their own, which may not read"
            step = f"Allow it with `chmod -R o+rX {found.root}`, or start the server as its owner"
            _refuse(found.root, f"{why} {path}", step)


def _applies(need: Requirement, here: Mapping[str, str]) -> bool:
    try:
        return need.marker is None or need.marker.evaluate(dict(here))
    except ValueError:  # an invalid comparison or number
        return False


def _site_of(ours: KernelEnvironment) -> Path:
    minor = ours.version.rpartition(".")[0]
    return next((ours.python.parent.parent / "lib").glob(f"python{minor}*/site-packages"))


def _major(version: str) -> str:
    return version.partition(".")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition("=")


def _refuse(path: Path, why: str, step: str = _ANEW) -> NoReturn:
    raise EnvironmentBuildError(f"--python {path}: {why}. {step}, or name another one.")
