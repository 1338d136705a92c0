"""What a launcher is given and gives back: the request, the environment, the connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kernel_mcp.config.settings import Limits
from kernel_mcp.policy import Policy

START_TIMEOUT_S = 60.0
"""Seconds from the launch of a kernel until it is ready."""

Tell: TypeAlias = "Callable[[Mapping[str, Any]], None]"
"""Takes a record of one connection, or of several that are alike."""

_SO_PASSRIGHTS = 83
"""<asm-generic/socket.h> of Linux 6.16."""


def take_no_descriptors(end: socket.socket) -> None:
    """Set SO_PASSRIGHTS of a Unix socket's end to 0, where Linux has it.

    Closing a received descriptor can block. Before Linux 6.16 only the filter prevents those.
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

    @property
    def ports(self) -> tuple[int, ...]:
        """Those of shell, iopub, stdin, control and heartbeat."""
        return (
            self.shell_port,
            self.iopub_port,
            self.stdin_port,
            self.control_port,
            self.hb_port,
        )

    def path(self, port: int) -> str:
        """The host path of one channel's socket."""
        return f"{self.ip}-{port}"


@dataclass(frozen=True, slots=True)
class KernelEnvironment:
    """A built virtual environment: its interpreter and the host paths that it reads.

    `base` is the interpreter that it was made from, None when unknown. It loads no packages, which
    cannot change it either, so it runs what holds rights.
    """

    python: Path
    readonly: tuple[Path, ...]
    version: str = ""
    packages: tuple[str, ...] = ()
    base: Path | None = None

    @property
    def bare(self) -> Path:
        """The interpreter to start for what needs no package: `base` if known, else `python`."""
        return self.base or self.python

    @property
    def runtime(self) -> tuple[Path, ...]:
        """The host paths that `bare` reads."""
        own = self.python.parent.parent
        return tuple(path for path in self.readonly if self.base is None or path != own)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """All that is needed to start one kernel for one session.

    `variables` are for code to find in `os.environ`, over those that every kernel has.
    """

    session: str
    environment: KernelEnvironment
    policy: Policy
    limits: Limits
    workspace: Path
    layers: tuple[Path, ...] = ()
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
