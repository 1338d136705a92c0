"""Enter the mount namespaces of running sandboxes to cover paths of the host's folders there.

A cover is a mount over a path below a mounted folder: it hides the path, or makes it read-only.
"""

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
from kernel_specs import linux
from kernel_specs.template import packets

T = TypeVar("T")
BLANK = "/run/blank"
"""Folder in every sandbox with mounts that holds an empty `file` and an empty `folder`."""
PINS = "pins"
"""Folder in `BLANK` that code cannot enter; it has a folder for each mount (`pins_of`)."""
Work = tuple[str, Parts, str]
"""A mount, a path below it and the kind of its cover. Without a path the last item is
DEVICE:INODE that the mount must have."""
_MOST_NAMESPACES = 50
"""Maximum number of namespaces in one message to a helper."""
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


def pins_of(guest: str) -> str:
    """Return the name of a mount's folder in `PINS`."""
    return hashlib.sha256(os.fsencode(guest)).hexdigest()[:32]


def weight(path: Parts) -> int:
    """Return an upper bound of the bytes that a path and its cover take in a message."""
    return 6 * sum(map(len, path)) + 4 * len(path) + 100


def parts_of(items: Sequence[T], weigh: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists that each fit into one message; `weigh` returns bytes."""
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
class RunningSandbox:
    """A running sandbox: descriptors of its mount namespace and of its first process (a pidfd)."""

    namespace: int
    process: int

    @property
    def ended(self) -> bool:
        """True if its process has ended."""
        return bool(select.select([self.process], [], [], 0)[0])


class SandboxNamespaces:
    """The running sandboxes with mounts; applies covers in all of them.

    Under a root server, this process enters their mount namespaces itself. Otherwise a process must
    enter their user namespace first, and cannot leave it. A helper is forked for each user
    namespace.
    """

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._direct = os.geteuid() == 0
        self._sandboxes: dict[int, RunningSandbox] = {}
        self._users: dict[int, int] = {}
        """Inode of the user namespace of each sandbox."""
        self._helpers: dict[int, Helper] = {}

    def hold(self, held: RunningSandbox, work: Sequence[Work]) -> str:
        """Cover these paths in a new sandbox and register it; return the error, empty on success.

        On an error the descriptors are closed.
        """
        failed = [error for _, error in self._all([held], work)] if work else []
        if failed:
            linux.close_all([held.namespace, held.process])
            return failed[0]
        self._sandboxes[held.process] = held
        return ""

    def prepare(self) -> None:
        """Start a helper for each user namespace in use; keep one unused helper at most."""
        if self._direct:
            return
        for held in self._sandboxes.values():
            self._helper(held)  # a failure is reported by the next cover
        used = set(self._users.values())
        for user in [each for each in self._helpers if each not in used][:-1]:
            self._helpers.pop(user).close()

    def ended(self, process: int) -> bool:
        """Close and forget a sandbox whose process has ended; return False for an unknown one."""
        held = self._sandboxes.pop(process, None)
        if held is None:
            return False
        self._users.pop(process, None)
        linux.close_all([held.namespace, held.process])
        return True

    def cover(self, work: Sequence[Work]) -> list[str]:
        """Cover these paths in all sandboxes; return the errors of those still running."""
        failed = self._all(list(self._sandboxes.values()), work)
        return [error for held, error in failed if not held.ended]

    def _all(
        self, sandboxes: list[RunningSandbox], work: Sequence[Work]
    ) -> list[tuple[RunningSandbox, str]]:
        if not sandboxes:
            return []
        if self._direct:
            try:
                errors = list(cover_in([each.namespace for each in sandboxes], work))
            finally:
                linux.setns(self._own, linux.CLONE_NEWNS)
            return _failed(sandboxes, errors)
        failed: list[tuple[RunningSandbox, str]] = []
        groups: dict[Helper, list[RunningSandbox]] = {}
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

    def _helper(self, held: RunningSandbox) -> Helper | str:
        """Return the helper for a sandbox, started if missing; or the reason why there is none."""
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


def _failed(
    group: Sequence[RunningSandbox], errors: Sequence[str]
) -> list[tuple[RunningSandbox, str]]:
    return [(held, error) for held, error in zip(group, errors, strict=True) if error]


class Helper:
    """A process in a user namespace, which enters the mount namespaces owned by that one."""

    def __init__(self, space: int) -> None:
        """Fork the process. Raises OSError."""
        self.alive = True
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _help(space, theirs)

    def send(self, namespaces: Sequence[int], work: Sequence[Work]) -> None:
        """Request these covers in some namespaces; `answers` returns the results."""
        with suppress(OSError):  # `answers` reports it
            for first in range(0, len(namespaces), _MOST_NAMESPACES):
                some = namespaces[first : first + _MOST_NAMESPACES]
                packets.send(self._socket, {"work": work}, some)

    def answers(self, count: int) -> list[str]:
        """Return one error for each of the last `count` namespaces; empty where all is covered."""
        errors: list[str] = []
        while len(errors) < count:
            received = packets.receive(self._socket)
            if received is None:
                self.close()
                return [*errors, *["its helper has ended"] * (count - len(errors))]
            errors += received[0]["errors"]
        return errors

    def close(self) -> None:
        """Kill and reap the process."""
        self.alive = False
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _help(space: int, server: socket.socket) -> NoReturn:
    """Run as a helper until the server's process has closed its socket."""
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
    """Enter each mount namespace and apply missing covers there; yield the error of each, or "".

    The process stays in the last namespace.
    """
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
    """Raise OSError unless the mount shows the folder `wanted`; end its mount propagation.

    A sandbox may have been started with the folder's path, which code can replace with a symlink.
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
    """Cover a path below a mount in this mount namespace, unless it is covered. Raises OSError.

    A `KEPT` folder, which must not be moved, is not covered itself. Code whose current folder it
    is would not see later covers in it. Linux refuses to move a folder that is a mount point in
    this namespace, through whichever mount. So the cover lies in a second copy of the mount, which
    code cannot reach.
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
        if reason.errno != errno.ENOENT:  # removed meanwhile; a successor is reported
            raise
    finally:
        os.close(target)


def _pins(guest: str) -> str:
    """Return the path of the second copy of a mount, attached if missing. Raises OSError."""
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
    """Return a descriptor of an entry below a mount; -1 if it is gone or needs no cover.

    A hiding cover is applied over read-only covers and over other file systems of the host. A
    read-only cover is applied over writable mounts only. Raises OSError.
    """
    folder = os.open(guest, _PASSED)
    try:
        for name in path[:-1]:
            deeper = os.open(name, _PASSED, dir_fd=folder)
            os.close(folder)
            folder = deeper
        return _entry(folder, path[-1], kind)
    except OSError:
        return -1  # gone, a symlink, or already kept in its place
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
    """Return a detached read-only copy of the mount tree at an open path. Raises OSError."""
    tree = linux.open_tree(target, recursive=True)
    try:
        linux.set_attributes(tree, linux.MOUNT_ATTR_RDONLY, recursive=True)
    except OSError:
        os.close(tree)
        raise
    return tree
