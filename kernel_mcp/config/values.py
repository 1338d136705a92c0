"""Readers of single values: each turns text or TOML into a typed value.

An invalid value raises ValueError with a message for the operator.

The rules for a file that no flag names are here, too: its values may permit no more than the
operator's.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from kernel_mcp.extensions import offered
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhd]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?")
_VERSION = re.compile(r"(?:python)?(\d+)(?:\.(\d+))?(?:\.(\d+))?")

LEAST_CHARACTERS = 1000
LEAST_CPUS = 0.01
"""Smallest processor share of a control group: a millisecond in every tenth of a second."""
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 15)


def duration(given: object) -> float:
    """Read seconds, more than zero: `30`, `30s`, `500ms`, `5m`, `2h`, `1d`, or a number."""
    seconds = _seconds(given)
    if not seconds > 0:
        raise ValueError("expected a time above zero such as 30, 30s, 5m or 2h")
    return seconds


def limit_duration(given: object) -> float:
    """Read seconds as `duration` does; 0 means no limit."""
    return _seconds(given)


def idle_duration(given: object) -> float:
    """Read seconds as `duration` does; `never` is infinity."""
    if isinstance(given, str) and given.strip().lower() == "never":
        return math.inf
    try:
        return duration(given)
    except ValueError:
        raise ValueError("expected a time such as 30s, 5m or 2h, or never") from None


@dataclass(frozen=True, slots=True)
class Persist:
    """Limits of persisted sessions: total size, and seconds since their last use.

    0 bytes and infinite seconds mean no limit.
    """

    bytes: int
    seconds: float


def persist(given: object) -> Persist | None:
    """Read `SIZE,TIME`; None for `off`."""
    text = given.strip().lower() if isinstance(given, str) else ""
    if text == "off" or given is False:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) != 2:
            raise ValueError
        return Persist(size(parts[0]), idle_duration(parts[1]))
    except ValueError:
        raise ValueError("expected a size and a time such as 2G,7d, or off") from None


def persists_less(wanted: object, own: object) -> bool:
    """Return True if `wanted` keeps no more than `own`, and no longer."""
    if not isinstance(wanted, Persist):
        return wanted is None
    if not isinstance(own, Persist):
        return False
    return no_more_or_unlimited(wanted.bytes, own.bytes) and wanted.seconds <= own.seconds


LEAST_BARE_BYTES = MIB
"""A smaller number without a unit is refused, as its unit was probably forgotten."""
LEAST_MEMORY = 16 * MIB


def size(given: object) -> int:
    """Read bytes: `512M`, `2G`, `1.5 GiB`, or a large number of bytes; 0 means no limit."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        given = str(given)
    match = _SIZE.fullmatch(given.strip().lower()) if isinstance(given, str) else None
    if match is None:
        raise ValueError("expected a size such as 512M or 2G (0 for no limit)")
    if not math.isfinite(number := float(match[1])):
        raise ValueError("the number is too large")
    if match[2] in ("", "b") and 0 < number < LEAST_BARE_BYTES:
        meant = f"{match[1]}{'G' if number < 64 else 'M'}"
        raise ValueError(f"that is {match[1]} bytes; write {meant} if you mean that")
    return int(number * _UNITS_BYTES[match[2]])


def memory(given: object) -> int:
    """Read bytes as `size` does, enough for a kernel; 0 means no limit."""
    found = size(given)
    if 0 < found < LEAST_MEMORY:
        raise ValueError(f"a kernel needs {format_bytes(LEAST_MEMORY)} at least")
    return found


def count(given: object) -> int:
    """Read a whole number, zero or more."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, str) and re.fullmatch(r"\d{1,18}", given.strip()):
        return int(given)
    raise ValueError("expected a whole number such as 16")


LEAST_PROCESSES = 4
"""With fewer a kernel fails to start, or cannot run any program."""


def processes(given: object) -> int:
    """Read a number of processes and threads; 0 for no limit."""
    found = count(given)
    if 0 < found < LEAST_PROCESSES:
        raise ValueError(f"a kernel needs {LEAST_PROCESSES} processes and threads at least")
    return found


def number(given: object) -> float:
    """Read a number, zero or more."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(_float(given)) and given >= 0:
            return float(given)
    elif isinstance(given, str) and re.fullmatch(r"\d{1,6}(\.\d{1,6})?", given.strip()):
        return float(given)
    raise ValueError("expected a number such as 2 or 1.5 (0 for no limit)")


