"""What the launcher asks of a sandbox: requests, commands, reports, and the `Sandbox` protocol."""

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
    from kernel_mcp.sandbox.promise import Promise


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One run of an installer.

    writable  host folders it may change, seen at the same place
    readonly  host paths it needs, seen at the same place
    hostile   whether it runs code of packages, or parses them in risky ways
    network   whether it has the host's network
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
    """Whether there is a boundary at all."""

    @asynccontextmanager
    def owner(self, folders: Sequence[Path], *, hostile: bool) -> AsyncIterator[Identity | None]:
        """The folders' owner inside the block; afterwards they are the server's again."""

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """The host command for one run. Raises LaunchError for paths that cannot be bound."""


BOOT_FOLDER = Path(kernel_specs.__file__).parent
"""The installed package that kernels boot from."""


@dataclass(frozen=True, slots=True)
class GuestPaths:
    """Where the kernel sees its folders; equal to the host's paths when nothing is remapped.

    `boot` is the folder of the package `kernel_specs`. Without `own_process_count` Linux counts
    other processes of the user in, and the sandbox limits their number itself. `layers` holds the
    package layers, named 0, 1, 2 …; empty where they are seen under their host paths.
    """

    workspace: str
    sockets: str
    boot: str
    tmp: str = "/tmp"
    own_process_count: bool = True
    layers: str = ""


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """One process to confine.

    `argv` and `env` are already in guest paths. `readonly` are host paths bound at the same place.
    `inherit` are file descriptors the process keeps. `layers` are host paths bound read-only at
    `GuestPaths.layers`. With `folders.shown` it can make no Unix socket. `hosts` are addresses of
    its own network, each with its name. `replaced` are files of the host that are seen in the place
    of others in `readonly`; `devices` are in its /dev.
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
    """What to execute on the host, once.

    `pass_fds` stay open in the child and close in the parent, `SandboxRequest.inherit` among them.
    `status_fd` is the read end of a pipe that tells the host pid of the sandbox's first process as
    JSON, `{"child-pid": 123, ...}`; -1 when the started process is itself the confined one.

    With `detached` the first process is no child of the started one, which ends: `status_fd` is a
    socket that gives with the pid a connection, and over that comes the kernel's exit code. Only if
    `status_fd` was closed before does the started process stay, and exit with that code.
    """

    argv: Sequence[str]
    pass_fds: Sequence[int]
    env: Mapping[str, str]
    status_fd: int = -1
    detached: bool = False

    def close_passed(self) -> None:
        """Close the parent's copies of `pass_fds`, after the start or in its stead."""
        for fd in self.pass_fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Opened:
    """What the operator opens to kernels, as far as a report's words depend on it.

    `writable` are those of the mounts where code may write, `devices` those that it may use.
    """

    mounts: bool = False
    writable: tuple[str, ...] = ()
    network: bool = False
    devices: tuple[str, ...] = ()

    def reach(self, programs: str) -> tuple[str, ...]:
        """What is in force where kernels have a network and files of their own.

        `programs` are in words those of the host that they see.
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
        """What is in force because a device is open."""
        return (f"of the host's devices only {listed(self.devices)}",) if self.devices else ()


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What is in force, for `info`, `doctor` and the instructions of the server.

    `unpromised` are self-test checks, by name, that fail because of a gap. `own_groups`: another
    process manages the kernels' control groups, and this server may not move them. `listable` are
    folders in which a gap lets the names of files be listed.
    """

    backend: str
    enforced: tuple[str, ...]
    gaps: tuple[str, ...]
    unpromised: frozenset[str] = frozenset()
    own_groups: bool = False
    listable: tuple[Path, ...] = ()


CLOSED = Opened()
_SEALED = "Unix sockets only in pairs: those in mounted folders cannot be connected to"
DEFAULT_IMAGE = "kernel-mcp"


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """What the operator decides about containers.

    engine   auto, podman or docker
    image    name of the image that kernels run in
    runtime  OCI runtime such as runc; empty for the engine's default
    """

    engine: str = "auto"
    image: str = DEFAULT_IMAGE
    runtime: str = ""

    @classmethod
    def of(cls, settings: Settings) -> ContainerOptions:
        """Take them from the settings of a server."""
        return cls(settings.container_engine, settings.container_image, settings.container_runtime)


BY_TREES, BY_BINDS, BY_RULES = "trees", "binds", "rules"
"""Folders are shown by mounts with id-maps under a root server, by mounts without any, or are seen
on the host as far as Landlock's rules go."""


class Sandbox(Protocol):
    """One way of confining a kernel process."""

    @property
    def name(self) -> str:
        """The backend's name as `--sandbox` takes it."""

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Where a kernel in this sandbox will find its folders."""

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """A host identity for one kernel, or None when it keeps the server's own.

        The owner of `workspace` is taken again where it is free or used for the same workspace:
        kernels of one session are one user. Raises SandboxUnavailable when all are in use.
        """

    def release(self, identity: Identity | None) -> None:
        """Give an identity back once no process runs under it."""

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The host command that runs `request.argv` inside the boundary.

        The caller starts it, then calls `close_passed` and owns `status_fd`. On an error the
        caller keeps `request.inherit`. Raises LaunchError for folders that cannot be bound.
        """

    @property
    def shows(self) -> str:
        """How kernels see mounted folders: one of the words below, empty for not at all."""

    @property
    def forks(self) -> bool:
        """Whether kernels in this sandbox can be forked from a template."""

    def promise(self, identity: Identity | None, *, forked: bool = False) -> Promise | None:
        """What /proc has to show of a kernel, cold or `forked`; None where nothing is promised."""

    def builder(self) -> Builder | None:
        """What confines installers in the same way, None where this backend has no such thing."""

    def refusal(self, said: str) -> str:
        """Why no process could be started, with the remedy; `said` is the start's output."""

    def report(self, opened: Opened = CLOSED) -> SandboxReport:
        """What this backend enforces and what it does not, with these doors open."""


def listed(names: Sequence[str]) -> str:
    """Names as people list them."""
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
        """A memfd with this content, read from its beginning: its number as an option."""
        fd = self.add(os.memfd_create("kernel-mcp", os.MFD_CLOEXEC))
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return str(fd)

    def status(self) -> tuple[int, str]:
        """A pipe: its non-blocking read end for the server, its write end as an option."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._undo.callback(os.close, read)
        return read, str(self.add(write))

    def link(self) -> tuple[int, str]:
        """As `status`, but connected sockets, which descriptors can be sent over."""
        read, write = socket.socketpair()
        read.setblocking(False)
        self._undo.callback(os.close, read.fileno())
        return read.detach(), str(self.add(write.detach()))

    def add(self, fd: int) -> int:
        """Take over a descriptor."""
        self._undo.callback(os.close, fd)
        self._fds.append(fd)
        return fd

    def keep(self) -> list[int]:
        """All but the read ends; the caller closes them from now on."""
        self._undo.pop_all()
        return self._fds
