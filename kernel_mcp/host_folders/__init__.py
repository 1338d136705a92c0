"""Folders of the host that the operator shows to sessions: which may be, and what is left out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import Mount
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import secrets

MOST_MOUNTS = 40
"""Their descriptors travel to a template in one message."""
_CLOSED = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/run", "/sbin", "/sys", "/usr", "/var/run"),
)
"""The system's, with all below."""
_SHARED = (
    *("/", "/home", "/lost+found", "/opt", "/root", "/tmp", "/var"),
    *("/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/tmp"),
)
"""Folders of all users and programs; what is in them may be shown by its own name."""
_TAKEN = ("/opt/kernel_specs", "/packages", "/sessions", "/workspace", *_CLOSED)
"""Places of the sandbox itself."""
_PACKAGE = Path(__file__).parents[1]
_SHOWN = 8
"""Covered paths that are listed by name."""
_FIRST_USER, _NOBODY = 1000, 65534


def shown_folders(settings: Settings, sandbox: str, state: Path, cache: Path) -> tuple[Mount, ...]:
    """The mounts of a server as `checked`; `state` and `cache` are folders of its own.

    Raises ConfigError, also for what this sandbox cannot show.
    """
    if settings.mounts and sandbox != "bwrap":
        raise ConfigError(
            f"--mount: folders are shown with --sandbox bwrap only, not with {sandbox}"
        )
    for mount in settings.mounts:
        if mount.mode == "strict":
            raise ConfigError(f"--mount {mount}: strict is not there yet; leave it out")
        if held := _held_program(mount):
            raise ConfigError(
                f"--mount {mount}: code could change {held}, which this server runs; leave rw out"
            )
    own = [
        ("the folder of environments", settings.cache_dir or cache),
        ("the folder for state", state),
        ("the folder for state", settings.state_dir),
        ("the folder of workspaces", settings.workspace),
        ("the audit log", settings.audit_log),
    ]
    return checked(settings.mounts, [(words, place) for words, place in own if place is not None])


def _held_program(mount: Mount) -> str:
    """What the server itself runs, where it lies in a writable mount; empty for none.

    Virtual environments stay as they are below such a mount.
    """
    package, prefix = os.path.realpath(_PACKAGE), os.path.realpath(sys.prefix)
    firm = sys.prefix != sys.base_prefix and within(package, (prefix,))
    places = (*(() if firm else (package,)), os.path.realpath(sys.base_prefix))
    if not mount.writable:
        return ""
    return next((place for place in places if within(place, (str(mount.host),))), "")


