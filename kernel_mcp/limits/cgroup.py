"""Control groups for kernels: one group per kernel below one of the server, versions 1 and 2.

Everything is done below the group that the server itself is in, so what was given to the server
is what its kernels share. All that is written here is small and answered at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_mcp.limits.hierarchy import Hierarchy
from kernel_mcp.settings import Limits

logger = logging.getLogger(__name__)

PREFIX = "kernel-mcp-"
RECORD = "cgroups"
"""The file of a run directory that names the server's groups."""
BACKSTOP = 1.2
"""A group may hold this much of the memory budget: the address space limit acts first, within a
process that can go on; the group is for what processes together use."""
PERIOD_US = 100_000
"""Period of the processor quota, the default of both versions."""
SERVER_WEIGHT = 1000
"""Share of the processors for the server where it is a neighbour of its kernels, which have 100."""
_SERVER = "server"
_MOVES = 8
"""Rounds in which the processes of a group are moved: they may start others meanwhile."""


class GroupsUnavailable(Exception):
    """Groups cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a group has used: processor seconds, bytes now and at most, kills for lack of memory.

    None where no controller tells.
    """

    cpu_s: float | None = None
    memory_bytes: int | None = None


class KernelGroup:
    """The group of one kernel, a folder per hierarchy. Reading and writing raise OSError."""

    def __init__(self, folders: dict[str, Path], *, unified: frozenset[str]) -> None:
        """`folders` is by controller; those of `unified` are of version 2."""
        self._folders = folders
        self._unified = unified

    @property
    def controllers(self) -> frozenset[str]:
        """What is in force for this kernel."""
        return frozenset(self._folders)

    def limit(self, limits: Limits) -> None:
        """Write the limits."""
        if limits.memory_bytes and "memory" in self._folders:
            self._limit_memory(int(limits.memory_bytes * BACKSTOP))
        if limits.pids and "pids" in self._folders:
            _write(self._folders["pids"] / "pids.max", limits.pids)
        if limits.cpus and "cpu" in self._folders:
            folder, quota = self._folders["cpu"], max(int(limits.cpus * PERIOD_US), 1000)
            if "cpu" in self._unified:
                _write(folder / "cpu.max", f"{quota} {PERIOD_US}")
            else:
                _write(folder / "cpu.cfs_period_us", PERIOD_US)
                _write(folder / "cpu.cfs_quota_us", quota)

    def admit(self, pid: int) -> None:
        """Move a process with all its threads into the group; what it starts stays in it.

        Nothing happens when it has ended.
        """
        for folder in self._places():
            with contextlib.suppress(ProcessLookupError):
                _write(folder / "cgroup.procs", pid)

    def sample(self) -> Sample:
        """What the group has used so far; file caches do not count as memory."""
        return Sample(self._cpu_s(), self._memory())

    def peak(self) -> int:
        """The most memory it ever held in bytes, file caches included; 0 where nobody tells."""
        if "memory" not in self._folders:
            return 0
        unified = "memory" in self._unified
        name = "memory.peak" if unified else "memory.max_usage_in_bytes"  # peak: Linux 5.19
        try:
            return int((self._folders["memory"] / name).read_text())
        except OSError:
            return 0

    def starved(self) -> int:
        """How many of its processes the system has killed for lack of memory."""
        if "memory" not in self._folders:
            return 0
        name = "memory.events" if "memory" in self._unified else "memory.oom_control"
        try:
            return _table(self._folders["memory"] / name).get("oom_kill", 0)
        except OSError:
            return 0

    def processes(self) -> list[int]:
        """Who is in it, except threads."""
        return sorted({pid for folder in self._places() for pid in _processes(folder)})

    def remove(self) -> bool:
        """Kill what is left in the group and remove it; False when that has to be tried again."""
        gone = [_remove(folder) for folder in self._places()]
        return all(gone)

    def _places(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def _limit_memory(self, size: int) -> None:
        folder = self._folders["memory"]
        if "memory" in self._unified:
            _write(folder / "memory.max", size)
            with contextlib.suppress(OSError):  # a system without swap accounting
                _write(folder / "memory.swap.max", 0)
            return
        _write(folder / "memory.limit_in_bytes", size)
        try:
            _write(folder / "memory.memsw.limit_in_bytes", size)
        except OSError:  # the same
            _write(folder / "memory.swappiness", 0)

    def _cpu_s(self) -> float | None:
        if "cpu" in self._unified:
            return _table(self._folders["cpu"] / "cpu.stat")["usage_usec"] / 1e6
        if "cpuacct" in self._folders:
            return int((self._folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        return None

    def _memory(self) -> int | None:
        if "memory" not in self._folders:
            return None
        names = ("anon", "shmem") if "memory" in self._unified else ("total_rss", "total_shmem")
        found = _table(self._folders["memory"] / "memory.stat")
        return sum(found.get(name, 0) for name in names)


class GroupTree:
    """The groups of one server. Made by `create`, removed by `close`."""

    def __init__(self, tops: dict[Path, Hierarchy], name: str) -> None:
        self._tops = tops
        self._name = name
        self._left: list[KernelGroup] = []
        self._moved: list[Hierarchy] = []

    @classmethod
    def create(cls, hierarchies: Sequence[Hierarchy], name: str, record: Path) -> GroupTree:
        """Make the group `name` of this process in every hierarchy that allows it.

        The folders are noted in the file `record` before they exist, for `remove_recorded`.
        Raises GroupsUnavailable when no hierarchy does.
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
            raise GroupsUnavailable("; ".join(reasons))
        for text in reasons:
            logger.info("a cgroup hierarchy cannot be used: %s", text)
        return tree

    @property
    def versions(self) -> dict[str, int]:
        """The version that each usable controller is of."""
        return {
            name: tree.version for tree in self._tops.values() for name in sorted(tree.controllers)
        }

    def kernel(self, name: str) -> KernelGroup:
        """Make the group of a kernel. Raises OSError, and leaves nothing behind then."""
        self._left = [group for group in self._left if not group.remove()]
        folders: dict[str, Path] = {}
        unified: set[str] = set()
        group = KernelGroup(folders, unified=frozenset())
        try:
            for top, hierarchy in self._tops.items():
                _make(top / name)
                folders.update(dict.fromkeys(hierarchy.controllers, top / name))
                if hierarchy.version == 2:
                    unified |= hierarchy.controllers
        except OSError:
            group.remove()
            raise
        return KernelGroup(folders, unified=frozenset(unified))

    def discard(self, group: KernelGroup) -> None:
        """Remove a kernel's group, now or when the last of its processes is gone."""
        if not group.remove():
            self._left.append(group)

    def close(self) -> None:
        """Remove all groups of this server and undo what was changed for them."""
        for top in self._tops:
            if not _remove_tree(top, keep=_SERVER):
                logger.warning("the cgroup %s could not be removed: it still has processes", top)
        for hierarchy in self._moved:
            with contextlib.suppress(OSError):
                self._leave(hierarchy)
        self._tops, self._moved = {}, []

    def _refusal_of(self, hierarchy: Hierarchy) -> str:
        """Make the server's group in one hierarchy; why not, or an empty text."""
        try:
            self._enter(hierarchy)
        except GroupsUnavailable as reason:
            return str(reason)
        except OSError as reason:
            return f"{hierarchy.own}: {reason.strerror or reason}"
        return ""

    def _enter(self, hierarchy: Hierarchy) -> None:
        top = hierarchy.own / self._name
        _make(top)
        try:
            if hierarchy.version == 2:
                self._delegate(hierarchy, top)
        except BaseException:
            _remove_tree(top)
            raise
        self._tops[top] = hierarchy

    def _delegate(self, hierarchy: Hierarchy, top: Path) -> None:
        """Make the controllers work below `top`.

        Version 2 takes them away from groups that hold processes: this one moves into a group of
        its own then, provided that it is alone where it is.
        """
        own, wanted = hierarchy.own, sorted(hierarchy.controllers)
        enabled = (own / "cgroup.subtree_control").read_text().split()
        if not set(wanted) <= set(enabled):
            if (own / "cgroup.type").exists():  # every group but the root of all
                self._move_out(hierarchy, top)
            try:
                _write(own / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
            except OSError:
                if hierarchy in self._moved:
                    self._moved.remove(hierarchy)
                    self._leave(hierarchy)
                raise
        _write(top / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        if hierarchy in self._moved and "cpu" in wanted:
            _write(top / _SERVER / "cpu.weight", SERVER_WEIGHT)

    def _move_out(self, hierarchy: Hierarchy, top: Path) -> None:
        own = hierarchy.own
        strangers = [pid for pid in _processes(own) if not _is_ours(pid)]
        if strangers:
            raise GroupsUnavailable(
                f"the server shares the cgroup {own} with other processes, such as "
                f"{strangers[0]}. Start it in one of its own, for example with `systemd-run "
                "--user --scope -p Delegate=yes kernel-mcp …`"
            )
        _make(top / _SERVER)
        self._moved.append(hierarchy)
        if not _move_all(own, top / _SERVER):
            self._moved.remove(hierarchy)
            self._leave(hierarchy)
            raise GroupsUnavailable(f"the cgroup {own} could not be emptied")

    def _leave(self, hierarchy: Hierarchy) -> None:
        """Undo `_move_out`: controllers off, processes back."""
        top = hierarchy.own / self._name
        for folder in (top, hierarchy.own):
            off = " ".join(f"-{name}" for name in sorted(hierarchy.controllers))
            with contextlib.suppress(OSError):
                _write(folder / "cgroup.subtree_control", off)
        _move_all(top / _SERVER, hierarchy.own)
        _unmake(top / _SERVER)
        _unmake(top)


def remove_recorded(record: Path) -> None:
    """Remove the groups of a server that has ended, as it noted them in `record`."""
    try:
        folders = record.read_text().splitlines()
    except OSError:
        return
    for folder in map(Path, folders):
        if folder.name.startswith(PREFIX) and not _remove_tree(folder):
            logger.warning("the cgroup %s of a server that has ended cannot be removed", folder)


def _move_all(source: Path, target: Path) -> bool:
    """Move all processes of a group; whether it is empty now."""
    for _ in range(_MOVES):
        members = _processes(source)
        if not members:
            return True
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                _write(target / "cgroup.procs", pid)
    return not _processes(source)


def _is_ours(pid: int) -> bool:
    """Whether a process is this one or was started by it."""
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


def _remove_tree(top: Path, keep: str = "") -> bool:
    """Remove a group with those directly below it, killing who is in them; whether it is gone.

    With one called `keep` below it nothing but the others is removed.
    """
    try:
        below = [entry for entry in top.iterdir() if entry.is_dir()]
    except OSError:
        return not top.exists()
    gone = [_remove(folder) for folder in below if folder.name != keep]
    if any(folder.name == keep for folder in below):
        return all(gone)
    return all(gone) and _remove(top)


def _remove(folder: Path) -> bool:
    if _removed(folder):
        return True
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
    with contextlib.suppress(OSError):
        _write(folder / "cgroup.kill", 1)  # version 2, Linux 5.14
        return
    for pid in _processes(folder):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes(folder: Path) -> list[int]:
    try:
        return [pid for pid in map(int, (folder / "cgroup.procs").read_text().split()) if pid > 0]
    except OSError:
        return []


def _table(file: Path) -> dict[str, int]:
    """A file of lines with a name and a number."""
    return dict(_rows(file.read_text()))


def _rows(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)


def _make(folder: Path) -> None:
    folder.mkdir()


def _unmake(folder: Path) -> None:
    folder.rmdir()


def _write(file: Path, value: int | str) -> None:
    """Write a control file in one call, as they want it."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)
