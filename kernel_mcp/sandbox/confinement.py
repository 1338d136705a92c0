"""The expected confinement of a kernel's process, compared with /proc after every start.

A process cannot forge its entries in /proc, so nothing depends on the kernel itself. The rules of
filters and of Landlock are not visible there; the self-test tries those.
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
"""Folders with mounts of single devices: those of /dev, and /dev/null over files of /proc."""
_OF_DEVICES = ("devtmpfs", "tmpfs")
_FLEETING = ("devpts", "tmpfs")
"""Types of file systems: those that device mounts may have, and those in memory."""


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One row of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    device    number of the file system, `major:minor`
    root      the folder or file of that file system that is mounted
    place     mount point; blanks are escaped in octal
    kind      type of the file system
    """

    device: str
    root: str
    place: str
    kind: str
    writable: bool

    @property
    def is_fleeting(self) -> bool:
        """Return True if its file system is in memory and may be private to a sandbox."""
        return self.kind in _FLEETING

    @property
    def name(self) -> str:
        """Name of its file system, the same in every process."""
        return f"{self.kind}:[{self.device}]"

    def is_part_of(self, other: MountInfo) -> bool:
        """Return True if it is below `other` and shows the same files as `other` does there."""
        below = self.place.removeprefix(f"{other.place}/")
        where = f"{other.root.rstrip('/')}/{below}"
        return below != self.place and (self.device, self.root) == (other.device, where)

    @property
    def is_a_device(self) -> bool:
        """Return True if it is the mount of a single device: writing to it changes no file."""
        single = self.root != "/" and self.place.startswith(_DEVICE_FOLDERS)
        return single and self.kind in _OF_DEVICES


def visible_mounts(table: str) -> dict[str, MountInfo]:
    """Return the visible mounts of a mountinfo table by mount point; hidden ones are left out."""
    rows: dict[str, tuple[str, MountInfo]] = {}
    for line in table.splitlines():
        number, parent, device, root, place, options, *more = line.split(" ")
        kind = more[more.index("-") + 1]
        writable = "rw" in options.split(",")
        rows[number] = (parent, MountInfo(device, root, place, kind, writable))
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


