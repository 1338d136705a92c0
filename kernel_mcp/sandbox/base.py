"""The interface between launcher and sandbox: requests, commands, reports, `Sandbox` protocol."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import kernel_specs
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.host_folders import Device
from kernel_mcp.linux.folders import Identity
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.mounts import Folders

if TYPE_CHECKING:
    from kernel_mcp.sandbox.confinement import ExpectedConfinement


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One run of an installer.

    writable  host folders that it may change, at the same paths
    readonly  host paths that it requires, at the same paths
    hostile   True if it runs code of packages, or parses them in risky ways
    network   True if it may use the host's network
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    writable: Sequence[Path]
    readonly: Sequence[Path]
    hostile: bool = False
    network: bool = True


class Builder(Protocol):
    """Confines installers."""

    confined: bool
    """True if installers are confined at all."""

    @asynccontextmanager
    def owner(self, folders: Sequence[Path], *, hostile: bool) -> AsyncIterator[Identity | None]:
        """Yield the owner of the folders inside the block; afterwards the server owns them again.

        None if the server keeps owning them.
        """

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """Return the host command for one run.

        Raises LaunchError for paths that cannot be bound.
        """


BOOT_FOLDER = Path(kernel_specs.__file__).parent
"""The installed package that kernels boot from."""


@dataclass(frozen=True, slots=True)
class GuestPaths:
    """The paths of a kernel's folders as it sees them; host paths if nothing is remapped.

    `boot` is the folder of the package `kernel_specs`. Without `own_process_count` the sandbox
    limits the kernel's processes itself. With it, Linux counts `other_threads`, too: those that the
    user has already. `layers` contains the package layers, named 0, 1, 2 …; empty if they keep
    their host paths.
    """

    workspace: str
    sockets: str
    boot: str
    tmp: str = "/tmp"
    own_process_count: bool = True
    other_threads: int = 0
    layers: str = ""

    def process_limit(self, most: int) -> int:
        """Return RLIMIT_NPROC of a kernel that may have `most` processes and threads; 0 for none.

        0 for `most` is no limit.
        """
        return most + self.other_threads if most and self.own_process_count else 0


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """One process to confine.

    `argv` and `env` already use guest paths. `readonly` are host paths bound at the same place.
    `inherit` are descriptors that the process keeps. `layers` are host paths bound read-only at
    `GuestPaths.layers`. With `folders.shown` it cannot make Unix sockets. `hosts` are pairs of
    address and name in its own network. `replaced` are pairs of host paths: a file, and the path in
    `readonly` at which it is seen instead. `devices` are in its /dev.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    workspace: Path
    sockets: Path
    readonly: Sequence[Path]
    limits: Limits
    inherit: Sequence[int] = ()
    layers: Sequence[Path] = ()
    folders: Folders = field(default_factory=Folders)
    hosts: tuple[tuple[str, str], ...] = ()
    replaced: tuple[tuple[Path, Path], ...] = ()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """A command line to run on the host, once.

    `pass_fds` stay open in the child and are closed in the parent; they include
    `SandboxRequest.inherit`. `status_fd` is the read end of a pipe. It reports the host pid of the
    sandbox's first process as JSON, `{"child-pid": 123, ...}`. It is -1 if the started process is
    itself confined.

    With `detached`, the first process is no child of the started one, which exits. `status_fd` is
    then a socket: with the pid it passes a connection that delivers the kernel's exit code. If
    `status_fd` was closed before, the started process remains and exits with that code.
    """

    argv: Sequence[str]
    pass_fds: Sequence[int]
    env: Mapping[str, str]
    status_fd: int = -1
    detached: bool = False

    def close_passed(self) -> None:
        """Close the parent's copies of `pass_fds`, after the start or instead of it."""
        for fd in self.pass_fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Grants:
    """Grants to kernels that a report mentions: mounts, network, devices.

    `writable` are the mounts to which code may write, `devices` those that it may use.
    """

    mounts: bool = False
    writable: tuple[str, ...] = ()
    network: bool = False
    devices: tuple[str, ...] = ()

    def reach(self, programs: str) -> tuple[str, ...]:
        """Return the guarantees of a sandbox with a network and files of its own, as phrases.

        `programs` describes the host's programs that kernels see.
        """
        proxy = ", and a proxy that connects where `network` says, to nothing else"
        own = ["the workspace", "a private /tmp", *self.writable]
        seen = ", and `mounts` without known secrets" if self.mounts else ""
        return (
            f"a network of its own: the loopback{proxy if self.network else ' alone'}",
            f"only {listed(own)} are writable; hidden: the host's files but {programs}{seen}",
            *([_SEALED] if self.mounts else []),
            *self.at_devices,
        )

    @property
    def at_devices(self) -> tuple[str, ...]:
        """The guarantee about devices, as a phrase; empty if none is granted."""
        return (f"of the host's devices only {listed(self.devices)}",) if self.devices else ()


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The guarantees of a sandbox and its gaps, for `info`, `doctor` and the server's instructions.

    `unpromised` are self-test checks that may fail because of a gap. With `own_groups`,
    another process manages the kernels' control groups, and this server may not move them.
    `listable` are folders whose file names a gap lets kernels list.
    """

    backend: str
    enforced: tuple[str, ...]
    gaps: tuple[str, ...]
    unpromised: frozenset[str] = frozenset()
    own_groups: bool = False
    listable: tuple[Path, ...] = ()


NO_GRANTS = Grants()
_SEALED = "Unix sockets only in pairs: those in mounted folders cannot be connected to"
DEFAULT_IMAGE = "kernel-mcp"


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """The operator's settings for containers.

    engine   auto, podman or docker
    image    name of the image that kernels run in
    runtime  OCI runtime such as runc; empty for the engine's default
    """

    engine: str = "auto"
    image: str = DEFAULT_IMAGE
    runtime: str = ""

    @classmethod
    def of(cls, settings: Settings) -> ContainerOptions:
        """Return the options in the settings of a server."""
        return cls(settings.container_engine, settings.container_image, settings.container_runtime)


BY_TREES, BY_BINDS, BY_RULES = "trees", "binds", "rules"
"""Values of `Sandbox.mount_method`.

