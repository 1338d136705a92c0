"""The interface of back-ends of other distributions: they run code anywhere, in any language.

A distribution offers a function under a name in the group `kernel_mcp.interpreters`. It takes the
text after `BACKEND:` in `--kernel NAME=BACKEND:TEXT`, and returns a `Backend`. It runs with all
rights of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

Emit: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"
"""Called with the type and content of a message of Jupyter's iopub channel, such as `stream`,
`display_data`, `execute_result` or `error`. Content that Jupyter does not know is dropped."""


class RunningKernel(Protocol):
    """One place where the code of one session runs, one cell at a time."""

    async def execute(self, code: str, emit: Emit) -> bool:
        """Run a cell, pass its output to `emit` in order, and return True if it succeeded."""

    async def interrupt(self) -> None:
        """Stop the running cell; its `execute` then returns. Variables should be kept."""

    async def ended(self) -> str:
        """Wait until the kernel has ended by itself, and return the reason as a clause."""

    async def aclose(self) -> None:
        """End the kernel and release all that belongs to it."""


class Backend(Protocol):
    """A kind of kernel.

    language  language of its cells, as people write it
    place     where code runs, for people; every answer names it
    lacking   what to do instead of a tool that is not available, by the name of the tool
    """

    language: str
    place: str
    lacking: Mapping[str, str]

    async def start(self, session: str) -> RunningKernel:
        """Start a kernel for the session with this handle.

        Raises `kernel_mcp.errors.LaunchError` with the reason, and what to do.
        """

    async def aclose(self) -> None:
        """Release what all kernels share; called at the end of the server."""
