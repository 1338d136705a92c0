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

from kernel_mcp.config.values import KIB
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

logger = logging.getLogger(__name__)

KNOWN_S = 60.0
"""Seconds for which a token that was checked is not checked again."""
MOST_KNOWN = 1024
MOST_TOKEN = 8 * KIB
LEEWAY_S = 30
"""Seconds that clocks may differ by."""
_REQUIRED = ("exp", "iss", "aud", "sub")
_ACCESS_TOKEN = ("at+jwt", "application/at+jwt")
_OF_ID_TOKENS = ("nonce", "at_hash", "c_hash")


def metadata(url: str, issuer: str) -> dict[str, Any]:
    """The document of RFC 9728 of a server that clients reach at `url`."""
    return {
        "resource": resource_of(url),
        "resource_name": "kernel-mcp",
        "authorization_servers": [issuer],
        "scopes_supported": list(SCOPES),
        "bearer_methods_supported": ["header"],
    }


def metadata_url(url: str) -> str:
    """Where clients find that document; also below a path, which a proxy takes away."""
    return f"{url.rstrip('/')}/.well-known/oauth-protected-resource/mcp"


def resource_of(url: str) -> str:
    """What tokens are for: the address of MCP, of a server that clients reach at `url`."""
    return f"{url.rstrip('/')}/mcp"


def principal_name(issuer: str, subject: str) -> str:
    """What an issuer's subject is called: `SUBJECT@MARK`, where MARK stands for the issuer.

    No row of a tokens file may have such a name (`rows.ISSUED`), so nobody takes over what belongs
    to a row by choosing a name at the issuer, nor the other way, whichever comes or goes.
    """
    mark = hashlib.sha256(issuer.encode()).hexdigest()[:8]
    name = f"{subject}@{mark}"
    if PRINCIPAL.fullmatch(name) and not subject.startswith("p-"):
        return name
    return f"p-{hashlib.sha256(subject.encode(errors='surrogatepass')).hexdigest()[:32]}@{mark}"


class Issuer:
    """Knows the principals of one authorization server by its access tokens.

    Rows of a tokens file bound what those may do who hold a claim. Tokens that prove nothing are
    not remembered: to refuse one costs less than to remember it, and asks nobody.
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
        """`audience` is the resource that tokens have to be for. Raises ConfigError."""
        self._issuer = checked_issuer(issuer)
        self._audience = (audience.rstrip("/"), audience.rstrip("/") + "/")
        self._tokens = tokens
        self._clock = clock
        self._keys = SigningKeys(issuer, clock=clock, fetch=fetch)
        self._known: OrderedDict[bytes, tuple[float, Mapping[str, Any]]] = OrderedDict()

    async def verify(self, token: str) -> Principal:
        """See `Verifier`."""
        return await self._principal(await self._claims(token))

    async def prepare(self) -> None:
        """Ask for the issuer's keys before anyone calls; what fails is logged."""
        await self._keys.prepare()

    async def aclose(self) -> None:
        """See `Verifier`."""
        self._known.clear()

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """What a token says that is good."""
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
        """The claims of a token. Raises PyJWTError, ValueError, VerifierUnavailable."""
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
            return Principal(name, scopes, doors=())
        return Principal(row.principal or name, scopes & row.scopes, row.quotas, row.doors)


def scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    """Our scopes among those of a token: `scope` (RFC 9068), or `scp` as some issuers call it."""
    found: set[str] = set()
    for name in ("scope", "scp"):
        given = claims.get(name)
        words = given.split() if isinstance(given, str) else given
        if isinstance(words, list):
            found.update(each for each in words if isinstance(each, str))
    return frozenset(found.intersection(EVERY_SCOPE))


def _require_access_token(claims: Mapping[str, Any]) -> None:
    """Tell access tokens without a type of their own, as many issuers make, from ID tokens.

    Those have no scope and may have a nonce. Raises ValueError.
    """
    if not ("scope" in claims or "scp" in claims):
        raise ValueError("it has neither the type of an access token nor a scope")
    if any(name in claims for name in _OF_ID_TOKENS):
        raise ValueError("it is an ID token")
