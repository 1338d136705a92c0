"""The files of a control group: small, written in one call, removed with their folder."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from kernel_mcp.limits.faults import absences
from kernel_mcp.settings import KIB

MOST_BYTES = 64 * KIB
"""Of a file with figures; those of memory.stat have some 2 KiB."""
ROUNDS = 8
"""How often processes are moved that may start others meanwhile."""


def move_all(source: Path, target: Path) -> bool:
    """Move all processes of a group; whether it is empty now."""
    for _ in range(ROUNDS):
        members = processes(source)
        if not members:
            return True
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                write(target / "cgroup.procs", pid)
    return not processes(source)


def remove_with_children(top: Path, keep: str = "") -> bool:
    """Remove a group with those directly below it, killing who is in them; whether it is gone.

    With one called `keep` below it nothing but the others is removed.
    """
    try:
        below = [entry for entry in top.iterdir() if entry.is_dir()]
    except OSError:
        return not top.exists()
    gone = [remove(folder) for folder in below if folder.name != keep]
    if any(folder.name == keep for folder in below):
        return all(gone)
    return all(gone) and remove(top)


def remove(folder: Path) -> bool:
    """Remove a group, killing who is in it; whether it is gone."""
    if _removed(folder):
        return True
    with contextlib.suppress(OSError):  # of descriptors, for example: there is another time
        _kill(folder)
    return _removed(folder)


def _removed(folder: Path) -> bool:
    try:
        _unmake(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill(folder: Path) -> None:
    """Kill all processes of a group, except where this one is among them."""
    if os.getpid() in processes(folder):
        return
    with contextlib.suppress(OSError):
        write(folder / "cgroup.kill", 1)  # version 2, Linux 5.14
        return
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    """Who is in a group, as far as this process can see them; nobody when it is gone.

    Raises OSError when the server lacks what it takes to look.
    """
    with absences:
        return [pid for pid in map(int, (folder / "cgroup.procs").read_text().split()) if pid > 0]
    return []


def table(file: Path) -> dict[str, int]:
    """A file of lines with a name and a number."""
    return dict(_rows(read(file)))


def read(file: Path) -> str:
    """The content of a control file, some times sooner than a file object has it."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MOST_BYTES).decode()
    finally:
        os.close(fd)


def _rows(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)


def make(folder: Path) -> None:
    """Make a group. Raises OSError."""
    folder.mkdir()


def _unmake(folder: Path) -> None:
    folder.rmdir()


def write(file: Path, value: int | str) -> None:
    """Write a control file in one call, as they want it."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)
