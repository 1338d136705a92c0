"""Packages and Python versions of kernels, as the operator or an agent names them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_VERSION = re.compile(r"(?:python)?(\d+)(?:\.(\d+))?(?:\.(\d+))?")
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 15)
MAX_REQUIREMENT_CHARS = 1000
"""Characters of one requirement; the longest on the index has some 300."""


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
    names: list[str] = []
    for part in texts(given, 'expected names such as "numpy, pandas>=2"'):
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
