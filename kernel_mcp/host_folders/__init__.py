"""Check the folders and devices of the host that the operator exposes to sessions."""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import secrets
from kernel_mcp.records import dataclass
from kernel_specs.landlock import calls

MOST_MOUNTS = 40
"""Maximum number of mounts; their descriptors are sent to a template in one message."""
_CLOSED = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/run", "/sbin", "/sys", "/usr", "/var/run"),
)
"""System folders; they and everything below them are refused."""
_SHARED = (
    *("/", "/home", "/lost+found", "/opt", "/root", "/tmp", "/var"),
    *("/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/tmp"),
)
"""Folders of all users and programs: refused themselves, but their entries may be mounted."""
_DRIVERS = ("/usr/local/nvidia", "/usr/lib64-nvidia", "/usr/lib/wsl")
"""Folders of GPU drivers, the only system folders allowed: read-only and at their own path."""
_TAKEN = ("/opt/kernel_specs", "/packages", "/sessions", "/workspace", *_CLOSED)
"""Paths in the sandbox that the sandbox itself uses."""
logger = logging.getLogger(__name__)

_LEAST_ABI = 2
"""The first ABI of Landlock that can allow files to be moved to other folders."""
_FIRST_USER, _NOBODY = 1000, 65534
NO_EFFECT = "without a sandbox it has no effect: code has all files of this user where they are"


def exposed_mounts(settings: Settings, sandbox: str, state: Path, cache: Path) -> tuple[Mount, ...]:
    """Return the mounts of a server as `checked` does; none without a sandbox.

    `state` and `cache` are the server's own folders. Raises ConfigError, also for a mount that this
    sandbox cannot provide.
    """
    if settings.mounts and sandbox == "none":
        logger.warning("--mount: %s", NO_EFFECT)
        return ()
    mounts = settings.mounts
    if sandbox == "landlock":
        for mount in mounts:
            _at_its_place(mount)
        # nothing can be made beside what is covered there, so no session begins in one
        mounts = tuple(replace(mount, first=False) for mount in mounts)
    if any(mount.strict for mount in mounts):
        _require_landlock()
    own = [
        ("the folder of environments", settings.cache_dir or cache),
        ("the folder for state", state),
        ("the folder for state", settings.state_dir),
        ("the folder of workspaces", settings.workspace),
        ("the audit log", settings.audit_log),
    ]
    return checked(mounts, [(words, place) for words, place in own if place is not None])


def checked(mounts: Iterable[Mount], own: Iterable[tuple[str, Path]]) -> tuple[Mount, ...]:
    """Return these mounts, outer ones first. Raises ConfigError for one that is not permitted.

    `own`: (description, path) pairs of the server's own folders.
    """
    found: dict[str, Mount] = {}
    for mount in mounts:
        guest = os.path.normpath("/" + mount.guest.strip("/"))
        asked = replace(mount, guest=guest)
        if reason := _refusal(asked, own):
            raise ConfigError(f"--mount {mount.host}: {reason}")
        if guest in found:
            raise ConfigError(f"--mount {mount.host}: {found[guest].host} has that place already")
        found[guest] = asked
    if len(found) > MOST_MOUNTS:
        raise ConfigError(f"--mount: there may be {MOST_MOUNTS} of them, not {len(found)}")
    for mount in found.values():
        around = [each for each in found.values() if within(mount.guest, (each.guest,))]
        around = sorted(around, key=lambda each: len(each.guest))[:-1]  # without the mount itself
        if around and (reason := _no_place(mount, around[-1])):
            raise ConfigError(f"--mount {mount}: {reason}")
        if mount.strict and not all(each.strict for each in around):
            raise ConfigError(f"--mount {mount}: what it is in has to be strict, too: {around[0]}")
    return tuple(sorted(found.values(), key=lambda mount: mount.guest.count("/")))


