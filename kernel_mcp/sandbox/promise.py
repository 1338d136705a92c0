"""What a backend promises about a kernel's process, as far as Linux tells it to others in /proc.

A kernel is not asked: the server reads of it, after every start, what no process can tell wrongly
about itself. What a system call filter holds, and what Landlock allows, cannot be read; the
self-test tries it.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass

from kernel_mcp.sandbox.base import Identity

CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
CAP_DAC_READ_SEARCH = 1 << 2
NAMESPACES = ("net", "mnt", "pid", "ipc", "uts", "cgroup", "user")
FILTER_MODE = "2"
"""SECCOMP_MODE_FILTER of <linux/seccomp.h>, as `Seccomp` in /proc/PID/status."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What has to be found in /proc of a kernel.

    `user` is its host identity, `filters` how many system call filters it is under at least; with
    `inherits` those of the server come on top. `namespaces` are shared with nobody. `capabilities`
    are the bits that it may hold.
    """

    user: Identity
    filters: int
    namespaces: tuple[str, ...] = ()
    capabilities: int = 0
    inherits: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc tells of a process: the fields of `status`, and its namespaces by kind."""

    status: dict[str, str]
    namespaces: dict[str, str]

    @property
    def filters(self) -> int:
        """How many system call filters it is under; before Linux 5.9, 1 for any number."""
        if self.status.get("Seccomp") != FILTER_MODE:
            return 0
        return int(self.status.get("Seccomp_filters", "1"))

    @property
    def parent(self) -> int:
        """Its parent's process id."""
        return int(self.status["PPid"])

    @property
    def capabilities(self) -> int:
        """All capabilities that it holds or can come to hold, as bits."""
        return gainable(self.status)

    def words(self) -> tuple[str, ...]:
        """The same for people."""
        return (
            f"host user {self.status['Uid'].split()[0]}",
            f"capabilities: {self.capabilities:#x}" if self.capabilities else "no capabilities",
            "no new privileges" if self.status.get("NoNewPrivs") == "1" else "may gain privileges",
            f"system call filters: {self.filters}",
        )


def gainable(status: dict[str, str]) -> int:
    """The capabilities that a process holds or can come to hold, as bits.

    The bounding set limits what executing a program can give. With no_new_privs that is nothing,
    so that the set, which is full for ordinary users, says nothing then (capabilities(7)).
    """
    ineffective = ("CapBnd",) if status.get("NoNewPrivs") == "1" else ()
    found = 0
    for name in CAPABILITY_SETS:
        if name not in ineffective:
            found |= int(status.get(name, "ffffffffffffffff"), 16)
    return found


def read_facts(pid: int, pidfd: int = -1) -> Facts:
    """What /proc tells of a process; with `pidfd`, of the one behind that and no later one.

    Takes some 60 µs. Raises ProcessLookupError when it has ended, PermissionError.
    """
    try:
        # stands for this process alone, whatever its number comes to mean later
        folder = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, 0)
            return Facts(_status(folder), _namespaces(folder))
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None


def _status(folder: int) -> dict[str, str]:
    fd = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        text = os.read(fd, 1 << 16).decode("utf-8", "replace")
    finally:
        os.close(fd)
    return {name: value.strip() for name, _, value in (x.partition(":") for x in text.split("\n"))}


def _namespaces(folder: int) -> dict[str, str]:
    return {name: os.readlink(f"ns/{name}", dir_fd=folder) for name in KNOWN_NAMESPACES}


KNOWN_NAMESPACES = tuple(name for name in NAMESPACES if os.path.lexists(f"/proc/self/ns/{name}"))
"""Those that this Linux has."""


def broken(
    promise: Promise, found: Facts, server: Facts, others: Collection[str] = ()
) -> tuple[str, ...]:
    """What does not hold, in words; nothing when everything does.

    `others` are namespaces that the kernel may not share either.
    """
    status, wanted = found.status, []
    users, groups = set(status["Uid"].split()), set(status["Gid"].split())
    more = set(status["Groups"].split())
    if users != {str(promise.user.uid)} or groups != {str(promise.user.gid)}:
        ids = f"{' '.join(sorted(users))} (groups {' '.join(sorted(groups))})"
        wanted.append(f"it runs as host user {ids} instead of {promise.user.uid}")
    if more - _own_groups(promise.user):
        wanted.append(f"it is in the groups {' '.join(sorted(more))}")
    if held := found.capabilities & ~promise.capabilities:
        wanted.append(f"it has capabilities ({held:#x})")
    if status.get("NoNewPrivs") != "1":
        wanted.append("it may gain privileges (no_new_privs is not set)")
    least = promise.filters + (server.filters if promise.inherits else 0)
    if "Seccomp_filters" not in status:
        least = min(least, 1)
    if found.filters < least:
        wanted.append(f"it is under {found.filters} system call filters instead of {least}")
    shared = [
        name
        for name in promise.namespaces
        if name in found.namespaces
        and (
            found.namespaces[name] == server.namespaces.get(name)
            or found.namespaces[name] in others
        )
    ]
    if shared:
        wanted.append(f"it shares namespaces with others: {', '.join(shared)}")
    return tuple(wanted)


def user_of(identity: Identity | None) -> Identity:
    """Whom a kernel runs as: the server's own user where it has no identity to itself."""
    return identity or Identity(os.geteuid(), os.getegid())


def _own_groups(user: Identity) -> set[str]:
    """Groups that a kernel may be in: the server's own, which an ordinary user cannot give up."""
    if user.uid != os.geteuid() or user.uid == 0:
        return {str(user.gid)}
    return {str(user.gid), *map(str, os.getgroups())}
