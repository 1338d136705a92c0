"""What the mount table of a process tells about the files that it can write to."""

from __future__ import annotations

from dataclasses import dataclass

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
