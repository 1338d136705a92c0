"""Building blocks of attacks. They run inside the sandbox: standard library only.

An attack gets a `World` of targets that the host has laid out. It returns True when it has got what
it wanted; an OSError or False means that the boundary held.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

World: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[[World], bool]


class Attack(NamedTuple):
    """An attack: its group, and whether an ordinary user succeeds with it without a sandbox."""

    group: str
    run: Run
    works_unconfined: bool


ATTACKS: dict[str, Attack] = {}
libc = ctypes.CDLL(None, use_errno=True)


def attack(group: str, *, works_unconfined: bool = True) -> Callable[[Run], Run]:
    """Add a function to the table under its name."""

    def register(function: Run) -> Run:
        ATTACKS[function.__name__] = Attack(group, function, works_unconfined)
        return function

    return register


def call(number: int, *args: object) -> int:
    """A raw x86-64 system call. Raises OSError."""
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(libc.syscall(ctypes.c_long(number), *wide))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def content(path: str) -> bytes:
    """The bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def outcome_of_child(action: Callable[[], object]) -> bool:
    """Return True if `action` succeeds in a child process, which may be killed for it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
