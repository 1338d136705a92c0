"""Turning files against those who use them too: the server's user, other sessions."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from tests.escape.attacks.table import Target, attack, syscall

F_SETDELEG = 1040


@attack("anyone")
def leave_a_set_user_id_program_by_its_mode(target: Target) -> bool:
    Path("left").touch()
    ways: tuple[Callable[[], object], ...] = (
        lambda: Path("left").chmod(0o4755),
        lambda: Path("left").chmod(0o2755),
        lambda: os.fchmod(os.open("left", os.O_RDONLY), 0o4755),
        lambda: os.chmod("left", 0o4755, dir_fd=os.open(".", os.O_RDONLY)),
        lambda: syscall(target, "fchmodat2", -100, b"left", 0o4755, 0),
    )
    return any(_sets_id(way, "left") for way in ways)


@attack("anyone")
def make_a_set_user_id_program(target: Target) -> bool:
    create = os.O_CREAT | os.O_EXCL
    ways: tuple[Callable[[], object], ...] = (
        lambda: os.open("made", create, 0o4755),
        lambda: os.open("made", create, 0o2755),
        lambda: os.mknod("made", stat.S_IFREG | 0o4755),
        lambda: syscall(target, "creat", b"made", 0o4755),
        lambda: syscall(target, "openat2", -100, b"made", _how(create, 0o4755), 24),
        lambda: _name(os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o4755), "made"),
    )
    return any(_sets_id(way, "made") for way in ways)


@attack("anyone")
def hold_up_who_opens_a_file(_: Target) -> bool:
    Path("leased").touch()
    fcntl.fcntl(os.open("leased", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return True


@attack("maybe")
def hold_up_who_changes_a_folder(_: Target) -> bool:
    delegation = struct.pack("IHH", 0, fcntl.F_RDLCK, 0)
    fcntl.fcntl(os.open(".", os.O_RDONLY), F_SETDELEG, delegation)
    return True


@attack("maybe")
def be_told_of_changes_in_a_folder(_: Target) -> bool:
    fcntl.fcntl(os.open("/usr/bin", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)
    return True


def _how(flags: int, mode: int) -> bytes:
    """`struct open_how` of <linux/openat2.h>."""
    return struct.pack("QQQ", flags, mode, 0)


def _name(unnamed: int, path: str) -> None:
    os.link(f"/proc/self/fd/{unnamed}", path, follow_symlinks=True)


def _sets_id(way: Callable[[], object], path: str) -> bool:
    """Return True if the file has one of the bits once this way is tried."""
    with contextlib.suppress(OSError):
        way()
        if Path(path).stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
            return True
    return False
