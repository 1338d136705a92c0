"""Read files that list packages, and refuse in words what they may not name."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_mcp.config.values import parse_toml
from kernel_mcp.errors import ConfigError
from kernel_mcp.units import MIB

MOST_BYTES = 8 * MIB
"""Largest file that is read; locks of large projects have some 2 MiB."""
SHOWN_CHARS = 120
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")
_MISSING = {
    "uv.lock": "run `uv lock` there",
    "pyproject.toml": "name the folder of a project that has one, and a uv.lock",
}
_FOLDER = "name a file in it, as requirements.txt, or the folder of a uv.lock with --project"


def foreign(place: str, flag: str) -> str:
    """Return the reason for refusing an index that the operator has not named."""
    return (
        f"{shown(place)}, an index that the operator has not named: if it is trusted, start the "
        f"server with {flag} {shlex.quote(shown(place))}"
    )


def placed(kind: str) -> str:
    """Return the reason for refusing a package that is no release of an index."""
    return (
        f"comes from a place ({shown(kind)}), and packages are taken by name from the operator's "
        "index alone: depend on a release of it, or make a wheel of it, name its folder as "
        "--find-links and lock again"
    )


def local_place(place: str, folder: Path) -> str:
    """Return an address without credentials, or a path in `folder` with links resolved."""
    if "://" in place or "\0" in place:
        return plain(place)
    return plain(os.path.realpath(folder / place))


def text_of(file: Path, folder: Path | None = None, place: str = "") -> str:
    """Return the text of a regular file, which has to lie in `folder` after links are resolved.

    Raises ConfigError.
    """
    real = Path(os.path.realpath(file))
    place = place or ("--requirements" if folder is None else "--project")
    named = shown(str(file))
    if folder is not None and not real.is_relative_to(os.path.realpath(folder)):
        raise refused(place, f"{named} lies outside of {folder}; name a file in it")
    try:
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise refused(place, f"{named} is not a regular file; name one")
            data = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        advice = _MISSING.get(file.name, "make it, or name another file")
        raise refused(place, f"there is no {named}; {advice}") from None
    except IsADirectoryError:
        raise refused(place, f"{named} is a folder; {_FOLDER}") from None
    except NotADirectoryError:
        raise refused(place, f"{named}: {file.parent} is a file; name its folder") from None
    except OSError as reason:
        why = f"{named} cannot be read: {reason.strerror}; allow it, or name another file"
        raise refused(place, why) from reason
    if len(data) > MOST_BYTES:
        raise refused(place, f"{named} has more than {MOST_BYTES // MIB} MiB; name another file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refused(place, f"{named} is not UTF-8 text; save it as that") from None


def toml_of(text: str, file: Path) -> dict[str, Any]:
    """Return a TOML document; `file` is named in errors. Raises ConfigError."""
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise refused(str(file), f"it is not valid TOML: {shown(str(error))}") from None


def table_of(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table in another; empty for any other value."""
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def tables_in(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables in a TOML list; empty for any other value."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def places_in(value: Any) -> list[str]:
    """Return the addresses and folders in a value of uv's settings."""
    entries = value if isinstance(value, list) else [value]
    urls = (entry.get("url", "") if isinstance(entry, dict) else entry for entry in entries)
    return [str(url) for url in urls if url]


def plain(place: str) -> str:
    """Return an address without credentials, or the path of a `file:` URL."""
    return _CREDENTIALS.sub("", place).replace("//@", "//").removeprefix("file://").rstrip("/")


def normalised(name: str) -> str:
    """Return the name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def shown(text: str) -> str:
    """Return text for an error: one short line without credentials."""
    line = _CREDENTIALS.sub("…", " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


def refused(place: str, why: str) -> ConfigError:
    """Return the error for a refused file, line or entry."""
    return ConfigError(f"{place}: {why}." if place else f"{why}.")
