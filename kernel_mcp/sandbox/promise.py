"""What a backend promises about a kernel's process, compared with /proc after every start.

The kernel is not asked: /proc shows what no process can forge about itself. Rules of filters and
of Landlock cannot be read there; the self-test tries those.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import field

from kernel_mcp.linux.folders import Identity
from kernel_mcp.records import dataclass
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
        """Whether it is in memory, in a file system that may be private."""
        return self.kind in _FLEETING

    @property
    def name(self) -> str:
        """The name of its file system, the same in every process."""
        return f"{self.kind}:[{self.device}]"

    def is_part_of(self, other: Mount) -> bool:
        """Return True if it shows at its place what another mount shows there."""
        below = self.place.removeprefix(f"{other.place}/")
        where = f"{other.root.rstrip('/')}/{below}"
        return below != self.place and (self.device, self.root) == (other.device, where)

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
    """Whether no mount covers one that this one is mounted on."""
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

    user          its host identity
    filters       system call filters, at least; with `inherits` the server's come on top
    namespaces    shared with no other process
    capabilities  bits that it may hold
    writable      the only mounts that can be written to, None for any
    parts_of      places of these whose parts may have mounts of their own, but not at those `fixed`
    scratch       file systems in memory, shared with no other process
    covered       places that a mount has to cover
    """

    user: Identity
    filters: int
    namespaces: tuple[str, ...] = ()
    capabilities: int = 0
    inherits: bool = True
    writable: frozenset[str] | None = None
    parts_of: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    scratch: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc tells of a process.

    status      the fields of that file
    namespaces  by kind
    mounts      those in sight, by place
    limits      hard resource limits by the names of that file, without unlimited ones
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
        """Names of its namespaces and of its file systems in memory, the same in any process.

        Other mounts do not count: engines mount what they make for containers on the host.
        """
        memory = (self.mounts.get(place) for place in SCRATCH)
        return {*self.namespaces.values(), *(mount.name for mount in memory if mount)}

    @property
    def writable(self) -> list[str]:
        """The mounts that can be written to, without single devices."""
        mounts = self.mounts.values()
        return sorted(one.place for one in mounts if one.writable and not one.is_a_device)

    def alone(self, promise: Promise) -> dict[str, str]:
        """What it has to have alone, by kind of namespace or place, as `held` names it."""
        spaces = {kind: self.namespaces.get(kind) for kind in promise.namespaces}
        memory = {place: self.mounts.get(place) for place in promise.scratch}
        return {
            **{kind: name for kind, name in spaces.items() if name},
            **{place: mount.name for place, mount in memory.items() if mount},
        }

    def words(self) -> tuple[str, ...]:
        """Its user, capabilities, privileges and filters, for people."""
        return (
            f"host user {self.status['Uid'].split()[0]}",
            f"capabilities: {self.capabilities:#x}" if self.capabilities else "no capabilities",
            "no new privileges" if self.status.get("NoNewPrivs") == "1" else "may gain privileges",
            f"system call filters: {self.filters}",
        )


def gainable(status: dict[str, str]) -> int:
    """The capabilities that a process holds or can come to hold, as bits.

    The bounding set, full for ordinary users, limits what execve(2) can give. With no_new_privs
    that is nothing, so the set is left out (capabilities(7)).
    """
    ineffective = ("CapBnd",) if status.get("NoNewPrivs") == "1" else ()
    found = 0
    for name in CAPABILITY_SETS:
        if name not in ineffective:
            found |= int(status.get(name, "ffffffffffffffff"), 16)
    return found


def read_facts(pid: int, pidfd: int = -1) -> Facts:
    """Read /proc of a process, with `pidfd` of no later one; takes some 0.2 ms.

    Raises ProcessLookupError when it has ended, PermissionError.
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
    except OSError as error:
        if error.errno in _ENDED:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
        raise


_ENDED = {errno.ENOENT, errno.EINVAL}
"""What /proc says of a process that is gone, and of its mounts before it is reaped."""


def _content(name: str, folder: int) -> str:
    """A file of /proc/PID; read(2) returns long ones in pieces of a page or more."""
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
    """What does not hold, in words; empty when all does.

    `others` are further names, as in `Facts.held`, that the kernel may not share. `ceilings`
    bound its resource limits, by the names of /proc/PID/limits.
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
    """Mounts that break the promise, in words."""
    told = []
    if promise.writable is not None and (more := _beyond(promise, found)):
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


def _beyond(promise: Promise, found: Facts) -> set[str]:
    """Return the mounts that can be written to and were not promised."""
    more = set(found.writable) - (promise.writable or frozenset())
    tops = [found.mounts[place] for place in promise.parts_of if place in found.mounts]
    parts = {
        place
        for place in more - promise.fixed
        if any(found.mounts[place].is_part_of(top) for top in tops)
    }
    return more - parts


def _unlimited(ceilings: Mapping[str, int], found: Facts) -> list[str]:
    """Which resource limits are lacking or too high, in words."""
    return [
        f"its limit “{name}” is {found.limits.get(name, 'lacking')} instead of at most {most}"
        for name, most in ceilings.items()
        if found.limits.get(name, most + 1) > most
    ]


def user_of(identity: Identity | None) -> Identity:
    """The user that a kernel runs as: the server's own without an identity."""
    return identity or Identity(os.geteuid(), os.getegid())


def _own_groups(user: Identity) -> set[str]:
    """Groups that a kernel may be in: its own, and those that an ordinary user cannot drop."""
    if user.uid != os.geteuid() or user.uid == 0:
        return {str(user.gid)}
    return {str(user.gid), *map(str, os.getgroups())}
