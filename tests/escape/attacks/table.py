"""How attacks are marked, found and told apart."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, TypeAlias

Control: TypeAlias = Literal["anyone", "root", "maybe", "none"]


@dataclass(frozen=True)
class Target:
    """The preparations of the host for the attacks.

    secret_*      files and folders of the host that hold `marker`
    tcp, udp      addresses of servers on the host that greet with `marker`
    abstract, unix  the same on Unix sockets
    pid           a process of the host's user that waits for its end
    numbers       system call numbers by name
    limits        what this process was confined to
    opened        folders and devices that the operator lets code change
    """

    marker: str
    secret_home: str
    secret_tmp: str
    secret_shm: str
    other_workspace: str
    tcp: list[Any]
    tcp_outside: list[Any]
    udp: list[Any]
    abstract: str
    unix: str
    pid: int
    shared_memory: int
    interpreter: str
    numbers: dict[str, int]
    limits: dict[str, int]
    opened: list[str] = field(default_factory=list)


Run: TypeAlias = Callable[[Target], Any]


@dataclass(frozen=True)
class Attack:
    """One attack. `control` says who can carry it out without a sandbox: the proof it is real.

    anyone, root  this user always can
    maybe         depends on how the host is configured: tried and shown, not required
    none          not tried: it would harm the host, or only makes sense inside
    """

    name: str
    group: str
    run: Run
    control: Control


def attack(control: Control = "none") -> Callable[[Run], Run]:
    """Mark a function as an attack."""

    def mark(run: Run) -> Run:
        run.control = control  # type: ignore[attr-defined]
        return run

    return mark


def attacks_in(module: ModuleType) -> list[Attack]:
    """The marked functions of a module in the order of the file."""
    return [
        Attack(name, module.__name__.rpartition(".")[2], run, run.control)
        for name, run in vars(module).items()
        if hasattr(run, "control")
    ]


def syscall(target: Target, name: str, *arguments: int | bytes | None) -> int:
    """Make a raw system call. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    values = [
        ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_long(value or 0)
        for value in arguments
    ]
    result = int(libc.syscall(ctypes.c_long(target.numbers[name]), *values))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def refused(target: Target, name: str, *arguments: int | bytes | None) -> bool:
    """Make a call whose arguments cannot work; False only when the filter refuses it."""
    try:
        syscall(target, name, *arguments)
    except PermissionError:
        return False
    except OSError:
        return True
    return True