@dataclass(frozen=True, slots=True)
class Share:
    """Processor limit: the number of processors, or seconds for one cell; 0 where not given."""

    cpus: float = 0.0
    seconds: float = 0.0


def share(given: object) -> Share:
    """Read processors as `number` does, or with a unit a time as `duration`; more than zero."""
    try:
        cpus = number(given)
    except ValueError:
        try:
            return Share(seconds=duration(given))
        except ValueError:
            cpus = 0.0
    if cpus < LEAST_CPUS:
        raise ValueError("expected processors such as 1.5, or a time such as 30s")
    return Share(cpus=cpus)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of one principal; None means the server's value, 0 no limit.

    sessions  sessions with a kernel at once
    asleep    hibernated sessions
    memory    bytes of all its kernels together
    disk      bytes of all its workspaces and added packages together
    cpu       processors of all its kernels together
    cells     cells that run or wait at once
    rate      calls a second, in bursts of at most as many
    body      bytes of its requests that are being read at once
    """

    sessions: int | None = None
    asleep: int | None = None
    memory: int | None = None
    disk: int | None = None
    cpu: float | None = None
    cells: int | None = None
    rate: float | None = None
    body: int | None = None

    def over(self, others: Quotas) -> Quotas:
        """Return these quotas, with those of `others` where they are None."""
        if self == _UNSAID:
            return others
        names = [entry.name for entry in fields(self)]
        own = {name: getattr(self, name) for name in names}
        return Quotas(
            **{name: getattr(others, name) if own[name] is None else own[name] for name in names}
        )


_UNSAID = Quotas()


def quotas(given: object) -> Quotas:
    """Read `sessions=4,memory=8G,cpu=1.5` or a table of these. Raises ValueError."""
    readers: dict[str, Callable[[object], Any]] = {
        "sessions": count,
        "asleep": count,
        "memory": size,
        "disk": size,
        "cpu": number,
        "cells": count,
        "rate": number,
        "body": size,
    }
    pairs = (
        [(str(name), value) for name, value in given.items()]
        if isinstance(given, Mapping)
        else [part.strip().partition("=")[::2] for part in str(given).split(",") if part.strip()]
    )
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name.strip() not in readers:
            raise ValueError(f"{name.strip()!r} is no quota; there are {', '.join(readers)}")
        found[name.strip()] = readers[name.strip()](value)
    return Quotas(**found)


def address(given: object) -> tuple[str, int]:
    """Read `HOST:PORT`, `[::1]:PORT` or a port of 127.0.0.1. Raises ValueError."""
    host, _, port = str(given).strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:8000")
    if ":" in host and not str(given).strip().startswith("["):
        raise ValueError("an IPv6 address takes brackets, such as [::1]:8000")
    return host, int(port)


def characters(given: object) -> int:
    """Read a number of characters of an answer, at least `LEAST_CHARACTERS`."""
    found = count(given)
    if found < LEAST_CHARACTERS:
        raise ValueError(f"expected a number of {LEAST_CHARACTERS} or more")
    return found


def choice(*words: str, group: str = "") -> Callable[[object], str]:
    """Return a reader that accepts exactly one of `words`, or a name in a group of extensions."""

    def read(given: object) -> str:
        word = given.strip().lower() if isinstance(given, str) else ""
        if word not in words and not (group and word in offered(group)):
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return word

    return read


def choices_in_order(
    words: tuple[str, ...], chained: tuple[str, ...], group: str
) -> Callable[[object], tuple[str, ...]]:
    """Return a reader of one of `words`, or of several of `chained` in order of preference.

    Names in a group of extensions stand alone.
    """
    several = ",".join(chained)

    def read(given: object) -> tuple[str, ...]:
        listed = given.split(",") if isinstance(given, str) else given
        if not isinstance(listed, list) or not listed:
            listed = [given]
        found = tuple(dict.fromkeys(map(choice(*words, group=group), listed)))
        if len(found) > 1 and (alone := [each for each in found if each not in chained]):
            raise ValueError(f"{alone[0]} stands alone; what may follow each other is {several}")
        return found

    return read


def some_of(*words: str, group: str) -> Callable[[object], tuple[str, ...]]:
    """Return a reader of several of `words`, including the first, or of names of extensions."""

    def read(given: object) -> tuple[str, ...]:
        listed = given.split(",") if isinstance(given, str) else given
        if not isinstance(listed, list) or not listed:
            listed = [given]
        found = tuple(dict.fromkeys(map(choice(*words, group=group), listed)))
        if words[0] not in found:
            raise ValueError(f"{words[0]} has to be among them: {words[0]},{','.join(found)}")
        return found

    return read


def switch(given: object) -> bool:
    """Read on or off: a flag without a value, `true` in TOML, `1` in a variable."""
    word = str(given).strip().lower() if isinstance(given, (bool, int, str)) else ""
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off"):
        return False
    raise ValueError("expected true or false")


def url(given: object) -> str:
    """Read the address of a package index."""
    text = given.strip() if isinstance(given, str) else ""
    if not re.match(r"(https?|file)://[^\s]+$", text):
        raise ValueError("expected an address that begins with https://, http:// or file://")
    return text


def places(given: object) -> tuple[str, ...]:
    """Read folders and addresses with wheels, one or a list; the caller resolves folders."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(place, str) and place.strip() and "\0" not in place for place in found
    ):
        raise ValueError("expected a folder or an address that begins with https://")
    return tuple(
        place if "://" in place else str(from_home(Path(place))) for place in map(str.strip, found)
    )