def _reachable(number: str, rows: dict[str, tuple[str, MountInfo]], covered: set[str]) -> bool:
    """Return True unless a mount on the path to this one is hidden by another mount."""
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
class ExpectedConfinement:
    """The confinement of a kernel that /proc must show.

    user          its host identity
    filters       minimum number of system call filters; with `inherits` the server's are added
    namespaces    kinds of namespaces that it shares with no other process
    capabilities  bits that it may hold
    writable      mount points of the only writable mounts, None for any
    parts_of      those below which parts of the same mount may be mounted again
    fixed         mount points that are never such a part
    scratch       mount points of file systems in memory, shared with no other process
    covered       paths that a mount must hide
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
class ObservedConfinement:
    """The content of /proc about a process.

    status      fields of the file `status`
    namespaces  names by kind
    mounts      visible mounts, by mount point
    limits      hard resource limits, as the file `limits` names them, without unlimited ones
    """

    status: dict[str, str]
    namespaces: dict[str, str]
    mounts: dict[str, MountInfo] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def filters(self) -> int:
        """Number of its system call filters; before Linux 5.9, 1 for one or more."""
        if self.status.get("Seccomp") != FILTER_MODE:
            return 0
        return int(self.status.get("Seccomp_filters", "1"))

    @property
    def parent(self) -> int:
        """Process id of its parent."""
        return int(self.status["PPid"])

    @property
    def capabilities(self) -> int:
        """Bits of all capabilities that it holds or can gain."""
        return gainable(self.status)

    @property
    def held(self) -> set[str]:
        """Names of its namespaces and of its file systems in memory, the same in any process.

        Other mounts do not count: container engines mount their files on the host.
        """
        memory = (self.mounts.get(place) for place in SCRATCH)
        return {*self.namespaces.values(), *(mount.name for mount in memory if mount)}

    @property
    def writable(self) -> list[str]:
        """Mount points of the writable mounts, without single devices."""
        mounts = self.mounts.values()
        return sorted(one.place for one in mounts if one.writable and not one.is_a_device)

    def alone(self, expected: ExpectedConfinement) -> dict[str, str]:
        """Return the namespaces and file systems that it must not share, by kind or mount point.

        Their names are those of `held`.
        """
        spaces = {kind: self.namespaces.get(kind) for kind in expected.namespaces}
        memory = {place: self.mounts.get(place) for place in expected.scratch}
        return {
            **{kind: name for kind, name in spaces.items() if name},
            **{place: mount.name for place, mount in memory.items() if mount},
        }

    def words(self) -> tuple[str, ...]:
        """Return its user, capabilities, privileges and filters as readable phrases."""
        return (
            f"host user {self.status['Uid'].split()[0]}",
            f"capabilities: {self.capabilities:#x}" if self.capabilities else "no capabilities",
            "no new privileges" if self.status.get("NoNewPrivs") == "1" else "may gain privileges",
            f"system call filters: {self.filters}",
        )


def gainable(status: dict[str, str]) -> int:
    """Return the bits of all capabilities that a process holds or can gain.

    The bounding set, full for ordinary users, limits what execve(2) can give. With no_new_privs
    that is nothing, so the set is left out (capabilities(7)).
    """
    ineffective = ("CapBnd",) if status.get("NoNewPrivs") == "1" else ()
    found = 0
    for name in CAPABILITY_SETS:
        if name not in ineffective:
            found |= int(status.get(name, "ffffffffffffffff"), 16)
    return found


def observe(pid: int, pidfd: int = -1) -> ObservedConfinement:
    """Read /proc of a process; takes some 0.2 ms.

    `pidfd` detects that `pid` was reused. Raises ProcessLookupError if the process has ended, and
    PermissionError.
    """
    try:
        # refers to this process only, even if the pid is reused later
        folder = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, 0)
            return ObservedConfinement(
                status=_status(folder),
                namespaces=_namespaces(folder),
                mounts=visible_mounts(_content("mountinfo", folder)),
                limits=_limits(folder),
            )
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in _ENDED:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
        raise


_ENDED = {errno.ENOENT, errno.EINVAL}
"""Errors of /proc for an ended process; for the mounts of one that is not reaped yet, EINVAL."""


def _content(name: str, folder: int) -> str:
    """Return the content of a file of /proc/PID; each read(2) returns little more than a page."""
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
    """Return the hard limits by name: the third column of a table with fixed column widths."""
    lines = _content("limits", folder).splitlines()[1:]
    rows = ((line[:26].strip(), line[47:68].strip()) for line in lines)
    return {name: int(hard) for name, hard in rows if hard.isdigit()}


def _namespaces(folder: int) -> dict[str, str]:
    return {name: os.readlink(f"ns/{name}", dir_fd=folder) for name in KNOWN_NAMESPACES}


KNOWN_NAMESPACES = tuple(name for name in NAMESPACES if os.path.lexists(f"/proc/self/ns/{name}"))
"""Kinds of namespaces that the running Linux supports."""


def violations(
    expected: ExpectedConfinement,
    found: ObservedConfinement,
    server: ObservedConfinement,
    others: Collection[str] = (),
    ceilings: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """Return the violations of an expected confinement as phrases; empty for none.

    `others` are names, as in `ObservedConfinement.held`, of other kernels' namespaces, which this
    kernel may not share. `ceilings` are upper bounds of its resource limits, by the names of
    /proc/PID/limits.
    """
    status, wanted = found.status, []
    users, groups = set(status["Uid"].split()), set(status["Gid"].split())
    more = set(status["Groups"].split())
    if users != {str(expected.user.uid)} or groups != {str(expected.user.gid)}:
        ids = f"{' '.join(sorted(users))} (groups {' '.join(sorted(groups))})"
        wanted.append(f"it runs as host user {ids} instead of {expected.user.uid}")
    if more - _own_groups(expected.user):
        wanted.append(f"it is in the groups {' '.join(sorted(more))}")
    if held := found.capabilities & ~expected.capabilities:
        wanted.append(f"it has capabilities ({held:#x})")
    if status.get("NoNewPrivs") != "1":
        wanted.append("it may gain privileges (no_new_privs is not set)")
    least = expected.filters + (server.filters if expected.inherits else 0)
    if "Seccomp_filters" not in status:
        least = min(least, 1)
    if found.filters < least:
        wanted.append(f"it is under {found.filters} system call filters instead of {least}")
    taken = {*server.held, *others}
    shared = [kind for kind, name in found.alone(expected).items() if name in taken]
    if shared:
        wanted.append(f"it shares namespaces with others: {', '.join(shared)}")
    return (*wanted, *_open_places(expected, found), *_unlimited(ceilings or {}, found))


def _open_places(expected: ExpectedConfinement, found: ObservedConfinement) -> list[str]:
    """Return the violations by mounts, as phrases."""
    told = []
    if expected.writable is not None and (more := _beyond(expected, found)):
        told.append(f"it may write to {', '.join(sorted(more))}")
    common = [
        place
        for place in expected.scratch
        if place not in found.mounts or not found.mounts[place].is_fleeting
    ]
    if common:
        told.append(f"it has no {' and no '.join(common)} of its own")
    if bare := [place for place in expected.covered if place not in found.mounts]:
        told.append(f"nothing covers {', '.join(bare)}")
    return told


def _beyond(expected: ExpectedConfinement, found: ObservedConfinement) -> set[str]:
    """Return the mount points that are writable but must not be."""
    more = set(found.writable) - (expected.writable or frozenset())
    tops = [found.mounts[place] for place in expected.parts_of if place in found.mounts]
    parts = {
        place
        for place in more - expected.fixed
        if any(found.mounts[place].is_part_of(top) for top in tops)
    }
    return more - parts


def _unlimited(ceilings: Mapping[str, int], found: ObservedConfinement) -> list[str]:
    """Return the resource limits that are missing or too high, as phrases."""
    return [
        f"its limit “{name}” is {found.limits.get(name, 'lacking')} instead of at most {most}"
        for name, most in ceilings.items()
        if found.limits.get(name, most + 1) > most
    ]


def user_of(identity: Identity | None) -> Identity:
    """Return the user that a kernel runs as: the server's own without an identity."""
    return identity or Identity(os.geteuid(), os.getegid())


def _own_groups(user: Identity) -> set[str]:
    """Return the groups that a kernel may be in: its own, and those that a user cannot drop."""
    if user.uid != os.geteuid() or user.uid == 0:
        return {str(user.gid)}
    return {str(user.gid), *map(str, os.getgroups())}
