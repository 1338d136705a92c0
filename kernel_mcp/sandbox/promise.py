"""What a backend promises about a kernel's process, as far as Linux tells it to others in /proc.

A kernel is not asked: the server reads of it, after every start, what no process can tell wrongly
about itself. What a system call filter holds, and what Landlock allows, cannot be read; the
self-test tries it.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.mounts import SCRATCH

_DEVICE_FOLDERS = ("/dev/", "/proc/")
"""Where single devices are mounted: those of /dev, and /dev/null over files of /proc."""
_OF_DEVICES = ("devtmpfs", "tmpfs")
_FLEETING = ("devpts", "tmpfs")
"""File systems whose files are nowhere else."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One row of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    device    number of the file system, `major:minor`
    root      the folder or file of that file system which is shown
    place     where it is shown; blanks are in octal there
    kind      type of the file system
    """

    device: str
    root: str
    place: str
    kind: str
    writable: bool

    @property
    def is_fleeting(self) -> bool:
        """Whether what it shows is in memory, in a file system that may be nobody else's."""
        return self.kind in _FLEETING

    @property
    def name(self) -> str:
        """What stands for its file system, in any process."""
        return f"{self.kind}:[{self.device}]"

    @property
    def is_a_device(self) -> bool:
        """Whether it shows one device; writing to that changes no file."""
        single = self.root != "/" and self.place.startswith(_DEVICE_FOLDERS)
        return single and self.kind in _OF_DEVICES


def in_sight(table: str) -> dict[str, Mount]:
    """The mounts of a table by place, without those that others cover."""
    rows: dict[str, tuple[str, Mount]] = {}
    for line in table.splitlines():
        number, parent, device, root, place, options, *more = line.split(" ")
        kind = more[more.index("-") + 1]
        writable = "rw" in options.split(",")
        rows[number] = (parent, Mount(device, root, place, kind, writable))
    covered = {
        parent
        for parent, mount in rows.values()
        if parent in rows and rows[parent][1].place == mount.place
    }
    return {
        mount.place: mount
        for number, (_, mount) in rows.items()
        if number not in covered and _reachable(number, rows, covered)
    }


def _reachable(number: str, rows: dict[str, tuple[str, Mount]], covered: set[str]) -> bool:
    """Whether no mount lies over one that this one is mounted on."""
    parent, mount = rows[number]
    while parent in rows:
        above, below = rows[parent]
        if parent in covered and below.place != mount.place:
            return False
        parent, mount = above, below
    return True


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
    are the bits that it may hold. Where `writable` is given, no other place than these is a mount
    that can be written to; `scratch` are file systems in memory that nobody shares, and `covered`
    are places that something has to cover.
    """

    user: Identity
    filters: int
    namespaces: tuple[str, ...] = ()
    capabilities: int = 0
    inherits: bool = True
    writable: frozenset[str] | None = None
    scratch: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc tells of a process.

    status      the fields of that file
    namespaces  by kind
    mounts      those in sight, by place
    limits      the hard resource limits by the names of that file, but those without any
    """

    status: dict[str, str]
    namespaces: dict[str, str]
    mounts: dict[str, Mount] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

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

    @property
    def held(self) -> set[str]:
        """Names for its namespaces and for where it keeps files in memory, as in any process.

        Others of its mounts are no sign: engines mount what they make for containers on the host.
        """
        memory = (self.mounts.get(place) for place in SCRATCH)
        return {*self.namespaces.values(), *(mount.name for mount in memory if mount)}

    @property
    def writable(self) -> list[str]:
        """The mounts that can be written to, without single devices."""
        mounts = self.mounts.values()
        return sorted(one.place for one in mounts if one.writable and not one.is_a_device)

    def alone(self, promise: Promise) -> dict[str, str]:
        """What it may share with nobody, by kind of namespace or place, as `held` names it."""
        spaces = {kind: self.namespaces.get(kind) for kind in promise.namespaces}
        memory = {place: self.mounts.get(place) for place in promise.scratch}
        return {
            **{kind: name for kind, name in spaces.items() if name},
            **{place: mount.name for place, mount in memory.items() if mount},
        }

    def words(self) -> tuple[str, ...]:
        """What is told of it to people."""
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

    Takes some 0.2 ms. Raises ProcessLookupError when it has ended, PermissionError.
    """
    try:
        # stands for this process alone, whatever its number comes to mean later
        folder = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, 0)
            return Facts(
                status=_status(folder),
                namespaces=_namespaces(folder),
                mounts=in_sight(_content("mountinfo", folder)),
                limits=_limits(folder),
            )
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None


def _content(name: str, folder: int) -> str:
    """A file of a process; Linux makes those of some length in pieces of a page or more."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        pieces = []
        while piece := os.read(fd, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _status(folder: int) -> dict[str, str]:
    lines = _content("status", folder).split("\n")
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _limits(folder: int) -> dict[str, int]:
    """The third column of the table, whose columns have fixed widths."""
    lines = _content("limits", folder).splitlines()[1:]
    rows = ((line[:26].strip(), line[47:68].strip()) for line in lines)
    return {name: int(hard) for name, hard in rows if hard.isdigit()}


def _namespaces(folder: int) -> dict[str, str]:
    return {name: os.readlink(f"ns/{name}", dir_fd=folder) for name in KNOWN_NAMESPACES}


KNOWN_NAMESPACES = tuple(name for name in NAMESPACES if os.path.lexists(f"/proc/self/ns/{name}"))
"""Those that this Linux has."""


def broken(
    promise: Promise,
    found: Facts,
    server: Facts,
    others: Collection[str] = (),
    ceilings: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """What does not hold, in words; nothing when everything does.

    `others` are names, as in `Facts.held`, of what the kernel may not share either. `ceilings` are
    the most that its resource limits may be, by the names of /proc/PID/limits.
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
    taken = {*server.held, *others}
    shared = [kind for kind, name in found.alone(promise).items() if name in taken]
    if shared:
        wanted.append(f"it shares namespaces with others: {', '.join(shared)}")
    return (*wanted, *_open_places(promise, found), *_unlimited(ceilings or {}, found))


def _open_places(promise: Promise, found: Facts) -> list[str]:
    """What is not as promised about its files, in words."""
    told = []
    if promise.writable is not None and (more := set(found.writable) - promise.writable):
        told.append(f"it may write to {', '.join(sorted(more))}")
    common = [
        place
        for place in promise.scratch
        if place not in found.mounts or not found.mounts[place].is_fleeting
    ]
    if common:
        told.append(f"it has no {' and no '.join(common)} of its own")
    if bare := [place for place in promise.covered if place not in found.mounts]:
        told.append(f"nothing covers {', '.join(bare)}")
    return told


def _unlimited(ceilings: Mapping[str, int], found: Facts) -> list[str]:
    """Which resource limits are lacking or too high, in words."""
    return [
        f"its limit “{name}” is {found.limits.get(name, 'lacking')} instead of at most {most}"
        for name, most in ceilings.items()
        if found.limits.get(name, most + 1) > most
    ]


def user_of(identity: Identity | None) -> Identity:
    """Whom a kernel runs as: the server's own user where it has no identity to itself."""
    return identity or Identity(os.geteuid(), os.getegid())


def _own_groups(user: Identity) -> set[str]:
    """Groups that a kernel may be in: the server's own, which an ordinary user cannot give up."""
    if user.uid != os.geteuid() or user.uid == 0:
        return {str(user.gid)}
    return {str(user.gid), *map(str, os.getgroups())}