def _no_place(mount: Mount, outer: Mount) -> str:
    """Return the reason why a mount cannot lie in another one; empty when it can."""
    parts = Path(mount.guest).relative_to(outer.guest).parts
    place = outer.host.joinpath(*parts)
    instead = f"give it another place, as in {mount.host}:/data"
    for end in range(1, len(parts)):
        if secrets.secret(parts[:end], stat.S_IFDIR):
            folder = "/".join(parts[:end])
            return f"{folder} in {outer.host} is covered, so that nothing can be in it: {instead}"
    if os.path.realpath(place) != str(place) or not place.exists():
        return f"{outer.host} has no {'/'.join(parts)}, and nothing is made there: {instead}"
    if place.is_dir() != mount.host.is_dir():
        return f"of it and {place} one is a folder and the other is not: {instead}"
    return ""


def _at_its_place(mount: Mount) -> None:
    """Raise ConfigError for a mount that Landlock cannot provide.

    That is one at another path, or a writable one whose sessions run as other users.
    """
    if os.path.realpath(mount.guest) != str(mount.host):
        raise ConfigError(
            f"--mount {mount}: under Landlock a folder is seen where it is, at {mount.host}; leave "
            f"{mount.guest} out, or take --sandbox bwrap"
        )
    if mount.writable and os.geteuid() == 0:
        raise ConfigError(
            f"--mount {mount}: under Landlock the sessions of a root server have users of their "
            "own, who may not write there, and what they made would be theirs. Mount it read-only, "
            "start the server as the folder's owner, or take --sandbox bwrap"
        )


def _require_landlock() -> None:
    """Raise ConfigError where Linux has no Landlock that lets files be moved (ABI 2)."""
    try:
        found = calls.version()
    except OSError as reason:
        found, why = 0, str(reason)
    else:
        why = f"here it has ABI {found}"
    if found < _LEAST_ABI:
        raise ConfigError(
            f"--mount …:strict: it takes Landlock (ABI {_LEAST_ABI}, Linux 5.19; {why}). Leave "
            "strict out: secrets are covered then, too, but what replaces one shows for some "
            "milliseconds"
        )


def _refusal(mount: Mount, own: Iterable[tuple[str, Path]]) -> str:
    """Return the reason for refusing a mount; empty when it is permitted."""
    host, guest = str(mount.host), mount.guest
    if not os.path.exists(host):  # noqa: PTH110  # pathlib raises where this user may not look
        return "there is no such folder or file; make it, or name another, best by its whole path"
    if not (mount.host.is_dir() or mount.host.is_file()):
        return "it is neither a folder nor a regular file"
    if not os.access(mount.host, os.R_OK):
        return "this server's user may not read it"
    if host in _SHARED or _same(host) & _identities(_SHARED):
        return "it is no folder of one project; name what is needed in it"
    around = _around(host)
    if within(host, _DRIVERS) and guest == host and not mount.writable:
        return ""
    if within(host, _CLOSED) or around & _identities(_CLOSED):
        return "it belongs to the system"
    for home in _homes():
        if within(home, (host,)) or _same(host) & _around(home):
            return (
                f"it is, or holds, the home folder {home}, with keys and settings of all kinds; "
                "name what is needed in it"
            )
    if mount.host.is_dir() and (folder := secrets.secret_folder(mount.host.parts[1:])):
        return (
            f"/{secrets.readable(folder)} is a folder of secrets, which no flag shows; mount the "
            "one file in it that is needed, by its name"
        )
    for words, place in own:
        real = os.path.realpath(place)
        inside = within(host, (real,)) or within(real, (host,))
        if inside or around & _same(real) or _same(host) & _around(real):
            return f"{words} {real} and it lie in one another; choose another place for one of them"
    if mount.strict and within(guest, ("/tmp",)):
        return f"{guest} cannot be strict, as code may write beside it; name it as in {host}:/data"
    if guest in ("/", "/tmp", "/opt") or within(guest, _TAKEN):
        return f"{guest} is a place of the sandbox itself; give another, as in {host}:/data"
    return ""


