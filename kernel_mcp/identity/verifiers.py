"""What proves who calls, as the settings say."""

from __future__ import annotations

from collections.abc import Callable

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
    """Tokens with our prefix are those of the file, all others the issuer's."""

    def __init__(self, tokens: TokenFile | None, issuer: Issuer | None) -> None:
        self._tokens = tokens
        self._issuer = issuer

    async def verify(self, token: str) -> Principal:
        """See `Verifier`."""
        ours = token.startswith(TOKEN_PREFIX)
        asked: Verifier | None = self._tokens if ours else self._issuer
        if asked is None:
            raise Unauthenticated(INVALID)
        return await asked.verify(token)

    def doors(self) -> dict[str, str]:
        """Doors that rows of the file name, each with the row that does so first."""
        rows = self._tokens.rows if self._tokens is not None else ()
        return {
            door: f"row {row.line} ({row.principal or row.claim})"
            for row in reversed(rows)
            for door in row.doors
        }

    def tell(self, told: Callable[[str], None]) -> None:
        """Have `told` called, in a thread, with what is new of the file."""
        if self._tokens is not None:
            self._tokens.told = told

    async def prepare(self) -> None:
        """Have what the first call needs; what fails is logged."""
        if self._issuer is not None:
            await self._issuer.prepare()

    async def aclose(self) -> None:
        """See `Verifier`."""
        for each in (self._tokens, self._issuer):
            if each is not None:
                await each.aclose()


def verifier_of(settings: Settings, url: str) -> Verifiers | OneToken | None:
    """What the settings of a server at `url` demand; None for nothing. Raises ConfigError."""
    if settings.no_auth:
        return None
    if not settings.several:
        return OneToken()
    tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
    if not settings.issuer:
        return Verifiers(tokens, None)
    return Verifiers(tokens, Issuer(settings.issuer, resource_of(url), tokens=tokens))
