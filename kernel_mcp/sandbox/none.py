"""No confinement at all: chosen only by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kernel_mcp.linux.folders import SCRATCH, Identity, scratch_folder
from kernel_mcp.linux.process import find_program
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    Builder,
    BuildRequest,
    GuestPaths,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.remedies import cannot_start


class PlainBuilder:
    """No confinement: for `--sandbox none` and backends without a builder of their own."""

    confined = False

    @asynccontextmanager
    async def owner(
        self, folders: Sequence[Path], *, hostile: bool
    ) -> AsyncIterator[Identity | None]:
        """Everything stays the server's."""
        yield None

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """The command itself, whose life is tied to the server's where that is possible."""
        return SandboxCommand(argv=[*tie_to_server(), *request.argv], pass_fds=(), env=request.env)


class NoSandbox:
    """Kernels are plain child processes of the server, with its rights."""

    name = "none"
    forks = False

    def __init__(self, boot: Path = BOOT_FOLDER) -> None:
        self._boot = str(boot)

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """The host's own paths; temporary files go to a folder beside the sockets."""
        return GuestPaths(
            workspace=str(workspace),
            sockets=str(sockets),
            boot=self._boot,
            tmp=str(sockets / SCRATCH),
        )

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """Kernels keep the server's user."""
        return None

    def release(self, identity: Identity | None) -> None:
        """Nothing was reserved."""

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The command itself; setpriv, where there is one, ties its life to the server's."""
        scratch_folder(request.sockets)
        return SandboxCommand(
            argv=[*tie_to_server(), *request.argv], pass_fds=[*request.inherit], env=request.env
        )

    def promise(self, identity: Identity | None, *, forked: bool = False) -> None:
        """Nothing is promised."""
        return

    def builder(self) -> Builder | None:
        """None: bubblewrap confines installers where it can be had."""
        return None

    def refusal(self, said: str) -> str:
        """Why no process could be started."""
        return cannot_start(self.name, said)

    def report(self) -> SandboxReport:
        """Everything is a gap."""
        return SandboxReport(
            backend=self.name,
            enforced=(),
            gaps=(
                "nothing is enforced: code runs with the rights of the server's user",
                "all files, the network and all processes of that user are within reach",
                "processes that a kernel moves to another session outlive it",
            ),
        )


def tie_to_server() -> list[str]:
    """The words that have a command end with the server, where there is setpriv."""
    setpriv = find_program("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]
