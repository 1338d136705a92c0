"""Verifiers of tokens, as the settings demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kernel_mcp.config.settings import Settings
from kernel_mcp.identity import (
    INVALID,
    TOKEN_PREFIX,
    OneToken,
    Principal,
    Unauthenticated,
    Verifier,
)
from kernel_mcp.identity.issuer import Issuer, resource_of
from kernel_mcp.identity.tokens import TokenFile


class Verifiers:
    """Verifier by the tokens file for tokens with TOKEN_PREFIX, and by the issuer for others."""

    def __init__(self, tokens: TokenFile | None, issuer: Issuer | None) -> None:
        self._tokens = tokens
        self._issuer = issuer

    async def verify(self, token: str) -> Principal:
        """Return the principal by the file or by the issuer. Raises as these do."""
        ours = token.startswith(TOKEN_PREFIX)
        asked: Verifier | None = self._tokens if ours else self._issuer
        if asked is None:
            raise Unauthenticated(INVALID)
        return await asked.verify(token)

    def grants(self) -> dict[str, str]:
        """Return the grants that rows of the file name, each with the first row that names it."""
        rows = self._tokens.rows if self._tokens is not None else ()
        return {
            grant: f"row {row.line} ({row.principal or row.claim})"
            for row in reversed(rows)
            for grant in row.grants
        }

    def on_tokens_change(self, told: Callable[[str], None]) -> None:
        """Call `told`, in a thread, with a message about each change of the tokens file."""
        if self._tokens is not None:
            self._tokens.on_change = told

    async def watch(self, ended: Callable[[frozenset[str]], Awaitable[None]]) -> None:
        """See `TokenFile.watch`; without a file there is nothing to look for."""
        if self._tokens is not None:
            await self._tokens.watch(ended)

    async def prepare(self) -> None:
        """Fetch the issuer's keys, which the first call needs; a failure is logged."""
        if self._issuer is not None:
            await self._issuer.prepare()

    async def aclose(self) -> None:
        """Release the resources of both."""
        for each in (self._tokens, self._issuer):
            if each is not None:
                await each.aclose()


def verifier_of(settings: Settings, url: str) -> Verifiers | OneToken | None:
    """Return the verifier for a server at `url`, or None with `--no-auth`. Raises ConfigError."""
    if settings.no_auth:
        return None
    if not settings.several:
        return OneToken()
    tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
    if not settings.issuer:
        return Verifiers(tokens, None)
    return Verifiers(tokens, Issuer(settings.issuer, resource_of(url), tokens=tokens))