def path(given: object) -> Path:
    """Read a path that is not empty; the caller resolves it."""
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise ValueError("expected a path")
    return Path(given)


MOUNT_MODES = ("ro", "rw")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that sessions see, at the path `guest`.

    mode    ro, or rw
    strict  in folders that hold a secret, only files that existed at a kernel's start are readable
    """

    host: Path
    guest: str
    mode: str = "ro"
    strict: bool = False

    @property
    def writable(self) -> bool:
        """True if sessions may change its content."""
        return self.mode == "rw"

    def __str__(self) -> str:
        where = "" if str(self.host) == self.guest else f":{self.guest}"
        return f"{self.host}{where}:{self.mode}{':strict' * self.strict}"


def mounts(given: object) -> tuple[Mount, ...]:
    """Read `HOST[:GUEST][:ro|rw][:strict]`, one or a list; the caller resolves host paths."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected folders such as . or /srv/data:/data:rw")
    return tuple(_mount(each.strip()) for each in found)


def _mount(text: str) -> Mount:
    host, *more = text.split(":")
    strict = more[-1:] == ["strict"]
    more = more[: len(more) - strict]
    mode = more.pop() if more and more[-1] in MOUNT_MODES else "ro"
    guest = more.pop() if more else ""
    if more or not host or "\0" in text or (guest and not guest.startswith("/")):
        raise ValueError(
            "expected HOST[:GUEST][:ro|rw][:strict], such as . or /srv/data:/data:rw; GUEST is an "
            "absolute path, and neither holds a colon"
        )
    return Mount(from_home(Path(host)), guest, mode, strict)


def hosts(given: object) -> tuple[str, ...]:
    """Read comma lists of hosts, as `network.rules` reads them; empty for `none`."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected none, '*', or hosts such as api.example.com, *.example.com")
    texts = [text.strip().lower() for each in found for text in each.split(",") if text.strip()]
    if "none" in texts:
        if set(texts) != {"none"}:
            raise ValueError("none stands alone")
        return ()
    return tuple(dict.fromkeys(texts))


def devices(given: object) -> tuple[Path, ...]:
    """Read paths of device files, one or a list; the caller resolves them."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)):
        raise ValueError("expected a device such as /dev/kvm")
    return tuple(map(path, found))