def _same(path: str) -> set[tuple[int, int]]:
    """Return {(device, inode)} of a path; empty if the path is missing.

    Bind mounts do not change either number. `_around` adds the folders above the path.
    """
    return _identities((path,))


def _around(path: str) -> set[tuple[int, int]]:
    return _identities((path, *map(str, Path(path).parents)))


def _identities(paths: Iterable[str]) -> set[tuple[int, int]]:
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            info = os.stat(path)  # noqa: PTH116
            found.add((info.st_dev, info.st_ino))
    return found


def within(path: str, folders: Sequence[str]) -> bool:
    """Return True if a path is one of `folders` or below one."""
    return any(path == each or path.startswith(f"{each.rstrip('/')}/") for each in folders)


def _homes() -> set[str]:
    """Return the resolved home folders of ordinary users, root and this server's user."""
    found = {
        user.pw_dir
        for user in pwd.getpwall()
        if user.pw_uid in (0, os.geteuid()) or _FIRST_USER <= user.pw_uid < _NOBODY
    }
    found.add(os.environ.get("HOME", ""))
    return {os.path.realpath(home) for home in found if home.startswith("/") and home != "/"}


# Devices that the operator lets code use. Their drivers run in the host's kernel, so devices that
# expose or change the data of others are refused, whatever their names.
_PLAIN = {(1, minor) for minor in (3, 5, 7, 8, 9)}
"""null, zero, full, random and urandom, which every kernel has."""
_REFUSED_MAJORS = {
    1: "memory or the log of the host",
    4: "a terminal",
    5: "a terminal",
    7: "the screen of a console",
    13: "keyboards and pointers of the host",
    21: "a disk of the host",
    162: "a disk of the host",
    202: "registers of the processors",
    203: "registers of the processors",
    **dict.fromkeys(range(136, 144), "a terminal"),
}
_REFUSED_CLASSES = {
    "tty": "a terminal",
    "vc": "the screen of a console",
    "mem": "memory or the log of the host",
    "input": "keyboards and pointers of the host",
    "hidraw": "keyboards and pointers of the host",
    **dict.fromkeys(("bsg", "scsi_generic", "nvme", "nvme-generic", "raw"), "a disk of the host"),
    **dict.fromkeys(("mtd", "watchdog", "msr", "cpuid"), "hardware that the host runs on"),
}
_REFUSED_NAMES = {
    **dict.fromkeys(("loop-control", "mapper/control", "btrfs-control"), "disks of the host"),
    **dict.fromkeys(("uinput", "uhid"), "keyboards and pointers of the host"),
    **dict.fromkeys(("autofs", "cuse", "snapshot", "userfaultfd"), "a part of the host's kernel"),
    **dict.fromkeys(("mcelog", "nvram", "vga_arbiter"), "hardware that the host runs on"),
}


NVIDIA = ("/dev/nvidia", "/dev/dxg")
"""Path prefixes of NVIDIA's devices; the second is for WSL."""


@dataclass(frozen=True, slots=True)
class Device:
    """A character device that kernels find at `guest`.

    source  the node that is bound: for a root server's kernels a copy that their users may open
    rights  limits on its use, as text; empty for none
    """

    source: Path
    guest: str
    rights: str = ""

    def __str__(self) -> str:
        """Return path and limits of use, for people."""
        return f"{self.guest}{self.rights and ': '}{self.rights}"

    @property
    def names_threads(self) -> bool:
        """Return True if the driver must name its own threads in /proc, as CUDA's."""
        return self.guest.startswith(NVIDIA)


_NO_THREADS = "CUDA does not start, as code under Landlock cannot name its threads in /proc"


