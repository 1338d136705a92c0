"""Access tokens of an OAuth 2.1 authorization server: the server as a resource server.

JWT access tokens (RFC 9068) for this resource (RFC 8707), checked with the issuer's public keys.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jwt

from kernel_mcp.identity import (
    EVERY_SCOPE,
    INVALID,
    PRINCIPAL,
    SCOPES,
    Principal,
    Unauthenticated,
    digest,
)
from kernel_mcp.identity.discovery import Fetch, checked_issuer, fetch_json
from kernel_mcp.identity.keys import ALGORITHMS, SigningKeys
from kernel_mcp.identity.tokens import TokenFile
from kernel_mcp.units import KIB

logger = logging.getLogger(__name__)

KNOWN_S = 60.0
"""Seconds for which a verified token is cached."""
MOST_KNOWN = 1024
MOST_TOKEN = 8 * KIB
LEEWAY_S = 30
"""Tolerated difference of clocks, in seconds."""
_REQUIRED = ("exp", "iss", "aud", "sub")
_ACCESS_TOKEN = ("at+jwt", "application/at+jwt")
_OF_ID_TOKENS = ("nonce", "at_hash", "c_hash")


def metadata(url: str, issuer: str) -> dict[str, Any]:
    """Return the protected resource metadata (RFC 9728) of a server at `url`."""
    return {
        "resource": resource_of(url),
        "resource_name": "kernel-mcp",
        "authorization_servers": [issuer],
        "scopes_supported": list(SCOPES),
        "bearer_methods_supported": ["header"],
    }


def metadata_url(url: str) -> str:
    """Return the URL of the metadata. `url` may have a path, which a proxy strips."""
    return f"{url.rstrip('/')}/.well-known/oauth-protected-resource/mcp"


def resource_of(url: str) -> str:
    """Return the resource that tokens are issued for: the MCP endpoint of a server at `url`."""
    return f"{url.rstrip('/')}/mcp"


def principal_name(issuer: str, subject: str) -> str:
    """Return the principal name of an issuer's subject: `SUBJECT@MARK`.

    MARK is a hash of the issuer. A subject that is no valid name is replaced by a hash. Rows of a
    tokens file may not have such names (`token_rows.ISSUED`). So a subject chosen at the issuer
    cannot take over the sessions of a row, nor the reverse.
    """
    mark = hashlib.sha256(issuer.encode()).hexdigest()[:8]
    name = f"{subject}@{mark}"
    if PRINCIPAL.fullmatch(name) and not subject.startswith("p-"):
        return name
    return f"p-{hashlib.sha256(subject.encode(errors='surrogatepass')).hexdigest()[:32]}@{mark}"


class Issuer:
    """Verifier of the access tokens of one authorization server.

    Rows of a tokens file limit the permissions of tokens with a claim. Invalid tokens are not
    cached: refusing one needs no request and costs less than caching it.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        *,
        tokens: TokenFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        fetch: Fetch = fetch_json,
    ) -> None:
        """`audience` is the resource that tokens have to be issued for. Raises ConfigError."""
        self._issuer = checked_issuer(issuer)
        self._audience = (audience.rstrip("/"), audience.rstrip("/") + "/")
        self._tokens = tokens
        self._clock = clock
        self._keys = SigningKeys(issuer, clock=clock, fetch=fetch)
        self._known: OrderedDict[bytes, tuple[float, Mapping[str, Any]]] = OrderedDict()

    async def verify(self, token: str) -> Principal:
        """Return the principal of an access token. Raises Unauthenticated, VerifierUnavailable."""
        return await self._principal(await self._claims(token))

    async def prepare(self) -> None:
        """Fetch the issuer's keys before the first call; a failure is logged."""
        await self._keys.prepare()

    async def aclose(self) -> None:
        """Forget the verified tokens."""
        self._known.clear()

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a valid token, perhaps cached. Raises Unauthenticated."""
        name = digest(token)
        until, claims = self._known.get(name, (0.0, {}))
        if claims and self._clock() < until:
            return claims
        self._known.pop(name, None)
        try:
            claims = await self._checked(token)
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            logger.info("an access token was refused: %s", error)
            raise Unauthenticated(INVALID) from None
        left_s = min(int(KNOWN_S), int(claims["exp"]) - math.ceil(time.time()))
        if left_s > 0:
            self._known[name] = (self._clock() + left_s, claims)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return claims

    async def _checked(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token, verified.

        Raises PyJWTError, ValueError, VerifierUnavailable.
        """
        if len(token) > MOST_TOKEN:
            raise ValueError("it is too long")
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            raise ValueError("its algorithm is none of those")
        if "crit" in header:
            raise ValueError("its header demands what nobody here knows")
        kind = header.get("typ", "")
        if not isinstance(kind, str) or kind.lower() not in (*_ACCESS_TOKEN, "jwt", ""):
            raise ValueError("its type is that of no access token")
        key = await self._keys.key(header.get("kid", ""), algorithm)
        if key is None:
            raise ValueError("its key is none of the issuer's")
        claims = jwt.decode(
            token,
            key.public,
            algorithms=[algorithm],
            audience=self._audience,
            issuer=self._issuer,
            leeway=LEEWAY_S,
            options={"require": list(_REQUIRED)},
        )
        if not claims["sub"]:
            raise ValueError("its subject is empty")
        if "cnf" in claims:
            raise ValueError("it is bound to a key of its client, of which a header proves nothing")
        if kind.lower() not in _ACCESS_TOKEN:
            _require_access_token(claims)
        return claims

    async def _principal(self, claims: Mapping[str, Any]) -> Principal:
        scopes = scopes_of(claims)
        row = await self._tokens.claimed(claims) if self._tokens is not None else None
        name = principal_name(self._issuer, claims["sub"])
        if row is None:
            return Principal(name, scopes, grants=())
        return Principal(row.principal or name, scopes & row.scopes, row.quotas, row.grants)


def scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    """Return the scopes of a token that are known here, from `scope` (RFC 9068) and `scp`."""
    found: set[str] = set()
    for name in ("scope", "scp"):
        given = claims.get(name)
        words = given.split() if isinstance(given, str) else given
        if isinstance(words, list):
            found.update(each for each in words if isinstance(each, str))
    return frozenset(found.intersection(EVERY_SCOPE))


def _require_access_token(claims: Mapping[str, Any]) -> None:
    """Raise ValueError if a token without the type of access tokens may be an ID token.

    Many issuers set no type. ID tokens have no scope, and may have a nonce.
    """
    if not ("scope" in claims or "scp" in claims):
        raise ValueError("it has neither the type of an access token nor a scope")
    if any(name in claims for name in _OF_ID_TOKENS):
        raise ValueError("it is an ID token")
