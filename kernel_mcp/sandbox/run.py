"""Run one short command in a sandbox and wait for it: probes and self-tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.sandbox.base import GuestPaths, Sandbox, SandboxRequest


def run_confined(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    readonly: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    stdin: str | Callable[[GuestPaths], str] = "",
    timeout: float = 10.0,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` with an empty workspace of its own; blocks up to `timeout` seconds.

    `stdin` may depend on where the command finds its folders. Raises SandboxUnavailable when the
    command does not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-") as folder:
        workspace, sockets = Path(folder, "workspace"), Path(folder, "sockets")
        identity = sandbox.identity()
        try:
            for made in (workspace, sockets):
                made.mkdir(mode=0o700)
                if identity is not None:
                    os.chown(made, identity.uid, identity.gid)
            command = sandbox.command(
                SandboxRequest(
                    argv=argv,
                    env=env or {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    workspace=workspace,
                    sockets=sockets,
                    readonly=readonly,
                    limits=limits or Limits(),
                ),
                identity,
            )
            paths = sandbox.guest_paths(workspace, sockets)
            fed = stdin if isinstance(stdin, str) else stdin(paths)
            try:
                return subprocess.run(
                    command.argv,
                    env=command.env,
                    pass_fds=command.pass_fds,
                    input=fed,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                raise SandboxUnavailable(
                    f"a command in the {sandbox.name} sandbox did not end within {timeout:g} s; "
                    "the machine may be overloaded: try again"
                ) from late
            finally:
                command.close_passed()
                if command.status_fd >= 0:
                    os.close(command.status_fd)
        finally:
            sandbox.release(identity)
