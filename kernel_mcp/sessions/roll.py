"""Handles of new sessions: a server makes its own, a fleet has one registry for all nodes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel_mcp.sessions.keeping import Ask


def new_handle() -> str:
    """Return an unguessable handle of 72 random bits."""
    return "s-" + secrets.token_urlsafe(9)


class Roll(Protocol):
    """The registry of session handles and their owners."""

    def handle(self) -> str:
        """Return a handle for a session that is found only by it, such as a branch."""

    async def enter(self, principal: str, ask: Ask, default: str) -> str:
        """Register a session that is about to be opened, and return its handle.

        `default` is the key by which the default session is found; empty for other sessions. A
        persisted session that is open nowhere gets its former handle. Raises KernelMcpError if it
        is open elsewhere.
        """

    async def strike(self, handle: str) -> None:
        """Remove a handle from `enter` whose session was not opened."""


class OwnRoll:
    """The handles of a server that is alone."""

    def handle(self) -> str:
        """See `Roll`."""
        return new_handle()

    async def enter(self, principal: str, ask: Ask, default: str) -> str:
        """See `Roll`."""
        return new_handle()

    async def strike(self, handle: str) -> None:
        """See `Roll`."""
