"""The values that launchers exchange with sessions: launch request, environment, connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, TypeAlias

from kernel_mcp.config.settings import Limits
from kernel_mcp.policy import Policy
from kernel_mcp.records import dataclass

START_TIMEOUT_S = 60.0
"""Maximum time in seconds from the launch of a kernel until it is ready."""

OnRecord: TypeAlias = "Callable[[Mapping[str, Any]], None]"
"""Callback for a log record of one network connection, or of several similar ones."""

_SO_PASSRIGHTS = 83
"""<asm-generic/socket.h> of Linux 6.16."""


def take_no_descriptors(end: socket.socket) -> None:
    """Refuse descriptors on one end of a Unix socket (SO_PASSRIGHTS), where Linux can.

    Closing a received descriptor can block. Before Linux 6.16 only the seccomp filter keeps
    descriptors from arriving.
    """
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def hold_little(end: socket.socket) -> None:
    """Set the smallest send buffer, so that only a few packets and their descriptors are in flight.

    Linux limits the descriptors that one user has in flight, for all kernels together.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """The addresses of a kernel: the content of a Jupyter connection file.

    With the `transport` ipc, `ip` is the path prefix on the host; the socket of channel n is
    `{ip}-{n}`. With tcp it is an address of the kernel's own network. `tools` is the path on the
    host where code of cells waits for the gateway of tools; empty if no tools are open.
    """

    ip: str
    key: str
    shell_port: int = 1
    iopub_port: int = 2
    stdin_port: int = 3
    control_port: int = 4
    hb_port: int = 5
    signature_scheme: str = "hmac-sha256"
    transport: str = "ipc"
    tools: str = ""

    @property
    def ports(self) -> tuple[int, ...]:
        """Channel numbers of shell, iopub, stdin, control and heartbeat."""
        return (
            self.shell_port,
            self.iopub_port,
            self.stdin_port,
            self.control_port,
            self.hb_port,
        )

    def path(self, port: int) -> str:
        """Return the host path of one channel's socket."""
        return f"{self.ip}-{port}"


def mark_of(sites: Iterable[Path]) -> tuple[int, ...]:
    """Return device, inode and mtime (ns) of each package folder; missing folders are skipped.

    The result changes when an entry is added to a folder or removed from it.
    """
    found: list[int] = []
    for site in sites:
        with suppress(OSError):
            info = site.stat()
            found += (info.st_dev, info.st_ino, info.st_mtime_ns)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Outside:
    """A folder outside an environment that it imports packages from, and modules known there."""

    path: str
    modules: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Support:
    """The packages that one of our environments adds to the operator's, and facts about both.

    site      folder of our packages, on sys.path before (`first`) or behind those of `sites`
    runtime   host paths that our interpreter reads
    mark      `mark_of(sites)` at the time they were read
    modules   top-level modules by package
    replaced  messages about our versions that hide those of the operator's environment
    outside   folders outside the environment that are imported from, by package or `.pth` file
    needs     requirements of the packages on each other that are met
    compiled  True if the packages have bytecode
    """

    site: Path
    first: bool
    sites: tuple[Path, ...]
    runtime: tuple[Path, ...] = ()
    mark: tuple[int, ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    replaced: Mapping[str, str] = field(default_factory=dict, compare=False)
    outside: Mapping[str, Outside] = field(default_factory=dict, compare=False)
    needs: tuple[str, ...] = field(default=(), compare=False)
    compiled: bool = field(default=True, compare=False)

    @property
    def path(self) -> list[str]:
        """The value in the kernel's boot file: folder and place on sys.path, "first" or "last"."""
        return [str(self.site), "first" if self.first else "last"]


@dataclass(frozen=True, slots=True)
class KernelEnvironment:
    """A virtual environment: its interpreter and the host paths that it reads.

    `base` is the interpreter that it was made from, None when unknown. It loads no packages, and
    packages cannot change it, so privileged programs run on it. With `support` the environment is
    the operator's, and `base` is the interpreter of the support: nothing of the operator's
    environment runs outside a sandbox. `replaced` are files of the host that kernels see in the
    place of others.
    """

    python: Path
    readonly: tuple[Path, ...]
    version: str = ""
    packages: tuple[str, ...] = ()
    base: Path | None = None
    support: Support | None = None
    replaced: tuple[tuple[Path, Path], ...] = ()

    @property
    def root(self) -> Path:
        """Its folder."""
        return self.python.parent.parent

    @property
    def stale(self) -> bool:
        """Return True if packages were installed or removed since the environment was read."""
        return self.support is not None and mark_of(self.support.sites) != self.support.mark

    @property
    def bare(self) -> Path:
        """Interpreter for programs that need no package: `base` if known, else `python`."""
        return self.base or self.python

    @property
    def runtime(self) -> tuple[Path, ...]:
        """The host paths that `bare` reads."""
        if self.support is not None:
            return self.support.runtime
        return tuple(path for path in self.readonly if self.base is None or path != self.root)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that becomes the kernel, instead of this server's own ipykernel.

    argv  its command line; `{connection_file}` stands for the path of the connection file
    env   its environment variables besides those that every kernel has
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """A kernel that repeats cells: mounts are read-only, devices are not there.

    cold     True for a new interpreter, whose hash seed is its own; False for a fork if possible
    shuffle  seed of the order in which folders are listed; 0 for the order of the file system
    seed     seed of the generators of `random` and numpy; 0 for the entropy of the system
    hashes   seed of the hashes of texts, from Python 3.11 on; 0 for another one each time
    layer    further package layer, which the kernel does not change
    opened   doors that stay open, of `DOORS`
    """

    cold: bool = True
    shuffle: int = 0
    seed: int = 0
    hashes: int = 0
    layer: Path | None = None
    opened: frozenset[str] = frozenset()


DOORS = ("network", "mounts", "devices", "tools")
"""Doors that a replay can leave open: connections with secrets, writable mounts, devices, and tools
that code calls."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """All that is needed to start one kernel for one session.

    `variables` are set in `os.environ` and override those that every kernel has. Without a
    `program` the kernel is this server's own. With `tools` code of cells may call tools.
    """

    session: str
    environment: KernelEnvironment
    policy: Policy
    limits: Limits
    workspace: Path
    layers: tuple[Path, ...] = ()
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    program: Program | None = None
    tools: bool = False
    replay: Replay | None = None

    @property
    def hash_seed(self) -> int:
        """The seed of its hashes; 0 if it is not fixed.

        Python reads it without `-I` alone, which no other option replaces before Python 3.11.
        """
        minor = self.environment.version.split(".")[1:2]
        fixed = self.replay is not None and minor and minor[0].isdigit() and int(minor[0]) >= 11
        return self.replay.hashes if self.replay is not None and fixed else 0

    @property
    def writable(self) -> bool:
        """True if mounts that permit it may be written."""
        return self.replay is None or "mounts" in self.replay.opened

    @property
    def has_devices(self) -> bool:
        """True if the devices of the server are in its /dev."""
        return self.replay is None or "devices" in self.replay.opened