LEAST_MASKED = 6
"""Characters from which a value is masked in outputs: shorter ones occur in ordinary text."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAKEN_NAMES = re.compile(
    r"(PYTHON|LD_|KERNEL_MCP_|JPY_|JUPYTER|IPYTHON|GLIBC_|MALLOC_|XDG_|UV_|PIP_|BASH_FUNC_).*"
    r"|[A-Z]+_NUM_THREADS|POLARS_MAX_THREADS|OPENBLAS_THREAD_TIMEOUT|PATH|HOME|USER|LANG|TMPDIR"
    r"|TERM|NO_COLOR|PAGER"
    r"|MPLBACKEND|MPLCONFIGDIR|ARROW_DEFAULT_MEMORY_POOL|JE_ARROW_MALLOC_CONF|VIRTUAL_ENV"
    r"|BASH_ENV|ENV|IFS|SHELLOPTS|BASHOPTS|GCONV_PATH|LOCPATH|HOSTALIASES|RES_OPTIONS"
)
"""Variables that the server sets for kernels, or that change the kernel's own programs."""


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """A variable of the environment for code; None stands for the server's own value."""

    name: str
    value: str | None = field(default=None, repr=False)

    @property
    def short(self) -> bool:
        """True if its value is too short to be masked in outputs."""
        return len((self.value or "").strip()) < LEAST_MASKED

    def __str__(self) -> str:
        """Return its name, for people."""
        return f"{self.name} (too short to be masked)" if self.short else self.name


def variables(given: object) -> tuple[EnvVariable, ...]:
    """Read `NAME` or `NAME=VALUE`, one or a list. No error contains a value."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected names such as API_TOKEN, or NAME=VALUE")
    read = (_variable(each) for each in found)
    return tuple({variable.name: variable for variable in read}.values())


def _variable(text: str) -> EnvVariable:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(
            "expected NAME or NAME=VALUE, where NAME has letters, digits and underscores only"
        )
    _check_name(name)
    if "\0" in value:
        raise ValueError(f"the value of {name} holds a zero byte")
    return EnvVariable(name, value if equals else None)


LEAST_SECRET, MOST_SECRET = 8, 8192
"""Least and greatest number of characters of a header secret."""
_NO_SECRET_IN = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade"}
    | {"expect", "accept-encoding", "keep-alive", "range", "if-range"}
    | {"proxy-authorization", "proxy-connection"}
)


def _check_name(name: str) -> None:
    if _TAKEN_NAMES.fullmatch(name):
        raise ValueError(
            f"{name} is a variable that the kernel itself runs by, and would change more than what "
            "code reads; let code set it in os.environ where that is wanted"
        )


@dataclass(frozen=True, slots=True)
class HeaderSecret:
    """A secret that code can use but not read: the `value` for one header of one host.

    The value is taken from the server's own environment once all settings are known.
    """

    name: str
    host: str
    header: str = "Authorization"
    value: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.name}@{self.host}:{self.header}"

    def with_value(self, value: str) -> HeaderSecret:
        """Return the secret with its value.

        Raises ValueError for a value that no header can hold, or too short to find in replies.
        """
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError("its value has characters that no header can hold, or blanks around")
        if not LEAST_SECRET <= len(value) <= MOST_SECRET:
            raise ValueError(
                f"its value has {len(value)} characters: with fewer than {LEAST_SECRET} replies "
                f"cannot be searched for it, and more than {MOST_SECRET} fit in no header"
            )
        return replace(self, value=value)


def header_secrets(given: object) -> tuple[HeaderSecret, ...]:
    """Read `NAME@HOST[:HEADER]` in comma lists, without their values."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected NAME@HOST[:HEADER], such as API_KEY@api.example.com")
    return tuple(_header_secret(text.strip()) for each in found for text in each.split(","))


