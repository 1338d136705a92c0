"""What a kernel under Landlock may reach of the host's file tree."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.landlock_abi import Access, Ruleset

READ = Access.READ_FILE | Access.READ_DIR
RUN = READ | Access.EXECUTE
WRITE = (
    RUN
    | Access.WRITE_FILE
    | Access.TRUNCATE
    | Access.REFER
    | Access.REMOVE_DIR
    | Access.REMOVE_FILE
    | Access.MAKE_DIR
    | Access.MAKE_REG
    | Access.MAKE_SOCK
    | Access.MAKE_FIFO
    | Access.MAKE_SYM
)
"""Everything but device nodes."""

_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "/etc/alternatives",
    "/etc/crypto-policies",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    *map(str, sorted(Path("/etc").glob("python3*"))),  # Debian's sitecustomize
)
_MACHINE = (
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/vm/overcommit_memory",
    "/proc/uptime",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    # joblib and dask stop when these exist and cannot be read
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_DEVICES = {
    "/dev/full": Access.READ_FILE | Access.WRITE_FILE,
    "/dev/null": Access.READ_FILE | Access.WRITE_FILE | Access.TRUNCATE,
    "/dev/random": Access.READ_FILE,
    "/dev/urandom": Access.READ_FILE,
    "/dev/zero": Access.READ_FILE | Access.WRITE_FILE,
}
_TOO_MUCH = (
    *("/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run"),
    *("/srv", "/sys", "/tmp", "/var", "/var/tmp"),
)


def allow_system(rules: Ruleset) -> None:
    """What every program needs of the host, as far as this host has it."""
    wanted = [
        *((path, RUN) for path in _PROGRAMS),
        *((path, READ) for path in (*_SETTINGS, *_MACHINE)),
        *_DEVICES.items(),
    ]
    for path, access in wanted:
        with suppress(FileNotFoundError, PermissionError):
            rules.allow(path, access)


def allow_required(rules: Ruleset, paths: Iterable[Path], access: Access) -> None:
    """Rules that the kernel cannot do without. Raises LaunchError."""
    for path in paths:
        if not path.is_absolute() or os.path.realpath(path) in _TOO_MUCH:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check the interpreter given with --python"
            )
        try:
            rules.allow(str(path), access)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be made part of the sandbox: {error.strerror}; the kernel needs it"
            ) from error


def closed_folder(paths: Sequence[Path], identity: Identity) -> str | None:
    """The first folder on the way to one of `paths` that `identity` may not enter, or None."""
    seen: set[str] = set()
    for path in paths:
        for name in {os.path.normpath(path), os.path.realpath(path)}:
            for folder in (*reversed(Path(name).parents), Path(name)):
                if str(folder) in seen:
                    continue
                seen.add(str(folder))
                if not _may_enter(folder, identity):
                    return str(folder)
    return None


def _may_enter(path: Path, identity: Identity) -> bool:
    """Whether the permission bits let `identity` search a folder or read a file."""
    found = path.stat()
    folder = stat.S_ISDIR(found.st_mode)
    shift = 6 if found.st_uid == identity.uid else 3 if found.st_gid == identity.gid else 0
    return bool(found.st_mode >> shift & (1 if folder else 4))
