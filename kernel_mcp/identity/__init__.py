"""Principals, their permissions, and verification of their tokens."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import field
from typing import Protocol

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.records import dataclass

RUN = "kernel:run"
"""Scope that every call requires."""
INSTALL = "kernel:install"
"""Scope that installing packages requires."""
SCOPES = (RUN, INSTALL)
"""Scopes of a principal by default."""
METRICS = "kernel:metrics"
"""Scope of operators, who may see metrics of the whole server. It does not permit running code."""
EVERY_SCOPE = (*SCOPES, METRICS)
OPERATOR = frozenset(EVERY_SCOPE)

LOCAL = "local"
"""Name of the principal on stdio, and of a server without several principals."""

PRINCIPAL = re.compile(r"(?!\.+$)[A-Za-z0-9._@-]{1,64}")
"""Valid names of principals in the tokens file; each is also a valid folder name."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller, who owns sessions, files and cells.

    name    unique in the server: the name in its row, or made of issuer and subject
    scopes  scopes of its token
    quotas  its own quotas, which override `--quota`
    grants  the server's grants that it may use: `mount:GUEST`, `env:NAME`, `secret:NAME`,
            `device:PATH`, `kernel:NAME`, `tools:NAME`, `network`, `attach`, `ask`; `*` for all
    """

    name: str = LOCAL
    scopes: frozenset[str] = frozenset(SCOPES)
    quotas: Quotas = field(default_factory=Quotas)
    grants: tuple[str, ...] = ("*",)

    def require(self, scope: str, what: str) -> None:
        """Raise Forbidden unless the token has `scope`, which `what` requires."""
        if scope not in self.scopes:
            raise Forbidden(
                f"{what} takes the scope {scope}, which the token of this call lacks. Ask the "
                "operator for one that has it, or do without."
            )


def folder_name(principal: str) -> str:
    """Return the folder name of a principal: its name if that is valid, else a hash of it."""
    if PRINCIPAL.fullmatch(principal):
        return principal
    return "p-" + hashlib.sha256(principal.encode()).hexdigest()[:24]


class Unauthenticated(KernelMcpError):
    """A token is missing or not valid; the message does not say why."""


class Forbidden(KernelMcpError):
    """A token lacks a scope; nothing was done."""


class VerifierUnavailable(KernelMcpError):
    """A token cannot be verified at the moment; the same token may be valid later."""


class Verifier(Protocol):
    """Finds the principal of a token."""

    async def verify(self, token: str) -> Principal:
        """Return the principal of a token. Raises Unauthenticated, VerifierUnavailable."""

    async def aclose(self) -> None:
        """Release resources."""


class OneToken:
    """Verifier of one token, generated when the server starts, for the principal LOCAL."""

    def __init__(self) -> None:
        self.token = new_token()
        self._principal = Principal(scopes=OPERATOR)

    async def verify(self, token: str) -> Principal:
        """Return the principal LOCAL for this token. Raises Unauthenticated."""
        if not hmac.compare_digest(digest(token), digest(self.token)):
            raise Unauthenticated(INVALID)
        return self._principal

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


INVALID = "The token is not valid here: it is wrong, was revoked, or has expired."


def digest(token: str) -> bytes:
    """Return the SHA-256 of a token; tokens themselves are not stored."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


TOKEN_PREFIX = "kmcp_"
"""Prefix of generated tokens, by which secret scanners find leaked ones."""


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)
