"""Who calls: principals, what they may do, and what proves that a request is one of theirs."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import field
from typing import Protocol

from kernel_mcp.config.values import Quotas
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.records import dataclass

RUN = "kernel:run"
"""The scope that every call takes."""
INSTALL = "kernel:install"
"""The scope that adding packages takes."""
SCOPES = (RUN, INSTALL)
"""Those of a principal of whom nothing else is said."""
METRICS = "kernel:metrics"
"""The scope of operators, who may see what the whole server does. It runs no code."""
EVERY_SCOPE = (*SCOPES, METRICS)
OPERATOR = frozenset(EVERY_SCOPE)

LOCAL = "local"
"""The principal of stdin and stdout, and of a server that knows no others."""

PRINCIPAL = re.compile(r"(?!\.+$)[A-Za-z0-9._@-]{1,64}")
"""What a principal may be called; `--workspace` may have a folder of that name."""


@dataclass(frozen=True, slots=True)
class Principal:
    """One who calls. Sessions, files and cells belong to a principal.

    name    its name, unique among all of a server: that of its row, or made of issuer and subject
    scopes  what its token is good for
    quotas  its own, where they differ from `--quota`
    doors   what it may use of the server's doors: `mount:GUEST`, `env:NAME`, `secret:NAME`,
            `device:PATH`, `network`, `attach`; `*` for all
    """

    name: str = LOCAL
    scopes: frozenset[str] = frozenset(SCOPES)
    quotas: Quotas = field(default_factory=Quotas)
    doors: tuple[str, ...] = ("*",)

    def require(self, scope: str, what: str) -> None:
        """Raise Forbidden unless its token is good for that."""
        if scope not in self.scopes:
            raise Forbidden(
                f"{what} takes the scope {scope}, which the token of this call lacks. Ask the "
                "operator for one that has it, or do without."
            )


def folder_name(principal: str) -> str:
    """The folder of a principal: its name where that can be one, else a hash of it."""
    if PRINCIPAL.fullmatch(principal):
        return principal
    return "p-" + hashlib.sha256(principal.encode()).hexdigest()[:24]


class Unauthenticated(KernelMcpError):
    """A token is missing or proves nothing; the text says no more than that."""


class Forbidden(KernelMcpError):
    """A token is not good for what it was used for; nothing was done."""


class VerifierUnavailable(KernelMcpError):
    """Nobody can say now whose a token is; the same token may be good in a moment."""


class Verifier(Protocol):
    """Knows whose a token is."""

    async def verify(self, token: str) -> Principal:
        """The principal of a token. Raises Unauthenticated, VerifierUnavailable."""

    async def aclose(self) -> None:
        """Let go of what it holds."""


class OneToken:
    """A token that the server makes at its start; who has it is `LOCAL`."""

    def __init__(self) -> None:
        self.token = new_token()
        self._principal = Principal(scopes=OPERATOR)

    async def verify(self, token: str) -> Principal:
        """See `Verifier`."""
        if not hmac.compare_digest(digest(token), digest(self.token)):
            raise Unauthenticated(INVALID)
        return self._principal

    async def aclose(self) -> None:
        """See `Verifier`."""


INVALID = "The token is not valid here: it is wrong, was revoked, or has expired."


def digest(token: str) -> bytes:
    """What is kept and compared of a token: SHA-256."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


TOKEN_PREFIX = "kmcp_"
"""What our own tokens begin with, so that those who search for lost secrets find them."""


def new_token() -> str:
    """A token of 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)
