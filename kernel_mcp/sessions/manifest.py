"""The manifest of a persisted session, which is stored in two copies.

It ends with a SHA-256 digest of its content, which includes the checksum of the dump. `FORMAT` is
the format of everything in an entry: manifest, rows of cells, cell journal, dumps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

FORMAT = 3
"""Format of new entries. Increase it with every change that older servers would misread."""
READABLE = (1, 2, 3)
"""Formats that this server can read; 1 has no checksums, 1 and 2 have no settings in the dump."""
MANIFEST = "manifest.json"
COPY = "manifest.copy.json"
MOST_BYTES = 64 * MIB
OF_PRINCIPAL = "principal "
"""Prefix of `SessionKey.folder` for a session that belongs to a principal, not to a folder."""
ID_CHARS = 32
_DIGEST = b', "kernel-mcp/digest": "'
_NEW = ".new"


class UnknownFormat(ValueError):
    """Raised for a manifest of an unknown format; `names` are its variables."""

    def __init__(self, known: object, names: tuple[str, ...]) -> None:
        super().__init__(
            f"its format is {known!r}, and this server reads "
            f"{READABLE[0]} to {READABLE[-1]}: another version of kernel-mcp has written it"
        )
        self.names = names


class OtherSession(ValueError):
    """Raised for a manifest that belongs to another session than its folder."""

    def __init__(self) -> None:
        super().__init__("its folder has the save of another session")


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Key of a stored entry: the server's working folder or a principal, and a session's name."""

    folder: str
    name: str

    @property
    def id(self) -> str:
        """Name of the entry's folders."""
        text = json.dumps([self.folder, self.name])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:ID_CHARS]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a manifest.

    moment       time of the save of the variables, in seconds since 1970; 0 for never
    cell         the last cell whose effects the variables have; None for none
    through      the last cell at the time of the save, which may have been undone
    python       version, implementation and machine of the kernel that saved them
    environment  its packages, as `name==version`
    doors        grants of the session, by kind
    undone       True if the session has returned to a state before `cell` since then
    asked        what the session has requested for its kernels, such as python and packages
    dump, size, checksum  the file of the variables, as `Dump`
    variables    what the dump holds, as `Dump.row`
    history      the cells, as `History.state`
    """

    folder: str
    name: str
    moment: float = 0.0
    cell: int | None = None
    through: int = 0
    python: tuple[str, str, str] = ("", "", "")
    environment: tuple[str, ...] = ()
    doors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    dump: str = ""
    size: int = 0
    checksum: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Any] = field(default_factory=dict)
    undone: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Saved:
        """Return the content of a decoded manifest. Raises UnknownFormat, ValueError."""
        if data.get("format") not in READABLE:
            raise UnknownFormat(data.get("format"), tuple(_names(data.get("variables"))))
        try:
            doors = {str(kind): tuple(map(str, each)) for kind, each in data["doors"].items()}
            version, implementation, machine = map(str, data["python"])
            return cls(
                folder=str(data["folder"]),
                name=str(data["name"]),
                moment=float(data["moment"]),
                cell=None if data["cell"] is None else int(data["cell"]),
                through=int(data["through"]),
                python=(version, implementation, machine),
                environment=tuple(map(str, data["environment"])),
                doors=doors,
                asked=dict(data["asked"]),
                dump=str(data["dump"]),
                size=int(data["size"]),
                checksum="" if data["format"] == 1 else str(data["checksum"]),
                variables=dict(data["variables"]),
                history=dict(data["history"]),
                undone=bool(data["undone"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None

    def data(self) -> dict[str, Any]:
        """Return the JSON object that `of` accepts."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @property
    def names(self) -> list[str]:
        """Names of the saved variables."""
        return _names(self.variables)

    @property
    def key(self) -> SessionKey:
        """Key of its entry."""
        return SessionKey(self.folder, self.name)


def _names(variables: object) -> list[str]:
    found = variables.get("names") if isinstance(variables, dict) else None
    return [str(each) for each in found] if isinstance(found, list) else []


def encode(data: Mapping[str, Any]) -> bytes:
    """Return a manifest as bytes, with its digest."""
    body = json.dumps(data).encode("utf-8", "surrogateescape")[:-1]
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return _DIGEST + hashlib.sha256(body).hexdigest().encode() + b'"}'


def decode(text: bytes) -> Saved:
    """Return the content of a manifest. Raises UnknownFormat, and ValueError if it is damaged."""
    body, mark, _ = text.rpartition(_DIGEST)
    if mark and text[len(body) :] != _seal(body):
        raise ValueError("it is damaged: its digest is not that of its content")
    try:
        data = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        raise ValueError("it is damaged") from None
    if not isinstance(data, dict):
        raise ValueError("it is damaged")
    saved = Saved.of(data)
    if not mark and data["format"] != 1:
        raise ValueError("it is damaged: it has no digest")
    return saved


def read(folder: Path, expected: str = "") -> tuple[Saved | None, str]:
    """Return the manifest in a folder, and the reason why its copy was read; empty if it was not.

    The manifest is None if there is none. The id of its key must be `expected`, unless that is
    empty. Raises ValueError if both copies are damaged, OtherSession, UnknownFormat, OSError.
    """
    problems: list[str] = []
    failure: OSError | None = None
    other: OtherSession | None = None
    for name in (MANIFEST, COPY):
        try:
            text = _text(folder / name)
            saved = None if text is None else decode(text)
            if saved is not None and expected not in ("", saved.key.id):
                raise OtherSession
        except UnknownFormat:
            raise
        except OtherSession as problem:
            other = problem
            problems.append(str(problem))
            continue
        except ValueError as problem:
            problems.append(str(problem))
            continue
        except OSError as error:  # such as a disk error: the other copy may be readable
            failure = error
            problems.append(f"it cannot be read: {error.strerror}")
            continue
        if saved is not None:
            return saved, problems[0] if problems else ""
        problems.append("")
    if failure is not None:
        raise failure
    if other is not None:
        raise other
    if any(problems):
        raise ValueError(next(filter(None, problems)))
    return None, ""


def _text(path: Path) -> bytes | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > MOST_BYTES:
        raise ValueError("it is too large")
    return text


def write(folder: Path, data: Mapping[str, Any]) -> None:
    """Replace both copies in a folder. A crash leaves the old or the new one. Raises OSError."""
    text = encode(data)
    places = [(folder / (name + _NEW), folder / name) for name in (MANIFEST, COPY)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    for new, _ in places:
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    for new, place in places:
        new.rename(place)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
