"""Which handle a new session has: a server makes it up, a fleet has one roll for all nodes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel_mcp.sessions.keeping import Ask


def new_handle() -> str:
    """A handle that nobody guesses: 72 random bits."""
    return "s-" + secrets.token_urlsafe(9)


class Roll(Protocol):
    """The handles of sessions, and who has which."""

    def handle(self) -> str:
        """A handle for a session that nothing but itself leads to, such as a branch."""

    async def enter(self, principal: str, ask: Ask, default: str) -> str:
        """The handle of a session that is to be opened; `default` is where a default one is found.

        It is that of one kept under its name, which is open nowhere, if there is one. Raises
        KernelMcpError where it is open elsewhere.
        """

    async def strike(self, handle: str) -> None:
        """The session of a handle from `enter` was not opened."""


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