def _header_secret(text: str) -> HeaderSecret:
    name, at, rest = text.partition("@")
    host, colon, header = rest.partition(":")
    if not at or not _NAME.fullmatch(name):
        raise ValueError(
            "expected NAME@HOST[:HEADER], such as API_KEY@api.example.com: NAME is a variable in "
            "the server's own environment, which has the value; the value itself is never given"
        )
    _check_name(name)
    host = host.lower().removesuffix(".")
    if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host) or host.rpartition(".")[2].isdigit():
        raise ValueError(f"{host[:80]!r} is not the name of one host")
    if colon and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header):
        raise ValueError(f"{header[:80]!r} is not the name of a header")
    if header.isdigit():
        raise ValueError(
            f":{header} would be the name of a header, and no port: name the host alone, and its "
            f"port with --network {host}:{header}, where the secret holds then, too"
        )
    if header.lower() in _NO_SECRET_IN:
        raise ValueError(f"{header}: the connection itself needs that header")
    return HeaderSecret(name, host, header or "Authorization")


@dataclass(frozen=True, slots=True)
class Attachment:
    """A running kernel, or a Jupyter server with kernels, which sessions may join.

    `place` is the path of a connection file, or the address of a server, without its `token`.
    """

    place: str
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.place

    @property
    def is_server(self) -> bool:
        """True for a Jupyter server, False for a connection file."""
        return "://" in self.place


def attachments(given: object) -> tuple[Attachment, ...]:
    """Read connection files and `URL[?token=TOKEN]`, one or a list.

    The caller resolves paths of files.
    """
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected a connection file, or http://localhost:8888/?token=TOKEN")
    return tuple(_attachment(each.strip()) for each in found)


def _attachment(text: str) -> Attachment:
    if not text or "\0" in text:
        raise ValueError("expected a connection file, or http://localhost:8888/?token=TOKEN")
    if "://" not in text:
        return Attachment(str(from_home(Path(text))))
    parts = urlsplit(text)  # raises ValueError for an invalid address
    _ = parts.port
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("expected the address of a Jupyter server, http://HOST:PORT/?token=TOKEN")
    query = parse_qs(parts.query, keep_blank_values=True)
    token = query.pop("token", [""])[-1]
    if query or parts.fragment:
        raise ValueError("an address of a Jupyter server has a path and a token, and nothing else")
    path = re.sub(r"/(lab|tree|notebooks|doc)(/.*)?$", "", parts.path).rstrip("/")
    return Attachment(f"{parts.scheme}://{parts.netloc}{path}", token)


def word(given: object) -> str:
    """Read a single word that does not begin with `-`, as an option of a program does."""
    if not isinstance(given, str) or not given.strip() or given.strip().startswith("-"):
        raise ValueError("expected a name")
    if len(given.split()) != 1:
        raise ValueError("expected a single word")
    return given.strip()


def python(given: object) -> str:
    """Read a version that kernels can run on, as `3.12`, or a path.

    The path is that of an interpreter or of an environment.
    """
    expected = (
        "expected a version from 3.10 to 3.15, or the path of an interpreter or an environment, "
        "such as ./.venv"
    )
    if not isinstance(given, str):
        raise ValueError(f'{expected}; a version is written in quotes in TOML, as "3.12"')
    text = given.strip()
    if "/" in text or text.startswith("."):
        return os.path.join(".", from_home(Path(text)))  # noqa: PTH118  # pathlib drops the dot
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ValueError(expected)
    version = (int(match[1]), int(match[2] or OLDEST_PYTHON[1]))
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise ValueError(expected)
    return text.removeprefix("python")


def entries(given: object) -> tuple[str, ...]:
    """Read names from comma lists: `numpy,'pandas>=2,<3'`; commas in specifiers do not split.

    Each is `*`, a module, or a PEP 508 requirement of a package by name.
    """
    lists = [given] if isinstance(given, str) else given
    if not isinstance(lists, (list, tuple)) or not all(isinstance(part, str) for part in lists):
        raise ValueError('expected names such as "numpy, pandas>=2"')
    names: list[str] = []
    for part in lists:
        for name in split_names(part):
            if name != "*":
                parse_entry(name)
            if name not in names:
                names.append(name)
    return tuple(names)


def split_names(text: str) -> list[str]:
    """Split a comma list where a new name starts, not inside `[extras]` or `>=2,<3`."""
    names: list[list[str]] = []
    opened = 0
    for piece in text.split(","):
        name = piece if opened > 0 else piece.strip()
        if names and (opened > 0 or name[:1] in tuple("<>=!~")):
            names[-1].append(name)
        elif name:
            names.append([name])
        opened += piece.count("[") - piece.count("]")
    return [",".join(pieces).strip() for pieces in names]


