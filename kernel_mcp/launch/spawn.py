"""The start of a sandboxed command."""

from __future__ import annotations

import os
import subprocess

from kernel_mcp.barriers import shortage
from kernel_mcp.errors import LaunchError
from kernel_mcp.sandbox.base import SandboxCommand


def spawn(command: SandboxCommand) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command and close what it inherits; the process and the read end of its output.

    Raises LaunchError.
    """
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=command.pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
    except OSError as reason:
        why = shortage(reason) or reason
        raise LaunchError(f"cannot start {command.argv[0]}: {why}") from reason
    finally:
        command.close_passed()
    return process, read