def checked(mounts: Iterable[Mount], own: Iterable[tuple[str, Path]]) -> tuple[Mount, ...]:
    """These mounts, outer ones first. Raises ConfigError for what may not be shown.

    `own` are the server's places, each after the words for it.
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
    for inner in found.values():
        for outer in found.values():
            if _could_be_moved(inner, outer):
                raise ConfigError(
                    f"--mount {inner.host}: code that may write to {outer.host} could put a link "
                    f"in its place; show {outer.host} without rw, or only what is right in it"
                )
    if len(found) > MOST_MOUNTS:
        raise ConfigError(f"--mount: there may be {MOST_MOUNTS} of them, not {len(found)}")
    return tuple(sorted(found.values(), key=lambda mount: mount.guest.count("/")))


def _refusal(mount: Mount, own: Iterable[tuple[str, Path]]) -> str:
    """Why a mount may not be; empty when it may."""
    host, guest = str(mount.host), mount.guest
    if not mount.host.exists():
        return "there is no such folder or file"
    if not (mount.host.is_dir() or mount.host.is_file()):
        return "it is neither a folder nor a regular file"
    if not os.access(mount.host, os.R_OK):
        return "this server's user may not read it"
    if host in _SHARED:
        return "it is no folder of one project; name what is needed in it"
    if within(host, _CLOSED):
        return "it belongs to the system"
    for home in _homes():
        if within(home, (host,)):
            return (
                f"it is, or holds, the home folder {home}, with keys and settings of all kinds; "
                "name what is needed in it"
            )
    for words, place in own:
        real = os.path.realpath(place)
        if within(host, (real,)) or within(real, (host,)):
            return f"{words} {real} and it lie in one another; choose another place for one of them"
    if guest in ("/", "/tmp", "/opt") or within(guest, _TAKEN):
        return f"{guest} is a place of the sandbox itself; give another, as in {host}:/data"
    return ""


def _could_be_moved(inner: Mount, outer: Mount) -> bool:
    """Whether code may replace the folder of a mount by way of another, writable one.

    What is mounted in its own place cannot be, nor what is in a fixed folder: rename(2) of what is
    mounted on fails (EBUSY).
    """
    host, above = str(inner.host), str(outer.host)
    if not outer.writable or host == above or not within(host, (above,)):
        return False
    rest = os.path.relpath(host, above)
    top = rest.split("/", 1)[0]
    firm = top == rest or secrets.executed_by_name((top,))
    return not firm or inner.guest != f"{outer.guest.rstrip('/')}/{rest}"


def within(path: str, folders: Sequence[str]) -> bool:
    """Whether a path is one of `folders` or below one."""
    return any(path == each or path.startswith(f"{each.rstrip('/')}/") for each in folders)


def _homes() -> set[str]:
    """Home folders of people, root's and this user's."""
    found = {
        user.pw_dir
        for user in pwd.getpwall()
        if user.pw_uid in (0, os.geteuid()) or _FIRST_USER <= user.pw_uid < _NOBODY
    }
    found.add(os.environ.get("HOME", ""))
    return {os.path.realpath(home) for home in found if home.startswith("/") and home != "/"}


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Shown:
    """One mount as file tools use it, on the side of the host: with the same covers.

    place   device and inode of the folder that was walked
    covers  kinds by path below it; `inodes` are those of what is covered
    mapped  whether kernels of a root server see it with the rights of its owner
    appeared  what hosts execute of a writable one and was not there at the server's start
    """

    mount: Mount
    place: tuple[int, int] = (0, 0)
    covers: dict[tuple[str, ...], str] = field(default_factory=dict)
    inodes: set[tuple[int, int]] = field(default_factory=set)
    mapped: bool = True
    appeared: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """For people: where it is, whether it can be changed, and the first of what is covered."""
        host = "" if str(self.mount.host) == self.mount.guest else f" (of {self.mount.host})"
        how = {"rw": "can be changed, outside --disk", "strict": "read-only, strict"}
        covered = self._named("covered", secrets.HIDING) + self._named("fixed", {secrets.FIXED})
        if self.appeared:
            covered += f"; appeared, and the host may execute it: {', '.join(self.appeared)}"
        rights = "" if self.mapped else "; only what every user may read"
        return f"{self.mount.guest}{host}: {how.get(self.mount.mode, 'read-only')}{rights}{covered}"

    def _named(self, word: str, kinds: Collection[str]) -> str:
        paths = [path for path, kind in self.covers.items() if kind in kinds]
        names = [secrets.readable(path) for path in sorted(paths, key=len)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"; {word}: {', '.join(names[:_SHOWN])}{more}" if names else ""

    @property
    def single(self) -> bool:
        """Whether it is one file."""
        return not self.mount.host.is_dir()

    def parts(self, path: str) -> tuple[str, ...] | None:
        """The path below it that an absolute one means, normalised; None for one elsewhere."""
        if not within(path, (self.mount.guest,)):
            return None
        return tuple(Path(path).relative_to(self.mount.guest).parts)

    def covers_path(self, root: int, parts: tuple[str, ...]) -> bool:
        """Whether a path is covered, by any part of it, below the open folder `root`."""
        if self.single:
            return False
        if secrets.HIDING.intersection(self._kinds(parts)):
            return True
        if not parts or secrets.secret_by_name(parts):
            return bool(parts)
        return secrets.judged_by_content(parts) and secrets.holds_credentials(root, parts)

    def fixes_path(self, parts: tuple[str, ...]) -> bool:
        """Whether a path stays read-only below a writable mount, as hosts execute what is there."""
        return secrets.FIXED in self._kinds(parts) or secrets.executed_by_name(parts)

    def _kinds(self, parts: tuple[str, ...]) -> set[str]:
        return {self.covers.get(parts[:end], "") for end in range(1, len(parts) + 1)}

    def covers_file(self, info: os.stat_result) -> bool:
        """Whether an open file is covered under any name."""
        known = (info.st_dev, info.st_ino) in self.inodes
        usual = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        return not self.single and (known or not (usual or stat.S_ISLNK(info.st_mode)))

    @contextlib.contextmanager
    def entered(self) -> Iterator[int]:
        """A descriptor of it, or of the folder that a single file is in. Raises OSError."""
        host = self.mount.host.parent if self.single else self.mount.host
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        root = os.open(host, flags)
        try:
            yield root
        finally:
            os.close(root)


@contextlib.contextmanager
def acting_as_owner(path: Path) -> Iterator[None]:
    """Have this thread of a root server use files as the owner of `path` (setfsuid(2)).

    Nothing for other servers. For few calls: Python's own library may be closed to that user.
    Raises OSError.
    """
    if os.geteuid() != 0:
        yield
        return
    info = path.stat()
    uid, gid = info.st_uid, info.st_gid
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint(0))
        _libc.setfsgid(ctypes.c_uint(os.getegid()))
