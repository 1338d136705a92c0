"""The seam between a session and whatever starts its kernels."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.policy import Policy

START_TIMEOUT_S = 60.0
"""From the launch of a kernel to its being ready."""

_SO_PASSRIGHTS = 83
"""<asm-generic/socket.h> of Linux 6.16."""


def take_no_descriptors(end: socket.socket) -> None:
    """Refuse descriptors that are sent to this end of a Unix socket, where Linux can do that.

    Else a kernel could have the server be the last to close something whose end takes long. Before
    Linux 6.16 nothing but its system call filter keeps it from making such a thing.
    """
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """Where a kernel listens: the content of a Jupyter connection file, `transport` ipc.

    `ip` is the path prefix on the host; the socket of channel n is `{ip}-{n}`.
    """

    ip: str
    key: str
    shell_port: int = 1
    iopub_port: int = 2
    stdin_port: int = 3
    control_port: int = 4
    hb_port: int = 5
    signature_scheme: str = "hmac-sha256"

    def path(self, port: int) -> str:
        """The socket of one channel on the host."""
        return f"{self.ip}-{port}"


@dataclass(frozen=True, slots=True)
class KernelEnvironment:
    """A built virtual environment: where its interpreter is and what must be readable for it.

    `base` is the interpreter that it was made from. Packages can neither change that nor be loaded
    by it, so it is what runs where there are rights to lose; None when it is not known.
    """

    python: Path
    readonly: tuple[Path, ...]
    version: str = ""
    packages: tuple[str, ...] = ()
    base: Path | None = None

    @property
    def bare(self) -> Path:
        """The interpreter to start for what needs no package."""
        return self.base or self.python

    @property
    def runtime(self) -> tuple[Path, ...]:
        """What must be readable for that one."""
        own = self.python.parent.parent
        return tuple(path for path in self.readonly if self.base is None or path != own)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """All that is needed to start one kernel for one session."""

    session: str
    environment: KernelEnvironment
    policy: Policy
    limits: Limits
    workspace: Path
    layers: tuple[Path, ...] = ()