def _float(given: float) -> float:
    try:
        return float(given)
    except OverflowError:
        return math.inf


def _seconds(given: object) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(_float(given)) and given >= 0:
            return float(given)
    elif isinstance(given, str):
        match = _DURATION.fullmatch(given.strip().lower())
        if match is not None:
            return float(match[1]) * _UNITS_S[match[2]]
    raise ValueError("expected a time such as 30, 30s, 5m or 2h")


def format_bytes(size: int) -> str:
    """Return a number of bytes for people, for example `2 GiB` or `1.5 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size} bytes"


def close_to(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most `most` of the `known` names that resemble `name`, the nearest first.

    `cutoff` is the least `difflib.SequenceMatcher.ratio` of two such names.
    """
    from difflib import get_close_matches

    return get_close_matches(name, list(known), most, cutoff)


MOST_DOTS = 4_000_000
"""Squares of the dots between two `=` or line ends, together: 2,000 in one key take 60 ms."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return a TOML document. Raises ValueError, with the position, and RecursionError."""
    if sum(part.count(".") ** 2 for part in re.split("[=\n]", text)) > MOST_DOTS:
        raise ValueError("its keys have too many parts")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    document: dict[str, Any] = tomllib.loads(text)
    return document


MAX_REQUIREMENT_CHARS = 1000
"""Characters of one requirement; the longest on the index has some 300."""


def parse_entry(entry: str) -> Requirement:
    """Return an `--allow` entry or a package to install as a requirement by name.

    Raises ValueError for options, URLs, paths and anything PEP 508 cannot read.
    """
    from packaging.requirements import InvalidRequirement, Requirement  # 10 ms that --help saves

    text = entry.strip()
    if len(text) > MAX_REQUIREMENT_CHARS:
        raise ValueError(
            f"a text of {len(text):,} characters is not the name of a module or package"
        )
    if text.startswith("-"):
        raise ValueError(f"{text!r} is an option, not the name of a package")
    if "/" in text or "\\" in text or "@" in text:
        raise ValueError(f"{text!r} names a place; packages are taken by name only")
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        raise ValueError(
            f"{text!r} is not the name of a module or package, such as numpy or pandas>=2"
        ) from None


# Rules for values of a file that no flag names: each returns True if the first value permits no
# more than the second, the operator's.
Narrows: TypeAlias = Callable[[Any, Any], bool]


def never(_given: object, _own: object) -> bool:
    """Return False: only the operator sets paths, programs and the way the server runs."""
    return False


def no_more(given: float, own: float) -> bool:
    """Return True for a number, size or time that is at most the operator's."""
    return given <= own


def no_more_or_unlimited(given: float, own: float) -> bool:
    """Return True as `no_more` does, for limits that 0 lifts."""
    return own == 0 or 0 < given <= own


def only_on(given: bool, own: bool) -> bool:
    """Return True unless a switch that forbids something would be turned off."""
    return given or not own


def only_off(given: bool, own: bool) -> bool:
    """Return True unless a switch that permits something would be turned on."""
    return own or not given


def among(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Return True for names that are all among the operator's."""
    return "*" in own or set(given) <= set(own)


_LABEL_OF_HOST = re.compile(r"[\w-]+")


def fewer_hosts(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Return True for the operator's own entries, and for host names if all are permitted."""
    named = (each for each in given if "*" in own and _is_name_of_host(each))
    return set(given) <= {*own, *named}


def _is_name_of_host(text: str) -> bool:
    labels = text.removeprefix("*.").split(".")
    lettered = any("a" <= char <= "z" for char in labels[-1])
    return lettered and all(map(_LABEL_OF_HOST.fullmatch, labels))


def no_further(order: tuple[str, ...]) -> Narrows:
    """Return the rule for words: none later in `order`, which begins with the strictest."""

    def narrows(given: str, own: str) -> bool:
        return order.index(given) <= order.index(own)

    return narrows
