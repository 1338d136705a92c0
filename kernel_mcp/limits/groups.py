"""The control groups of one server: its own, and one for each kernel below it.

All are below the group in which the server was started. Reads and writes are fast: the files are
small.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.group import KernelGroup, backstop
from kernel_mcp.linux import cgroupfs
from kernel_mcp.linux.cgroupfs import Hierarchy, is_group
from kernel_mcp.linux.proc import available_memory

logger = logging.getLogger(__name__)

PREFIX = "kernel-mcp-"
_OF_A_SERVER = re.compile(rf"{PREFIX}\d+-(?P<run>[0-9a-z]+)")
"""Name of a server's group: its process id and the name of its run directory."""
RECORD = "cgroups"
"""File of a run directory that names the server's groups."""
SERVER_WEIGHT = 1000
"""CPU weight of the server among its kernels, which have 100 each."""
REMOVAL_TRIES = 20
REMOVAL_PAUSE_S = 0.01
"""Seconds between attempts: Linux sends no event when an empty group becomes removable."""
_SERVER = "server"


class GroupsUnavailable(Exception):
    """Control groups cannot be used here; the text has the reason."""


class GroupTree:
    """The groups of one server. Created by `create`, removed by `close`."""

    def __init__(self, tops: dict[Path, Hierarchy], name: str) -> None:
        self._tops = tops
        self._name = name
        self._locks: list[int] = []
        self._left: list[KernelGroup] = []
        self._moved: list[Hierarchy] = []

    @classmethod
    def create(cls, hierarchies: Sequence[Hierarchy], name: str, record: Path) -> GroupTree:
        """Make the group `name` of this process in every hierarchy that allows it.

        Records the folders in `record` before they exist, for `remove_recorded`, and locks them.
        Removes groups of ended servers. Raises GroupsUnavailable if no hierarchy allows a group.
        """
        tree = cls({}, name)
        reasons: list[str] = []
        if not hierarchies:
            raise GroupsUnavailable("no controller of cgroups is mounted here")
        record.write_text("".join(f"{found.own / name}\n" for found in hierarchies))
        for hierarchy in hierarchies:
            reason = tree._refusal_of(hierarchy)
            if reason:
                reasons.append(reason)
        if not tree._tops:
            record.unlink(missing_ok=True)
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise GroupsUnavailable(f"{reasons[0]}{more}")
        for text in reasons:
            logger.info("a cgroup hierarchy cannot be used: %s", text)
        return tree

    @property
    def versions(self) -> dict[str, int]:
        """Cgroup version by usable controller."""
        return {
            name: tree.version for tree in self._tops.values() for name in sorted(tree.controllers)
        }

    def kernel(self, name: str) -> KernelGroup:
        """Return the group of a kernel, not created yet."""
        folders: dict[str, Path] = {}
        unified: set[str] = set()
        for top, hierarchy in self._tops.items():
            folders.update(dict.fromkeys(hierarchy.controllers, top / name))
            if hierarchy.version == 2:
                unified |= hierarchy.controllers
        return KernelGroup(folders, unified=frozenset(unified))

    def expect(self) -> None:
        """Write this process's id to its own `cgroup.procs`, which starts a grace period of RCU.

        The first move after a while waits some 10 ms for it; the following moves do not.
        """
        for top, hierarchy in self._tops.items():
            own = top / _SERVER if hierarchy in self._moved else hierarchy.own
            with contextlib.suppress(OSError):
                cgroupfs.write(own / "cgroup.procs", os.getpid())
                return

    def discard(self, group: KernelGroup) -> None:
        """Remove a kernel's group, now or once its last process has ended."""
        self._left = [left for left in (*self._left, group) if not left.remove()]

    def close(self) -> None:
        """Remove all groups of this server and restore the hierarchies."""
        for top in self._tops:
            if not _removed(top):
                logger.warning("the cgroup %s could not be removed: it still has processes", top)
        for hierarchy in list(self._moved):
            self._leave(hierarchy)
        self._tops = {}
        locks, self._locks = self._locks, []
        for lock in locks:
            os.close(lock)

    def _refusal_of(self, hierarchy: Hierarchy) -> str:
        """Make the server's group in one hierarchy; return why that failed, or ""."""
        try:
            self._enter(hierarchy)
        except GroupsUnavailable as reason:
            return str(reason)
        except OSError as reason:
            return f"{hierarchy.own}: {reason.strerror or reason}"
        return ""

    def _enter(self, hierarchy: Hierarchy) -> None:
        top = hierarchy.own / self._name
        _sweep(hierarchy.own)
        self._locks.append(_claimed(top))
        try:
            if hierarchy.version == 2:
                self._delegate(hierarchy, top)
        except BaseException:
            self._leave(hierarchy)
            raise
        self._tops[top] = hierarchy

    def _delegate(self, hierarchy: Hierarchy, top: Path) -> None:
        """Enable the controllers below `top`.

        Version 2 refuses that in a group with processes. This process then moves to a group of its
        own, provided that the old group has no other processes.
        """
        own, wanted = hierarchy.own, sorted(hierarchy.controllers)
        enabled = (own / "cgroup.subtree_control").read_text().split()
        if not set(wanted) <= set(enabled):
            if (own / "cgroup.type").exists():  # exists in every group except the root
                self._move_out(hierarchy, top)
            cgroupfs.write(own / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        cgroupfs.write(top / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        if hierarchy in self._moved and "cpu" in wanted:
            cgroupfs.write(top / _SERVER / "cpu.weight", SERVER_WEIGHT)

    def _move_out(self, hierarchy: Hierarchy, top: Path) -> None:
        own = hierarchy.own
        strangers = [pid for pid in cgroupfs.processes(own) if not _is_ours(pid)]
        if strangers:
            raise GroupsUnavailable(
                f"the server shares the cgroup {own} with other processes, such as "
                f"{strangers[0]}. Start it in one of its own, for example with `systemd-run "
                "--user --scope -p Delegate=yes kernel-mcp …`"
            )
        cgroupfs.make(top / _SERVER)
        self._moved.append(hierarchy)
        if not cgroupfs.move_all(own, top / _SERVER):
            raise GroupsUnavailable(f"the cgroup {own} could not be emptied")

    def _leave(self, hierarchy: Hierarchy) -> None:
        """Undo `_enter`: disable controllers, move processes back."""
        top = hierarchy.own / self._name
        if hierarchy in self._moved:
            self._moved.remove(hierarchy)
            off = " ".join(f"-{name}" for name in sorted(hierarchy.controllers))
            for folder in (top, hierarchy.own):
                with contextlib.suppress(OSError):
                    cgroupfs.write(folder / "cgroup.subtree_control", off)
            with contextlib.suppress(OSError):
                cgroupfs.move_all(top / _SERVER, hierarchy.own)
        if not cgroupfs.remove_with_children(top):
            logger.warning("the cgroup %s could not be removed", top)


def _claimed(folder: Path) -> int:
    """Make a group and lock it (flock) while this server runs; return the lock's descriptor.

    Raises OSError.
    """
    for _ in range(cgroupfs.ROUNDS):
        with contextlib.suppress(FileNotFoundError):  # removed by the sweep of another server
            if not folder.exists():
                cgroupfs.make(folder)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)  # a sweep may hold it briefly
            if folder.exists():
                return lock
            os.close(lock)
    raise OSError(f"{folder} is removed again and again")


def _sweep(parent: Path) -> None:
    """Remove the groups of servers that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _OF_A_SERVER.fullmatch(folder.name):
            _remove_unlocked(folder)


def remove_recorded(record: Path, process: Path = Path("/proc/self")) -> None:
    """Remove the groups of an ended server that `record` names.

    Only group names of this run directory are accepted (`s-…` for `kernel-mcp-PID-…`), in
    hierarchies that are mounted for `process`.
    """
    try:
        folders = record.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    run = record.parent.name.rpartition("-")[2]
    for folder in map(Path, folders):
        name = _OF_A_SERVER.fullmatch(folder.name)
        if name is None or name["run"] != run or not is_group(folder, process):
            if os.path.lexists(folder):
                logger.warning("%s names %r, which is no group of that server", record, str(folder))
        elif not _remove_unlocked(folder):
            logger.warning("the cgroup %s of a server that has ended cannot be removed", folder)


def _remove_unlocked(folder: Path) -> bool:
    """Remove a server's group unless that server holds the lock; return True if it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return not folder.exists()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cgroupfs.remove_with_children(folder)
    except OSError:
        return False
    finally:
        os.close(lock)


def _is_ours(pid: int) -> bool:
    server = os.getpid()
    while pid > 1:
        if pid == server:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return True  # it has ended
        pid = int(stat.rpartition(b")")[2].split()[1])
    return pid == server


def _removed(top: Path) -> bool:
    """Remove a group; retry while it is busy, for a moment after its last process has ended.

    Return True if it is gone.
    """
    for _ in range(REMOVAL_TRIES):
        if cgroupfs.remove_with_children(top, keep=_SERVER):
            return True
        time.sleep(REMOVAL_PAUSE_S)
    return False


class Membership:
    """One kernel's group, created in an executor of one thread.

    The first move of a process takes some 10 ms, and later ones wait for it. A process that enters
    by `entry_fds` does not wait.
    """

    def __init__(
        self,
        groups: GroupTree,
        name: str,
        limits: Limits,
        *,
        executor: Executor,
        leave: Callable[[KernelGroup], None],
    ) -> None:
        """`leave` is called with the group by `end`."""
        self.group = groups.kernel(name)
        self._executor = executor
        self._leave = leave
        self._made: Future[None] = executor.submit(self.group.make, limits)
        self._tasks: list[Future[None]] = [self._made]
        if not self.group.enters_by_fds:
            self._tasks.append(executor.submit(groups.expect))

    def admit(self, pids: Iterable[int]) -> None:
        """Queue the move of processes; their later children start in the group."""
        self._tasks.append(self._executor.submit(self.group.admit, tuple(pids)))

    def make_room(self, budget: int, size: int) -> None:
        """Queue a memory limit up to `size` bytes above that of `budget`.

        The addition is limited by the memory that the machine has available.
        """
        self._executor.submit(self._widen, budget, size)

    def _widen(self, budget: int, size: int) -> None:
        with contextlib.suppress(OSError):
            self.group.allow_memory(backstop(budget) + min(size, available_memory()))

    async def made(self) -> None:
        """Wait until the group exists. Raises OSError."""
        await asyncio.shield(asyncio.wrap_future(self._made))

    async def entry_fds(self) -> list[int]:
        """Return descriptors by which processes enter the group; empty if they must be moved.

        The caller closes them. Raises OSError.
        """
        if not self.group.enters_by_fds:
            return []
        await self.made()
        return self.group.entry_fds()

    async def settled(self) -> None:
        """Wait for the creation of the group and all queued moves. Raises OSError."""
        while self._tasks:
            await asyncio.wrap_future(self._tasks.pop(0))

    def end(self) -> None:
        """Remove the group; must be called after its last process has ended."""
        self._leave(self.group)
