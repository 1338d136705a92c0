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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.listed_files import (
    foreign,
    local_place,
    normalised,
    placed,
    plain,
    refused,
    shown,
    text_of,
)
from kernel_mcp.environments.project_lock import NO_PROJECT, ProjectLock, read_project
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MOST_FILES = 20
MOST_CHARS = 4000
"""Most characters of a requirement without hashes: below the 4,300 digits that int() accepts."""
_HASHES = re.compile(r"sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")
_FILES = {"-r": "lines", "--requirement": "lines", "-c": "limits", "--constraint": "limits"}
_INDEXES = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links")
_NO_EFFECT = ("--only-binary", "--prefer-binary")
"""Options without effect: only wheels are installed."""
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
_PLACE = re.compile(
    r"^(\.{0,2}/|\.{1,2}$|~|[\w+.-]+:/|file:|(git|hg|svn|bzr)\+)|\.(whl|zip|gz)$", re.I
)
_NAMED = re.compile(r"^[\w-]+=(?=\w+://)")
"""Name before an address in variables of uv, as in `name=https://…`."""
_CONDA = re.compile(r"^(?:@EXPLICIT|(?:channels|dependencies|prefix):)", re.MULTILINE)
"""A line that only files of conda have."""
_CONDA_LINE = re.compile(r"^[\w.-]+=[\w.*]+(?:=\w+)?$| @ file://.{0,200}(?:conda|croot|feedstock)")
"""A line of `conda list --export`, or of `pip freeze` in an environment of conda."""
_OF_CONDA = (
    "that is conda's way to list packages, and pip's is expected: make the environment with conda "
    "and name its folder with --python, or write the file by `pip list --format=freeze` in it"
)
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
    project  the project and its lock; empty without one
    origins  flags and files, for people
    """

    lines: tuple[Line, ...] = ()
    limits: tuple[Line, ...] = ()
    project: ProjectLock = NO_PROJECT
    origins: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.origins)

    @property
    def names(self) -> tuple[str, ...]:
        """Packages that the files list, without dependencies of those."""
        return (*(line.name for line in self.lines), *self.project.direct)

    @property
    def digest(self) -> str:
        """Digest of all that decides what is installed; empty without files."""
        if not self:
            return ""
        parts = [[line.text for line in lines] for lines in (self.lines, self.limits)]
        shape = json.dumps([*parts, self.project.lock, self.project.shape])
        return sha256(shape.encode()).hexdigest()

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
    known = {plain(_NAMED.sub("", place)) for place in own if place}
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
    project = read_project(settings.project, {*known, plain(default_index)}, settings.python)
    origins.append(f"--project {settings.project}{project.remark}")
    if project.remark:
        logger.warning("%s", origins[-1])
    return PinnedRequirements(tuple(lines), tuple(limits), project, origins=tuple(origins))


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
            raise refused(place, f"there are more than {MOST_FILES} files")
        text = text_of(file, self._folder if place else None, place)
        if _CONDA.search(text):
            raise refused(place or f"--requirements {file}", _OF_CONDA)
        self.take(text, file, kind)
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
                raise refused(place, f"{shown(each)} is no sha256, sha384 or sha512 of a file")
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
                raise refused(place, f"{shown(value)} is an address and no file beside this one")
            self.read(file.parent / value, _FILES[name], place)
        elif name in _INDEXES:
            if local_place(value, file.parent) not in self._known:
                flag = "--find-links" if name in ("-f", "--find-links") else "--index-url"
                raise refused(place, f"{name} {foreign(value, flag)}")
        elif name == "--require-hashes":
            self._hashed = True
        elif name in ("-e", "--editable") and "://" in value:
            raise refused(place, f"{shown(line)} {placed('address or path')}")
        elif name in ("-e", "--editable"):
            raise refused(place, "-e takes code from a folder: show that with --mount instead")
        elif name not in _NO_EFFECT:
            raise refused(place, f"{shown(name)} is an option that is not taken here; remove it")

    def _require_hashes(self) -> None:
        for line in self.found["lines"]:
            if " --hash=" not in line.text:
                raise refused(line.place, "it has no --hash, which --require-hashes asks for")


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

    if _CONDA_LINE.search(text):
        raise refused(place, f"{shown(text)}: {_OF_CONDA}")
    if _PLACE.search(text) or " @ " in text or re.match(r"[\w.\[\],-]+\s*@", text):
        raise refused(place, f"{shown(text)} {placed('address or path')}")
    try:
        if len(text) > MOST_CHARS:
            raise InvalidRequirement
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        raise refused(
            place, f"{shown(text)} is not the name of a package, as in pandas>=2"
        ) from None
