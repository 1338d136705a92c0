"""Requests that a kernel answers while a cell runs, and those that not every kernel supports."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import KernelChannels


class ControlRequests(Protocol):
    """The part of `Kernel` that asks on the control channel."""

    _channels: KernelChannels

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """See `Kernel`."""

    def answer(self, key: str, action: str, value: str) -> None:
        """Send the answer to a line that code asks for. An ended kernel gets none."""
        content = {"key": key, "action": action, "value": value}
        with contextlib.suppress(LaunchError):
            self._channels.send("control", "kernel_mcp_answer_request", content)

    async def describe_variables(self, match: str, offset: int, timeout: float) -> dict[str, Any]:
        """Return hostile descriptions of the user's variables, see `variables_of`.

        Raises LaunchError after `timeout` seconds.
        """
        asked = {"match": match, "offset": offset}
        found = await self.ask("kernel_mcp_variables_request", asked, timeout=timeout)
        return {**found, "offset": offset}

    async def list_packages(self, timeout: float) -> dict[str, tuple[str, bool]]:
        """Return packages by name, with their version and True if the session installed them.

        Raises LaunchError after `timeout` seconds, or if the kernel cannot list them.
        """
        raise LaunchError("This kernel does not list its packages.")

    async def begin_script(self, name: str, timeout: float) -> None:
        """Make the next cell begin and end as the script `name` does. Raises LaunchError."""
        await self.ask("kernel_mcp_script_request", {"name": name}, timeout=timeout)

    async def check_syntax(self, code: str, timeout: float) -> tuple[int, int, str] | None:
        """Return line, column and message of a syntax error in `code`; None for none.

        Raises LaunchError if the kernel cannot check code, or after `timeout` seconds.
        """
        raise LaunchError("This kernel does not check code.")
