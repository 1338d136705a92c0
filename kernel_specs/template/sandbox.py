"""The sandbox of one kernel: built and held by its init, joined by the kernel.

Kernels wait for the init, so this module imports little: pathlib and dataclasses cost 10 ms.
"""

# ruff: noqa: PTH103, PTH110, PTH112, PTH120, PTH208

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernel_specs import linux

if TYPE_CHECKING:
    from typing import Any, NoReturn


def drop(filter_program: bytes) -> None:
    """Empty all capability sets, forbid new ones, install the system call filter.

    Requires CAP_SETPCAP in the user namespace of this process. Raises OSError.
    """
    number = 0
    while _unbind(number):
        number += 1
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    linux.clear_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_filter(filter_program)


def keep_from_processes() -> None:
    """Drop CAP_SYS_PTRACE: processes with more rights become unreadable. Raises OSError.

    Requires CAP_SETPCAP.
    """
    linux.prctl(linux.PR_CAPBSET_DROP, linux.CAP_SYS_PTRACE)
    linux.drop_capability(linux.CAP_SYS_PTRACE)


def _unbind(number: int) -> bool:
    """Remove a capability from the bounding set; return False if there is none of that number."""
    try:
        linux.prctl(linux.PR_CAPBSET_DROP, number)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


KERNEL_ID = 1000
"""User and group id of every kernel inside its user namespace."""
SESSIONS = "/sessions"
"""Folder in an unprivileged server's template with the folders of all sessions, each a mount."""
READY = b"ready"
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
IDLE = "/usr/bin/sleep"
BLANK = "/run/blank"
"""Folder with an empty `file` and an empty `folder`, read-only, to mount over masked paths."""

_SHARED = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWNET
)
_INERT = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_BYTES_PER_INODE = 16 * 1024
"""Bytes of a tmpfs's size for each of its inodes."""
_FEWEST_INODES = 1024
_MOST_TERMINALS = 64
_MOST_WATCHES = {"max_inotify_instances": 16, "max_inotify_watches": 8192}
"""Inotify limits of one kernel. All kernels of a template share those of one user of the host."""


class SandboxMount(NamedTuple):
    """A mount from the host for this kernel alone.

    `tree` is a detached mount to attach; -1 to bind `source`, a path in the template, instead. With
    `shown` it is a mounted folder. `covers` are pairs of a path below it and a kind: masked by an
    empty `file` or `folder`, `fixed` (read-only), or `kept` (mounted over itself).
    """

    target: str
    source: str = ""
    tree: int = -1
    readonly: bool = False
    shown: bool = False
    covers: tuple[tuple[str, str], ...] = ()


class KernelSandbox(NamedTuple):
    """One kernel's sandbox. `uid` is its id in the template's namespace; `tmp_bytes` 0: no limit.

    `listen` are (address, port) in its network namespace. Sockets that listen there are sent over
    the socket `way`.
    """

    uid: int
    hostname: str
    tmp_bytes: int
    places: tuple[SandboxMount, ...]
    listen: tuple[tuple[str, int], ...] = ()
    way: int = -1

    @classmethod
    def parse(cls, data: dict[str, Any], trees: Sequence[int]) -> KernelSandbox:
        """Return the sandbox of a request and its descriptors. Raises KeyError, ValueError."""
        left = iter(trees)
        places = tuple(
            SandboxMount(
                target=str(place["target"]),
                source=str(place["source"]),
                tree=-1 if place["source"] else next(left, -1),
                readonly=place["readonly"] is True,
                shown="covers" in place,
                covers=tuple((str(path), str(kind)) for path, kind in place.get("covers", ())),
            )
            for place in data["places"]
        )
        listen = tuple((str(address), int(port)) for address, port in data.get("listen", ()))
        return cls(
            uid=int(data["uid"]),
            hostname=str(data["hostname"]),
            tmp_bytes=int(data["tmp_bytes"]),
            places=places,
            listen=listen,
            way=next(left, -1) if listen else -1,
        )


class SandboxEntry(NamedTuple):
    """Descriptors to enter a sandbox: the init's pidfd, and the read end of its pipe.

    The init writes to the pipe once the sandbox is built.
    """

    uid: int
    init: int
    done: int


class SandboxSettings(NamedTuple):
    """Settings that all sandboxes of a template share.

    masks     files of /proc to mask
    fixed     paths of a writable /proc that stay read-only; if empty, all of /proc is read-only
    kept      paths below /tmp that the runtime needs
    program   the system call filter
    """

    masks: tuple[str, ...]
    fixed: tuple[str, ...]
    kept: tuple[str, ...]
    program: bytes


def hold(
    sandbox: KernelSandbox, settings: SandboxSettings, cgroup_fds: Sequence[int], done: int
) -> NoReturn:
    """Run as the init of a new pid namespace: build the sandbox, write to `done`, wait for SIGKILL.

    Enters the control groups of `cgroup_fds` first. An error is written to `done` instead, and
    makes the kernel exit.
    """
    try:
        os.setsid()
        linux.set_name("kernel-sandbox")
        linux.enter_groups(cgroup_fds)
        _build(sandbox, settings)
        drop(settings.program)
        # Linux reaps the children of a process that ignores this signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.write(done, READY)
        _rest()
    except OSError as error:
        os.write(done, f"the sandbox could not be built: {error}".encode())
    while True:
        signal.pause()


def join(entry: SandboxEntry, settings: SandboxSettings) -> None:
    """Enter the sandbox that an init builds, for good, as a user without capabilities.

    Waits until it is built. Raises RuntimeError if it could not be, OSError.
    """
    word = os.read(entry.done, 4096)
    if word != READY:
        raise RuntimeError(word.decode("utf-8", "replace") or "the sandbox's init has ended")
    # opened here, because /proc of the sandbox is read-only
    processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    linux.setns(entry.init, _SHARED)
    _become(entry.uid, processes)
    drop(settings.program)


