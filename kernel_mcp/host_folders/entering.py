"""The way into sandboxes that run, to cover there what the host would show."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import select
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from kernel_mcp.host_folders import secrets
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.linux.safe_tree import open_beneath
from kernel_mcp.records import dataclass
from kernel_specs.template import linux, packets

T = TypeVar("T")
BLANK = "/run/blank"
"""Where every sandbox with mounts has an empty `file` and an empty `folder`."""
PINS = "pins"
"""Beside these a folder that code cannot enter, in which each mount has one (`pins_of`)."""
Work = tuple[str, Parts, str]
"""A mount, a path below it, and the kind of its cover; without a path DEVICE:INODE of the mount."""
_MOST_NAMESPACES = 50
"""Of one message to a helper."""
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


def pins_of(guest: str) -> str:
    """Return the name of a mount's folder in `PINS`."""
    return hashlib.sha256(os.fsencode(guest)).hexdigest()[:32]


def weight(path: Parts) -> int:
    """The most bytes that a path takes in a message, and what goes with it."""
    return 6 * sum(map(len, path)) + 4 * len(path) + 100


def parts_of(items: Sequence[T], weigh: Callable[[T], int]) -> Iterator[list[T]]:
    """These in lists that each fit into a message."""
    part: list[T] = []
    total = 0
    for item in items:
        heavy = weigh(item)
        if part and total + heavy > packets.PACKET_BYTES // 2:
            yield part
            part, total = [], 0
        part.append(item)
        total += heavy
    if part:
        yield part


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that runs: its mount namespace, and a pidfd that is readable once it has ended."""

    namespace: int
    process: int

    @property
    def ended(self) -> bool:
        """Whether its process has."""
        return bool(select.select([self.process], [], [], 0)[0])


class Entering:
    """Knows the sandboxes that run, and covers in all of them at once.

    A root server's process enters their mount namespaces itself. An ordinary user's has to enter
    their user namespace for good before: a helper for each does, which has been forked then.
    """

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._direct = os.geteuid() == 0
        self._sandboxes: dict[int, Sandbox] = {}
        self._users: dict[int, int] = {}
        """The user namespace of each, by inode."""
        self._helpers: dict[int, Helper] = {}

    def hold(self, held: Sandbox, work: Sequence[Work]) -> str:
        """Cover this in a new sandbox and remember that; else why not."""
        failed = [error for _, error in self._all([held], work)] if work else []
        if failed:
            linux.close_all([held.namespace, held.process])
            return failed[0]
        self._sandboxes[held.process] = held
        return ""

    def prepare(self) -> None:
        """Have a helper for each user namespace, and one at most that has nothing to do."""
        if self._direct:
            return
        for held in self._sandboxes.values():
            self._helper(held)  # why there can be none, the next cover tells
        used = set(self._users.values())
        for user in [each for each in self._helpers if each not in used][:-1]:
            self._helpers.pop(user).close()

    def ended(self, process: int) -> bool:
        """Forget a sandbox; False for one that is not known."""
        held = self._sandboxes.pop(process, None)
        if held is None:
            return False
        self._users.pop(process, None)
        linux.close_all([held.namespace, held.process])
        return True

    def cover(self, work: Sequence[Work]) -> list[str]:
        """Cover this in all sandboxes; what went wrong in those that have not ended."""
        failed = self._all(list(self._sandboxes.values()), work)
        return [error for held, error in failed if not held.ended]

    def _all(self, sandboxes: list[Sandbox], work: Sequence[Work]) -> list[tuple[Sandbox, str]]:
        if not sandboxes:
            return []
        if self._direct:
            try:
                errors = list(cover_in([each.namespace for each in sandboxes], work))
            finally:
                linux.setns(self._own, linux.CLONE_NEWNS)
            return _failed(sandboxes, errors)
        failed: list[tuple[Sandbox, str]] = []
        groups: dict[Helper, list[Sandbox]] = {}
        for held in sandboxes:
            helper = self._helper(held)
            if isinstance(helper, Helper):
                groups.setdefault(helper, []).append(held)
            else:
                failed.append((held, helper))
        for part in parts_of(work, lambda each: weight(each[1])):
            for helper, group in groups.items():
                helper.send([each.namespace for each in group], part)
            for helper, group in groups.items():
                failed += _failed(group, helper.answers(len(group)))
        return failed

    def _helper(self, held: Sandbox) -> Helper | str:
        """The helper for a sandbox, which is made where there is none; or why there is none."""
        user = self._users.get(held.process)
        if user in self._helpers and self._helpers[user].alive:
            return self._helpers[user]
        try:
            space = fcntl.ioctl(held.namespace, _NS_GET_USERNS)
            try:
                user = os.fstat(space).st_ino
                if user not in self._helpers or not self._helpers[user].alive:
                    self._helpers[user] = Helper(space)
            finally:
                os.close(space)
        except OSError as reason:
            return str(reason)
        if held.process in self._sandboxes:
            self._users[held.process] = user
        return self._helpers[user]


def _failed(group: Sequence[Sandbox], errors: Sequence[str]) -> list[tuple[Sandbox, str]]:
    return [(held, error) for held, error in zip(group, errors, strict=True) if error]


class Helper:
    """A process in a user namespace, which enters the mount namespaces that this one owns."""

    def __init__(self, space: int) -> None:
        """Raises OSError where there can be no process."""
        self.alive = True
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _help(space, theirs)

    def send(self, namespaces: Sequence[int], work: Sequence[Work]) -> None:
        """Have it cover this in some namespaces."""
        with suppress(OSError):  # `answers` tells
            for first in range(0, len(namespaces), _MOST_NAMESPACES):
                some = namespaces[first : first + _MOST_NAMESPACES]
                packets.send(self._socket, {"work": work}, some)

    def answers(self, count: int) -> list[str]:
        """What went wrong in each of the last `count` namespaces."""
        errors: list[str] = []
        while len(errors) < count:
            received = packets.receive(self._socket)
            if received is None:
                self.close()
                return [*errors, *["its helper has ended"] * (count - len(errors))]
            errors += received[0]["errors"]
        return errors

    def close(self) -> None:
        """End it."""
        self.alive = False
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _help(space: int, server: socket.socket) -> NoReturn:
    """Be a helper until the keeper has gone."""
    code = 1
    with suppress(Exception):
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.setns(space, linux.CLONE_NEWUSER)
        linux.close_range(3, server.fileno() - 1)
        linux.close_range(server.fileno() + 1)
        while (received := packets.receive(server)) is not None:
            message, namespaces = received
            work = [(guest, tuple(path), kind) for guest, path, kind in message["work"]]
            packets.send(server, {"errors": list(cover_in(namespaces, work))})
            linux.close_all(namespaces)
        code = 0
    os._exit(code)


def cover_in(namespaces: Sequence[int], work: Sequence[Work]) -> Iterator[str]:
    """Enter each mount namespace, cover there what is not, and stay; what went wrong in each."""
    for namespace in namespaces:
        errors = []
        try:
            linux.setns(namespace, linux.CLONE_NEWNS)
            for guest, path, kind in work:
                errors += _tried(guest, path, kind)
        except OSError as reason:
            errors.append(str(reason))
        yield "; ".join(errors[:3])


def _tried(guest: str, path: Parts, kind: str) -> list[str]:
    try:
        if path:
            put(guest, path, kind)
        else:
            _check_place(guest, kind)
    except OSError as reason:
        return [f"{secrets.quoted(secrets.readable(path))}: {reason.strerror}"]
    return []


def _check_place(guest: str, wanted: str) -> None:
    """Raise OSError unless this is what the mount shows here; have no mounts of the host follow.

    Who starts a sandbox may name the folder by a path, in which code could have put a link.
    """
    fd = os.open(guest, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    if f"{info.st_dev}:{info.st_ino}" != wanted:
        raise OSError(f"{guest} was replaced on the host while the kernel started: try again")
    linux.mount("", guest, "", linux.MS_REC | linux.MS_PRIVATE)


def put(guest: str, path: Parts, kind: str) -> None:
    """Cover a path below a mount in this mount namespace, unless something does. Raises OSError.

    A folder that is `KEPT` is not covered: what is covered in it later would be open to code that
    is in the folder. Linux moves no folder on which anything is mounted in this namespace, through
    whichever mount that is: here it is another copy of the mount, which code cannot reach.
    """
    target = _uncovered(guest, path, kind)
    if target >= 0 and kind == secrets.KEPT:
        os.close(target)
        target = _uncovered(_pins(guest), path, kind)
    if target < 0:
        return
    try:
        if stat.S_ISLNK(os.fstat(target).st_mode):
            return
        tree = _cover_of(kind, target)
        try:
            linux.move_mount(tree, target)
        finally:
            os.close(tree)
    except OSError as reason:
        if reason.errno != errno.ENOENT:  # removed meanwhile; what comes after it is told
            raise
    finally:
        os.close(target)


def _pins(guest: str) -> str:
    """Return where the other copy of a mount is; attach it where it is not. Raises OSError."""
    place = f"{BLANK}/{PINS}/{pins_of(guest)}"
    folder = os.open(f"{BLANK}/{PINS}", _PASSED)
    try:
        os.close(open_beneath(folder, (pins_of(guest),), os.O_PATH))
    except OSError as reason:
        if reason.errno != errno.EXDEV:
            raise
        return place
    finally:
        os.close(folder)
    top = os.open(guest, _PASSED)
    try:
        tree = _read_only(top)
    finally:
        os.close(top)
    try:
        linux.move_mount(tree, place)
    finally:
        os.close(tree)
    return place


def _uncovered(guest: str, path: Parts, kind: str) -> int:
    """Return an entry below a mount; -1 where it is gone, covered or another mount.

    What hides comes over what is fixed, and over file systems that the host has mounted; what is
    fixed comes over what can be written to. Raises OSError.
    """
    folder = os.open(guest, _PASSED)
    try:
        for name in path[:-1]:
            deeper = os.open(name, _PASSED, dir_fd=folder)
            os.close(folder)
            folder = deeper
        return _entry(folder, path[-1], kind)
    except OSError:
        return -1  # gone, or a link: covered
    finally:
        os.close(folder)


def _entry(folder: int, name: str, kind: str) -> int:
    try:
        return open_beneath(folder, (name,), os.O_PATH | os.O_NOFOLLOW)
    except OSError as reason:
        if reason.errno != errno.EXDEV or kind == secrets.KEPT:
            raise
    target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    if kind == secrets.FIXED:
        covered = bool(os.fstatvfs(target).f_flag & os.ST_RDONLY)
    else:
        blank, info = os.stat(f"{BLANK}/{kind}"), os.fstat(target)  # noqa: PTH116
        covered = (info.st_dev, info.st_ino) == (blank.st_dev, blank.st_ino)
    if not covered:
        return target
    os.close(target)
    return -1


def _cover_of(kind: str, target: int) -> int:
    return linux.open_tree(f"{BLANK}/{kind}") if kind in secrets.HIDING else _read_only(target)


def _read_only(target: int) -> int:
    """Return a detached copy of what is at an open place, read-only. Raises OSError."""
    tree = linux.open_tree(target, recursive=True)
    try:
        linux.set_attributes(tree, linux.MOUNT_ATTR_RDONLY, recursive=True)
    except OSError:
        os.close(tree)
        raise
    return tree
