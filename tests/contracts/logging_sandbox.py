"""A sandbox of a third party: it confines as bubblewrap does, and logs each command that it gives.

It uses the public face alone: the Protocol `Sandbox` and what its methods take and return.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import (
    NO_GRANTS,
    Builder,
    Grants,
    GuestPaths,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.confinement import ExpectedConfinement

LOG = "LOGGING_SANDBOX"
"""The variable with the path of the log."""


class LoggingSandbox:
    """Adds a line to a file for each command of another sandbox."""

    name = "logging"
    forks = False

    def __init__(self, inner: BwrapSandbox, log: Path) -> None:
        self._inner = inner
        self._log = log

    @classmethod
    def detect(cls) -> LoggingSandbox:
        """Return one, with the log that the environment names. Raises SandboxUnavailable."""
        return cls(BwrapSandbox.detect(), Path(os.environ.get(LOG, os.devnull)))

    @property
    def mount_method(self) -> str:
        return self._inner.mount_method

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        return self._inner.guest_paths(workspace, sockets)

    def identity(self, workspace: Path | None = None) -> Identity | None:
        return self._inner.identity(workspace)

    def release(self, identity: Identity | None) -> None:
        self._inner.release(identity)

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        with self._log.open("a") as log:
            log.write(f"{request.argv[0]} in {request.workspace.name}\n")
        return self._inner.command(request, identity)

    def expected_confinement(
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement | None:
        return self._inner.expected_confinement(identity, forked=forked)

    def builder(self) -> Builder | None:
        return self._inner.builder()

    def refusal(self, said: str) -> str:
        return self._inner.refusal(said)

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        return replace(self._inner.report(grants), backend=self.name)