def usable_devices(paths: Iterable[Path], folder: Path, sandbox: str) -> tuple[Device, ...]:
    """Return the devices of `--device`; `folder` belongs to the server. Raises ConfigError."""
    found = []
    for number, path in enumerate(dict.fromkeys(paths)):
        if reason := _unfit_device(path):
            raise ConfigError(f"--device {path}: {reason}")
        device = _opened_to_kernels(path, folder / f"device-{number}", sandbox)
        if sandbox == "landlock" and device.names_threads:
            device = replace(device, rights=_NO_THREADS)
        if device.rights:
            logger.warning("--device %s.", device)
        found.append(device)
    return tuple(found)


def _unfit_device(path: Path) -> str:
    """Return the reason for refusing a device; empty when kernels may use it."""
    try:
        info = path.lstat()
    except OSError as reason:
        return (
            f"it cannot be had: {reason.strerror}. `ls -l {path.parent}` shows what is there; a "
            "device appears when its driver is loaded"
        )
    if stat.S_ISLNK(info.st_mode) or path.resolve() != path:
        return f"it is a link, or below one: name the device itself, {path.resolve()}"
    if stat.S_ISBLK(info.st_mode):
        return "it is a block device: show its files with --mount"
    if stat.S_ISDIR(info.st_mode):
        return "it is a folder: name each device in it that is needed"
    if not stat.S_ISCHR(info.st_mode):
        return "it is no device; --mount shows files and folders"
    if not path.is_relative_to("/dev"):
        return "it lies outside of /dev, where kernels would not look for a device"
    number = (os.major(info.st_rdev), os.minor(info.st_rdev))
    if number in _PLAIN:
        return ""
    facts = Path("/sys/dev/char", "{}:{}".format(*number))
    kind = (facts / "subsystem").resolve().name
    with contextlib.suppress(OSError):
        for line in (facts / "uevent").read_text().splitlines():
            name = line.removeprefix("DEVNAME=")
            if name != line and name in _REFUSED_NAMES:
                return f"it is {_REFUSED_NAMES[name]}, which no session may use"
    what = _REFUSED_MAJORS.get(number[0]) or _REFUSED_CLASSES.get(kind)
    return f"it is {what}, which no session may use" if what else ""


def _opened_to_kernels(path: Path, copy: Path, sandbox: str) -> Device:
    """Return the device for kernels: itself, or a copy of its node that their users may open.

    Raises ConfigError if kernels could not use it.
    """
    info = path.lstat()
    everyone = info.st_mode & 0o006 == 0o006
    if everyone or (os.geteuid() != 0 and os.access(path, os.R_OK | os.W_OK)):
        return Device(path, str(path))
    if os.geteuid() != 0:
        if not (os.access(path, os.R_OK) or os.access(path, os.W_OK)):
            why = "this server's user may neither read nor write it"
            raise ConfigError(f"--device {path}: {why}. {_allowing(path, info)}")
        return Device(path, str(path), "this server's user may not both read and write it")
    try:
        if sandbox in ("bwrap", "container") and not os.statvfs(copy.parent).f_flag & os.ST_NODEV:
            os.mknod(copy, 0o600 | stat.S_IFCHR, info.st_rdev)
            copy.chmod(0o666)  # only the server may enter its folder
            return Device(copy, str(path))
    except PermissionError:  # root without CAP_MKNOD, as in containers
        pass
    except OSError as reason:
        raise ConfigError(f"--device {path}: no copy of it can be made: {reason}") from reason
    rights = f"code has the rights of every user, and its mode is {stat.S_IMODE(info.st_mode):04o}"
    if sandbox != "none" and not info.st_mode & 0o006:
        raise ConfigError(f"--device {path}: {rights}. {_allowing(path, info)}")
    return Device(path, str(path), "" if sandbox == "none" else rights)


def _allowing(path: Path, info: os.stat_result) -> str:
    """Return the step by which the operator lets kernels open a device."""
    step = f"Allow it with `chmod o+rw {path}`"
    if not info.st_gid or not info.st_mode & 0o060:
        return step
    try:
        group = grp.getgrgid(info.st_gid).gr_name
    except KeyError:
        group = str(info.st_gid)
    return f"{step}, or start the server as an ordinary user of the group {group}"
