"""Folders of this user alone, in places where others may write.

The server trusts their content (interpreters to start, locks, processes to kill). So no other user
may write there or replace them.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The host user and group that a kernel runs as."""

    uid: int
    gid: int


SCRATCH = "tmp"
"""Name of the folder for a kernel's temporary files, beside its sockets."""
MOST_LINKS = 40
"""Maximum number of symlinks that Linux follows in one path."""
_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""System folders, which are no home folder of a user."""
_WHOLE_MACHINE = ["0", "0", "4294967295"]


_MADE_WITH_A_DISK = "lost+found"


def private_folder(path: Path) -> Path:
    """Make `path` a folder of mode 0700 that belongs to this user; create its parents as well.

    Raises PermissionError if another user made it or could replace it. The same holds for a folder
    that is not empty and open to others, such as `/usr`. Raises OSError.
    """
    own_folder(path, mode=0o700)
    if path.is_symlink():
        raise PermissionError(f"{path} is not a folder of this user but a link; remove it")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode != 0o700:
        if any(entry.name != _MADE_WITH_A_DISK for entry in path.iterdir()):
            raise PermissionError(
                f"{path} has files in it and is open to others (mode {mode:04o}); if they are of "
                f"this server alone, close it with `chmod 700 {path}`"
            )
        path.chmod(0o700)
    return path


def own_folder(path: Path, *, mode: int = 0o755) -> Path:
    """Make `path` a folder that only this user can write to; create its parents as well.

    Raises PermissionError if another user made it or could replace it, and OSError.
    """
    path = path.absolute()
    require_unshared(path)
    if not path.is_dir():
        for folder in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=mode if folder == path else 0o755)
        require_unshared(path)
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} exists and is not a folder of this user (see `ls -ld`)")
    if _shared(found):
        raise PermissionError(
            f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):04o}); if you trust "
            f"what is in it, close it with `chmod go-w {path}`, else remove it"
        )
    return path


def scratch_folder(sockets: Path, owner: Identity | None = None) -> Path:
    """Return a folder for temporary files of a kernel that sees the host's own paths.

    It is beside the sockets: in /tmp other users could prepare names that the kernel reads. Raises
    LaunchError if another file has its name.
    """
    path = sockets / SCRATCH
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        if owner is not None:
            os.chown(path, owner.uid, owner.gid)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != (owner.uid if owner else os.geteuid()):
        raise LaunchError(f"{path} is in the way of the kernel's temporary files; remove it")
    return path


def runtime_folder(name: str = "") -> Path:
    """Return the private folder that this user's servers share, or its subfolder `name`.

    It is in /run for root, else in XDG_RUNTIME_DIR, else in /tmp. Raises SandboxUnavailable.
    """
    user = os.geteuid()
    given = "/run" if user == 0 else os.environ.get("XDG_RUNTIME_DIR", "")
    usable = given.startswith("/") and os.access(given, os.W_OK | os.X_OK)
    path = Path(given, "kernel-mcp") if usable else Path(f"/tmp/kernel-mcp-{user}")
    try:
        private_folder(path)
        return private_folder(path / name) if name else path
    except OSError as reason:
        raise SandboxUnavailable(
            f"this user's servers cannot meet in {path}: {reason}; or set XDG_RUNTIME_DIR to a "
            "folder of this user"
        ) from reason


def replace_file(place: Path, content: bytes, *, most_mode: int = 0o777) -> None:
    """Write a file atomically; owner and mode of the one before are kept, within `most_mode`.

    A new file is for this user alone. Raises OSError.
    """
    old = place.stat() if place.exists() else None
    fd, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    fresh = Path(name)
    try:
        with open(fd, "wb") as written:
            if old is not None:
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, old.st_uid, old.st_gid)
                os.fchmod(fd, stat.S_IMODE(old.st_mode) & most_mode | 0o600)
            written.write(content)
            written.flush()
            os.fsync(fd)
        fresh.rename(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def from_home(path: Path) -> Path:
    """Return a path with `~` expanded. Raises ValueError if there is no such home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: this user or the one named has no home folder; give the whole path"
        ) from None


