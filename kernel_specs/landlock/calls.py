"""Landlock's system calls, and the rules that restrict what a kernel reads in strict mounts.

The server, its keeper process and kernels use it. Every function raises OSError. Numbers are those
of <linux/landlock.h>; numbers of system calls are the same on every architecture.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from kernel_specs.linux import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
READ_FILE, REFER = 1 << 2, 1 << 13
READING = READ_FILE | REFER
"""Rights that rules about strict mounts handle. Without REFER files could not be moved at all."""


def version() -> int:
    """Return the ABI version of the running Linux. Raises OSError if it has none."""
    return syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def make(files: int, network: int = 0, scoped: int = 0) -> int:
    """Return a ruleset, close-on-exec, that denies the given rights until rules allow them."""
    attr = struct.pack("=3Q", files, network, scoped)
    # older versions of the ABI have only the first field
    return syscall(_CREATE_RULESET, attr, len(attr) if network or scoped else 8, 0)


def allow(ruleset: int, place: int, access: int) -> None:
    """Allow `access` on an open file, or below an open folder."""
    attr = struct.pack("=Qi", access, place)
    syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, attr, 0)


def enter(ruleset: int) -> None:
    """Enforce the rules for this thread and processes that it starts, for good."""
    syscall(_RESTRICT_SELF, ruleset, 0)


def read_no_more(ruleset: int, strict: Sequence[str]) -> None:
    """Allow reading everything outside the mounts `strict`, then enforce `ruleset`.

    The ruleset already has the rules for files in those mounts.
    """
    ways = {way for path in strict for way in _above(path)}
    ways = {way for way in ways if not any(_within(way, path) for path in strict)}
    for way in sorted(ways):
        with os.scandir(way) as entries:
            for entry in entries:
                path = os.path.join(way, entry.name)  # noqa: PTH118  # pathlib is slower
                if path not in ways and path not in strict and not entry.is_symlink():
                    _allow_reading(ruleset, path, folder=entry.is_dir())
    enter(ruleset)


def _allow_reading(ruleset: int, path: str, *, folder: bool) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allow(ruleset, place, READING if folder else READ_FILE)
    finally:
        os.close(place)


def _above(path: str) -> list[str]:
    parts = path.split("/")[1:]
    return ["/" + "/".join(parts[:end]) for end in range(len(parts))]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