Folders are shown by mount trees, id-mapped under a root server; by bind mounts without id maps; or
as the host's own folders, restricted by Landlock rules.
"""


class Sandbox(Protocol):
    """A method of confining kernel processes."""

    @property
    def name(self) -> str:
        """The backend's name as in `--sandbox`."""

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Return the paths of a kernel's folders in this sandbox."""

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """Reserve a host identity for one kernel; None if it keeps the server's own.

        The owner of `workspace` is preferred if it is free or used for the same workspace: all
        kernels of a session run as one user. Raises SandboxUnavailable if all are in use.
        """

    def release(self, identity: Identity | None) -> None:
        """Release an identity under which no process runs any more."""

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """Return the host command that runs `request.argv` inside the boundary.

        The caller starts it, then calls `close_passed` and owns `status_fd`. On an error the
        caller keeps `request.inherit`. Raises LaunchError for folders that cannot be bound.
        """

    @property
    def mount_method(self) -> str:
        """Method of mounting folders: `BY_TREES`, `BY_BINDS`, `BY_RULES`; empty for none."""

    @property
    def forks(self) -> bool:
        """Return True if kernels in this sandbox can be forked from a template."""

    def expected_confinement(
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement | None:
        """Return the confinement that /proc must show of a kernel, cold or `forked`.

        None if this backend confines nothing.
        """

    def builder(self) -> Builder | None:
        """Return the builder that confines installers in the same way; None for none."""

    def refusal(self, said: str) -> str:
        """Return why no process could be started, and the remedy; `said` is the start's output."""

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        """Return the guarantees and gaps of this backend with these grants."""


def listed(names: Sequence[str]) -> str:
    """Return names as an English list: "a, b and c"."""
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


class Passed:
    """Descriptors that a command inherits; closed on exit unless `keep` was called."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._undo = ExitStack()

    def __enter__(self) -> Passed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def file(self, content: bytes) -> str:
        """Add a memfd with this content; return its number for an option."""
        fd = self.add(os.memfd_create("kernel-mcp", os.MFD_CLOEXEC))
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return str(fd)

    def status(self) -> tuple[int, str]:
        """Add a pipe; return (its non-blocking read end, its write end for an option)."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._undo.callback(os.close, read)
        return read, str(self.add(write))

    def link(self) -> tuple[int, str]:
        """Like `status`, with connected sockets, over which descriptors can be sent."""
        read, write = socket.socketpair()
        read.setblocking(False)
        self._undo.callback(os.close, read.fileno())
        return read.detach(), str(self.add(write.detach()))

    def add(self, fd: int) -> int:
        """Add a descriptor, and own it from now on; return it."""
        self._undo.callback(os.close, fd)
        self._fds.append(fd)
        return fd

    def keep(self) -> list[int]:
        """Return the inherited descriptors; the caller closes them, and the server's read ends."""
        self._undo.pop_all()
        return self._fds
