"""Read the requirements of `--requirements FILE` and of the project and lock of `--project DIR`.

A file may come from a cloned repository. So it may name packages and versions, but no address, path
or version control, and no index other than those of the operator's flags. Of a lock, versions and
hashes are used; addresses in it are never requested.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import parse_toml
from kernel_mcp.environments.out_of_tree import code_of
from kernel_mcp.errors import ConfigError
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MOST_BYTES = 8 * MIB
"""Largest file that is read; locks of large projects have some 2 MiB."""
MOST_FILES = 20
MOST_CHARS = 4000
"""Most characters of a requirement without hashes: below the 4,300 digits that int() accepts."""
SHOWN_CHARS = 120
_HASHES = re.compile(r"sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")
_FILES = {"-r": "lines", "--requirement": "lines", "-c": "limits", "--constraint": "limits"}
_INDEXES = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links")
_NO_EFFECT = ("--only-binary", "--prefer-binary")
"""Options without effect: only wheels are installed."""
_UV_INDEXES = ("index", "index-url", "extra-index-url", "find-links")
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
_PLACE = re.compile(
    r"^(\.{0,2}/|\.{1,2}$|~|[\w+.-]+:/|file:|(git|hg|svn|bzr)\+)|\.(whl|zip|gz)$", re.I
)
_NAMED = re.compile(r"^[\w-]+=(?=\w+://)")
"""Name before an address in variables of uv, as in `name=https://…`."""
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")
_MISSING = {
    "uv.lock": "run `uv lock` there",
    "pyproject.toml": "name the folder of a project that has one, and a uv.lock",
}
_FOLDER = "name a file in it, as requirements.txt, or the folder of a uv.lock with --project"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_SOURCES = ("git", "url", "path", "workspace")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """One requirement with its hashes, as uv reads it; `place` is its file and line."""

    text: str
    name: str
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the place and the requirement without hashes, for people."""
        return f"{self.place}: {self.text.partition(' --hash')[0]}"


@dataclass(frozen=True, slots=True)
class PinnedRequirements:
    """Requirements from files, installed besides the operator's packages.

    lines    requirements
    limits   constraints
    project  text of pyproject.toml
    lock     text of uv.lock
    shape    the parts of pyproject.toml that decide what is installed, for the digest
    direct   names of the project's own dependencies
    origins  flags and files, for people
    code     the project's own modules, not installed, and the folder that each is imported from
    """

    lines: tuple[Line, ...] = ()
    limits: tuple[Line, ...] = ()
    project: str = field(default="", compare=False, repr=False)
    lock: str = field(default="", repr=False)
    shape: str = field(default="", repr=False)
    direct: tuple[str, ...] = ()
    origins: tuple[str, ...] = field(default=(), compare=False)
    code: Mapping[str, Path] = field(default_factory=dict, compare=False)

    def __bool__(self) -> bool:
        return bool(self.origins)

    @property
    def names(self) -> tuple[str, ...]:
        """Packages that the files list, without dependencies of those."""
        return (*(line.name for line in self.lines), *self.direct)

    @property
    def digest(self) -> str:
        """Digest of all that decides what is installed; empty without files."""
        if not self:
            return ""
        parts = [[line.text for line in lines] for lines in (self.lines, self.limits)]
        return sha256(json.dumps([*parts, self.lock, self.shape]).encode()).hexdigest()

    def named_in(self, output: str) -> list[str]:
        """Return the lines whose packages occur in uv's output."""
        return [
            str(line)
            for line in self.lines
            if re.search(rf"(?<![\w.-]){re.escape(line.name)}(?![\w-])", output)
        ]


NOTHING = PinnedRequirements()


def read_pinned(
    settings: Settings, default_index: str, environ: Mapping[str, str]
) -> PinnedRequirements:
    """Return the requirements in the files that `settings` name; blocks.

    `default_index` is the address of uv's own default index, `environ` may name others. Raises
    ConfigError, which names the refused line or entry.
    """
    own = [settings.index_url, *settings.find_links]
    own += [each for name in _UV_VARIABLES for each in environ.get(name, "").split()]
    known = {_plain(_NAMED.sub("", place)) for place in own if place}
    lines: list[Line] = []
    limits: list[Line] = []
    origins: list[str] = []
    if settings.requirements is not None:
        reader = _Reader(settings.requirements, known)
        reader.read(settings.requirements, "lines", "")
        lines, limits = reader.found["lines"], reader.found["limits"]
        origins.append(f"--requirements {settings.requirements}")
    if settings.project is None:
        return PinnedRequirements(tuple(lines), tuple(limits), origins=tuple(origins))
    folder = settings.project
    text, lock = (_content(folder / name, folder) for name in ("pyproject.toml", "uv.lock"))
    project = _toml(text, folder / "pyproject.toml")
    _check_project(project, folder, known)
    root = _check_lock(_toml(lock, folder / "uv.lock"), folder, {*known, _plain(default_index)})
    table = _table(project, "project")
    origins.append(f"--project {folder}{(newer := _newer(table, root))}")
    if newer:
        logger.warning("%s", origins[-1])
    _check_python(str(table.get("requires-python", "")), settings.python, folder)
    parts = ("name", "requires-python", "dependencies", "optional-dependencies")
    shape = [{part: table.get(part) for part in parts}, project.get("dependency-groups")]
    return PinnedRequirements(
        tuple(lines),
        tuple(limits),
        project=text,
        lock=lock,
        shape=json.dumps([*shape, _table(_table(project, "tool"), "uv")], default=str),
        direct=tuple(str(each.get("name", "")) for each in _tables(root.get("dependencies"))),
        origins=tuple(origins),
        code=code_of(folder, normalised(str(table.get("name", ""))).replace("-", "_")),
    )