def home_folder() -> Path | None:
    """Return this user's home folder; None if there is none.

    In containers that run as any user, HOME is unset, empty, `/` or a system folder.
    """
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an entry in the password database
        return None
    place = Path(os.path.realpath(home))
    system = place == Path("/") or any(map(place.is_relative_to, _SYSTEM))
    return None if system or not home.is_absolute() else home


def is_own(path: Path) -> bool:
    """Return True if `own_folder` can make `path`, judging by owners and modes."""
    there = next(each for each in (path, *path.parents) if each.exists())
    try:
        require_unshared(path)
    except OSError:
        return False
    return os.access(there, os.W_OK | os.X_OK)


def lasting_folder() -> Path:
    """Return a folder for files of this user that requires no home folder.

    It is on a disk rather than in memory, as it may contain workspaces.
    """
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else "/tmp"
    return Path(parent, f"kernel-mcp-{os.geteuid()}")


def hold_name(path: Path) -> int | None:
    """Lock a path for this process; return the descriptor, None if another server holds the lock.

    The caller closes the descriptor. The lock file is in `runtime_folder`. Raises
    SandboxUnavailable, OSError.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return try_lock(os.open(runtime_folder("workspaces") / name, flags, 0o600))


def try_lock(fd: int) -> int | None:
    """Lock an open file exclusively with flock(2) and return `fd`.

    Return None if another process holds the lock. Raises PermissionError for a file of another
    user, and OSError. In all these cases `fd` is closed.
    """
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError("what is to be locked does not belong to this user")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_unshared(path: Path) -> None:
    """Raise PermissionError if another user could replace `path`. Also raises OSError."""
    reason = _danger(path, MOST_LINKS)
    if reason:
        raise PermissionError(f"other users could replace {path}: {reason}")


def _danger(path: Path, links: int, *, whole: bool = False) -> str:
    """Return how another user could replace `path`, or with `whole` write to it; else ""."""
    trusted = trusted_users()
    place = Path(path.anchor)
    parts = ["", *path.parts[1:]]
    for number, part in enumerate(parts, start=1):
        place = place / part
        passed = whole or number < len(parts)
        try:
            found = place.lstat()
        except FileNotFoundError:
            return ""  # this user will create it
        if found.st_uid not in trusted:
            return f"{place} belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            if not links:
                return f"{place} leads through too many links"
            if reason := _danger(place.parent / place.readlink(), links - 1, whole=passed):
                return reason
            place = Path(os.path.realpath(place))
        elif passed and _shared(found) and not found.st_mode & stat.S_ISVTX:
            return (
                f"others may write to {place} (mode {stat.S_IMODE(found.st_mode):04o}); close it "
                f"with `chmod go-w {place}`"
            )
    return ""


def _shared(found: os.stat_result) -> bool:
    """Return True if users other than this one and root may write to a folder."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _of_one(found.st_gid)


def _of_one(group: int) -> bool:
    """Return True if a group is root's or this user's private one.

    A private group has the user's name and no other member.
    """
    if group == 0:
        return True
    try:
        user = pwd.getpwuid(os.geteuid())
        named = grp.getgrgid(group)
    except KeyError:
        return False
    return (
        user.pw_gid == group
        and named.gr_name == user.pw_name
        and set(named.gr_mem) <= {user.pw_name}
    )


def trusted_users() -> frozenset[int]:
    """Return the ids of the users whose files the server trusts: root and this user.

    In a user namespace also the overflow id, which stands for root outside.
    """
    users = {0, os.geteuid()}
    if Path("/proc/self/uid_map").read_text().split() != _WHOLE_MACHINE:
        users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(users)
