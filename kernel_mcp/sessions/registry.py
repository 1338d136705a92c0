"""Handles of new sessions: a server creates its own, a fleet has one registry for all nodes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel_mcp.sessions.persistence import SessionRequest


def new_handle() -> str:
    """Return an unguessable handle of 72 random bits."""
    return "s-" + secrets.token_urlsafe(9)


class SessionRegistry(Protocol):
    """The registry of session handles and their owners."""

    def new_handle(self) -> str:
        """Return a handle for a session that is found only by it, such as a branch."""

    async def register(self, principal: str, request: SessionRequest, default: str) -> str:
        """Register a session that is about to be opened, and return its handle.

        `default` is the key by which the default session is found; empty for other sessions. A
        persisted session that is open nowhere gets its former handle. Raises KernelMcpError if it
        is open elsewhere.
        """

    async def unregister(self, handle: str) -> None:
        """Remove a handle from `register` whose session was not opened."""


class LocalRegistry:
    """The registry of a server without a fleet: it creates handles and stores none."""

    def new_handle(self) -> str:
        """See `SessionRegistry`."""
        return new_handle()

    async def register(self, principal: str, request: SessionRequest, default: str) -> str:
        """See `SessionRegistry`."""
        return new_handle()

    async def unregister(self, handle: str) -> None:
        """See `SessionRegistry`."""