def exported(text: str) -> list[Line]:
    """Return the lines that uv exported from a lock. Raises ConfigError for other than packages."""
    reader = _Reader(Path("uv.lock"), ())
    reader.take(text, Path("uv.lock"), "lines")
    return reader.found["lines"]


class _Reader:
    """Reads a requirements file and those it includes, which have to lie in its folder."""

    def __init__(self, top: Path, known: Collection[str]) -> None:
        self._folder = top.parent
        self._known = known
        self._files: set[tuple[Path, str]] = set()
        self._hashed = False
        self.found: dict[str, list[Line]] = {"lines": [], "limits": []}

    def read(self, file: Path, kind: str, place: str) -> None:
        """Read a file; `place` is the line that includes it, empty for the top file."""
        key = (Path(os.path.realpath(file)), kind)
        if key in self._files:
            return
        self._files.add(key)
        if len(self._files) > MOST_FILES:
            raise _refused(place, f"there are more than {MOST_FILES} files")
        self.take(_content(file, self._folder if place else None, place), file, kind)
        if not place and self._hashed:
            self._require_hashes()

    def take(self, text: str, file: Path, kind: str) -> None:
        """Parse the lines of a file into `found`."""
        for number, line in _logical(text):
            self._take(line, f"{file.name} line {number}", file, kind)

    def _take(self, line: str, place: str, file: Path, kind: str) -> None:
        if line.startswith("-"):
            self._option(line, place, file)
            return
        words = line.split(" --hash")
        hashes = [word.lstrip("= ").strip() for word in words[1:]]
        requirement = _requirement(words[0].strip(), place)
        for each in hashes:
            if not _HASHES.fullmatch(each):
                raise _refused(place, f"{_shown(each)} is no sha256, sha384 or sha512 of a file")
        tail = "".join(f" --hash={each}" for each in hashes)
        name = normalised(requirement.name)
        self.found[kind].append(Line(f"{requirement}{tail}", name, place))

    def _option(self, line: str, place: str, file: Path) -> None:
        name, _, value = (
            re.sub(r"^(-[rcief])(?=[^\s=-])", r"\1 ", line).replace("=", " ", 1).partition(" ")
        )
        value = value.strip().strip("\"'")
        if name in _FILES:
            if "://" in value:
                raise _refused(place, f"{_shown(value)} is an address and no file beside this one")
            self.read(file.parent / value, _FILES[name], place)
        elif name in _INDEXES:
            if _local(value, file.parent) not in self._known:
                flag = "--find-links" if name in ("-f", "--find-links") else "--index-url"
                raise _refused(place, f"{name} {_foreign(value, flag)}")
        elif name == "--require-hashes":
            self._hashed = True
        elif name in ("-e", "--editable") and "://" in value:
            raise _refused(place, f"{_shown(line)} {_placed('address or path')}")
        elif name in ("-e", "--editable"):
            raise _refused(place, "-e takes code from a folder: show that with --mount instead")
        elif name not in _NO_EFFECT:
            raise _refused(place, f"{_shown(name)} is an option that is not taken here; remove it")

    def _require_hashes(self) -> None:
        for line in self.found["lines"]:
            if " --hash=" not in line.text:
                raise _refused(line.place, "it has no --hash, which --require-hashes asks for")


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, with their number; those that end in a backslash are joined."""
    begun, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        first = first or number
        if line.endswith("\\"):
            begun += line[:-1].rstrip() + " "
            continue
        whole = (begun + line.strip()).strip()
        if whole:
            yield first, " ".join(whole.split())
        begun, first = "", 0
    if begun.strip():
        yield first, " ".join(begun.split())


def _requirement(text: str, place: str) -> Requirement:
    from packaging.requirements import InvalidRequirement, Requirement

    if _PLACE.search(text) or " @ " in text or re.match(r"[\w.\[\],-]+\s*@", text):
        raise _refused(place, f"{_shown(text)} {_placed('address or path')}")
    try:
        if len(text) > MOST_CHARS:
            raise InvalidRequirement
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        raise _refused(
            place, f"{_shown(text)} is not the name of a package, as in pandas>=2"
        ) from None


def _check_project(project: Mapping[str, Any], folder: Path, known: Collection[str]) -> None:
    place = str(folder / "pyproject.toml")
    uv = _table(_table(project, "tool"), "uv")
    for key in _UV_INDEXES:
        flag = "--find-links" if key == "find-links" else "--index-url"
        for given in _places(uv.get(key)):
            if _local(given, folder) not in known:
                raise _refused(place, f"[tool.uv] {key} {_foreign(given, flag)}")
    for name, source in _table(uv, "sources").items():
        for entry in source if isinstance(source, list) else [source]:
            told = entry if isinstance(entry, dict) else {}
            kind = next((key for key in _SOURCES if key in told), "")
            if kind:
                raise _refused(place, f"[tool.uv.sources] {_shown(name)} {_placed(kind)}")


def _check_lock(lock: Mapping[str, Any], folder: Path, known: Collection[str]) -> Mapping[str, Any]:
    """Return the lock's entry of the project itself; empty when there is none.

    Raises ConfigError for packages from a path, an address or an index that is not known.
    """
    place = str(folder / "uv.lock")
    root: Mapping[str, Any] = {}
    packages = lock.get("package", [])
    if packages != (tables := _tables(packages)):
        raise _refused(place, "it is not a lock of uv")
    for package in tables:
        name, source = _shown(str(package.get("name"))), _table(package, "source")
        registry = source.get("registry")
        if isinstance(registry, str):
            if _local(registry, folder) not in known:
                raise _refused(place, f"{name} comes from {_foreign(registry, '--index-url')}")
        elif source.get("editable", source.get("virtual")) == "." and len(source) == 1:
            root = package
        else:
            raise _refused(place, f"{name} {_placed(next(iter(source), 'nowhere'))}")
    return root


def _newer(project: Mapping[str, Any], locked: Mapping[str, Any]) -> str:
    """Return a remark on dependencies of a project that its lock lacks; empty if it has all."""
    known = {normalised(str(each.get("name"))) for each in _tables(locked.get("dependencies"))}
    asked = project.get("dependencies")
    asked = asked if isinstance(asked, list) else []
    found = (_NAME.match(each) for each in asked if isinstance(each, str))
    names = dict.fromkeys(normalised(each[0]) for each in found if each)
    if missing := [name for name in names if name not in known]:
        names_lacking = _shown(", ".join(missing))
        return (
            f" (its uv.lock is older than pyproject.toml and lacks {names_lacking}: run `uv lock`)"
        )
    return ""


def _foreign(place: str, flag: str) -> str:
    """Return the reason for refusing an index that the operator has not named."""
    return (
        f"{_shown(place)}, an index that the operator has not named: if it is trusted, start the "
        f"server with {flag} {shlex.quote(_shown(place))}"
    )


def _placed(kind: str) -> str:
    """Return the reason for refusing a package that is no release of an index."""
    return (
        f"comes from a place ({_shown(kind)}), and packages are taken by name from the operator's "
        "index alone: depend on a release of it, or make a wheel of it, name its folder as "
        "--find-links and lock again"
    )


def _local(place: str, folder: Path) -> str:
    return _plain(place if "://" in place else os.path.realpath(folder / place))


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
        raise _refused(
            f"{folder / 'pyproject.toml'}",
            f"the project is for Python {_shown(wanted)}, and the kernels have {version}: start "
            "the server with --python VERSION",
        )


def _content(file: Path, folder: Path | None = None, place: str = "") -> str:
    """Return the text of a regular file, which has to lie in `folder` after links are resolved.

    Raises ConfigError.
    """
    real = Path(os.path.realpath(file))
    place = place or ("--requirements" if folder is None else "--project")
    named = _shown(str(file))
    if folder is not None and not real.is_relative_to(os.path.realpath(folder)):
        raise _refused(place, f"{named} lies outside of {folder}; name a file in it")
    try:
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise _refused(place, f"{named} is not a regular file; name one")
            data = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        advice = _MISSING.get(file.name, "make it, or name another file")
        raise _refused(place, f"there is no {named}; {advice}") from None
    except IsADirectoryError:
        raise _refused(place, f"{named} is a folder; {_FOLDER}") from None
    except NotADirectoryError:
        raise _refused(place, f"{named}: {file.parent} is a file; name its folder") from None
    except OSError as reason:
        why = f"{named} cannot be read: {reason.strerror}; allow it, or name another file"
        raise _refused(place, why) from reason
    if len(data) > MOST_BYTES:
        raise _refused(place, f"{named} has more than {MOST_BYTES // MIB} MiB; name another file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _refused(place, f"{named} is not UTF-8 text; save it as that") from None


def _toml(text: str, file: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise _refused(str(file), f"it is not valid TOML: {_shown(str(error))}") from None


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables in a TOML list; empty for any other value."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _places(value: Any) -> list[str]:
    """Return the addresses and folders in a value of uv's settings."""
    entries = value if isinstance(value, list) else [value]
    urls = (entry.get("url", "") if isinstance(entry, dict) else entry for entry in entries)
    return [str(url) for url in urls if url]


def _plain(place: str) -> str:
    return _CREDENTIALS.sub("", place).replace("//@", "//").removeprefix("file://").rstrip("/")


def normalised(name: str) -> str:
    """Return the name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _shown(text: str) -> str:
    line = _CREDENTIALS.sub("…", " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


def _refused(place: str, why: str) -> ConfigError:
    return ConfigError(f"{place}: {why}." if place else f"{why}.")