def _build(sandbox: KernelSandbox, settings: SandboxSettings) -> None:
    linux.unshare(_SHARED)
    linux.set_hostname(sandbox.hostname)
    linux.loopback_up()
    if sandbox.listen:  # before any code of the kernel: no other socket has these addresses
        linux.send_listeners(sandbox.way, sandbox.listen)
    for place in sandbox.places:
        if not place.shown:
            _put(place)
    folders = [(place, _handle(place)) for place in sandbox.places if place.shown]
    hide_sessions()
    _new_tmp(sandbox.tmp_bytes, settings.kept)
    for place, tree in folders:
        _show(place, tree)
    linux.mount("tmpfs", "/dev/shm", "tmpfs", _INERT, _tmpfs_options(sandbox.tmp_bytes))
    terminals = f"newinstance,ptmxmode=0666,max={_MOST_TERMINALS}"
    linux.mount("devpts", "/dev/pts", "devpts", _INERT & ~linux.MS_NODEV, terminals)
    linux.mount("proc", "/proc", "proc", _INERT if settings.fixed else _INERT | linux.MS_RDONLY)
    for path in settings.fixed:
        linux.mount(path, path, "", linux.MS_BIND)
        linux.mount("", path, "", linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | _INERT)
    for path in settings.masks:
        linux.mount("/dev/null", path, "", linux.MS_BIND)


def hide_sessions() -> None:
    """Unmount the folders of all sessions in this mount namespace."""
    if os.path.isdir(SESSIONS):
        for shared in os.listdir(SESSIONS):
            linux.unmount(f"{SESSIONS}/{shared}")


def show_processes() -> None:
    """Mount a writable /proc: parts of bubblewrap's are masked."""
    linux.mount("proc", "/proc", "proc", _INERT)


def _put(place: SandboxMount) -> None:
    if place.tree >= 0:
        linux.move_mount(place.tree, place.target)
        linux.mount("", place.target, "", linux.MS_PRIVATE)
    else:
        linux.mount(place.source, place.target, "", linux.MS_BIND)
    if place.readonly:
        flags = linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY
        linux.mount("", place.target, "", flags | linux.MS_NOSUID | linux.MS_NODEV)


def _handle(place: SandboxMount) -> int:
    """Return a detached mount of a folder to show; to be called before `hide_sessions`."""
    if place.tree >= 0:
        return place.tree  # the server has set its attributes
    attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
    if place.readonly:
        attributes |= linux.MOUNT_ATTR_RDONLY
    tree = linux.open_tree(place.source, recursive=True)
    linux.set_attributes(tree, attributes, recursive=True)
    return tree


def _show(place: SandboxMount, tree: int) -> None:
    """Attach a mounted folder, and mask paths in it."""
    if place.target.startswith("/tmp/"):
        _make_target(place.target, tree)
    linux.move_mount(tree, place.target)
    for path, kind in place.covers:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed or replaced
            _cover(place.target, path.split("/"), kind)


def _cover(top: str, parts: Sequence[str], kind: str) -> None:
    """Mount over a path through handles, so that no link is followed. Raises OSError."""
    handles = [os.open(top, _PASSED)]
    try:
        for name in parts[:-1]:
            handles.append(os.open(name, _PASSED, dir_fd=handles[-1]))
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        handles.append(os.open(parts[-1], flags, dir_fd=handles[-1]))
        if stat.S_ISLNK(os.fstat(handles[-1]).st_mode):
            return
        if kind in ("fixed", "kept"):
            tree = linux.open_tree(handles[-1], recursive=True)
            if kind == "fixed":
                linux.set_attributes(tree, linux.MOUNT_ATTR_RDONLY, recursive=True)
        else:
            tree = linux.open_tree(f"{BLANK}/{kind}")
        handles.append(tree)
        linux.move_mount(tree, handles[-2])
    finally:
        linux.close_all(handles)


def _make_target(target: str, tree: int) -> None:
    """Make a mount point, folder or file as `tree` is; it may exist."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


def _new_tmp(size: int, kept: Sequence[str]) -> None:
    """Mount a private /tmp with the `kept` paths bound into it."""
    handles = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in kept}
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _tmpfs_options(size))
    for path, handle in handles.items():
        _make_target(path, handle)
        linux.mount(f"/proc/self/fd/{handle}", path, "", linux.MS_BIND | linux.MS_REC)
        os.close(handle)


def _tmpfs_options(size: int) -> str:
    if size <= 0:
        return "mode=1777"
    return f"mode=1777,size={size},nr_inodes={max(size // _BYTES_PER_INODE, _FEWEST_INODES)}"


def _become(uid: int, processes: int) -> None:
    """Switch to `uid` of the template, mapped to KERNEL_ID in a user namespace of its own.

    The init stays in the template's user namespace, out of reach of the kernel. `processes` is an
    open descriptor of a writable /proc.
    """
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # setresuid(2) clears it, and without it root owns /proc/self
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    linux.unshare(linux.CLONE_NEWUSER)
    linux.write_maps("self", [(KERNEL_ID, uid, 1)], processes)
    for name, most in _MOST_WATCHES.items():
        with contextlib.suppress(FileNotFoundError):  # this Linux has no such watches
            linux.write_file(f"sys/user/{name}", str(most), processes)


def _rest() -> None:
    """Execute a small idle program, to free this interpreter's memory."""
    linux.close_range(0)
    if os.path.exists(IDLE):
        os.execv(IDLE, ["init", "infinity"])
