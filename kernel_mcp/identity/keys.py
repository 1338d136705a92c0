"""Signing keys of an issuer: fetched, cached, and refreshed when they change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import jwt

from kernel_mcp.identity import VerifierUnavailable
from kernel_mcp.identity.discovery import Fetch, Unreachable, fetch_json, keys_address
from kernel_mcp.records import dataclass

logger = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
"""Accepted signature algorithms: only asymmetric ones."""
FRESH_S = 300.0
"""Seconds until keys are fetched again, so that a withdrawn one soon becomes invalid."""
STALE_S = 3600.0
"""Seconds for which keys are used while the issuer cannot be reached."""
UNKNOWN_S = 30.0
"""Least seconds between two fetches for an unknown key or for a refresh."""
RETRY_S = 5.0
"""Seconds until keys are requested again from an unreachable issuer, while none are valid."""
MOST_KEYS = 100
LEAST_RSA_BITS = 2048
_KINDS: tuple[tuple[tuple[str, str | None], tuple[str, ...]], ...] = (
    (("RSA", None), ("RS256", "PS256")),
    (("EC", "P-256"), ("ES256",)),
    (("OKP", "Ed25519"), ("EdDSA",)),
)
"""Key type and curve, and the algorithms of their signatures."""
_PRIVATE = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A public key, and the `ALGORITHMS` that its signatures may use."""

    id: str
    algorithms: tuple[str, ...]
    public: Any


def usable_keys(document: Mapping[str, Any]) -> tuple[IssuerKey, ...]:
    """Return the keys of a JWK set (RFC 7517) for accepted algorithms. Raises Unreachable."""
    given = document.get("keys")
    if not isinstance(given, list):
        raise Unreachable("the set of keys has no list `keys`")
    found = (_key(each) for each in given[:MOST_KEYS] if isinstance(each, dict))
    return tuple(key for key in found if key is not None)


def _key(given: Mapping[str, Any]) -> IssuerKey | None:
    """Return a key, or None if it is not valid or not for accepted signatures."""
    kind = (given.get("kty"), given.get("crv"))
    algorithms: tuple[str, ...] = next((found for known, found in _KINDS if known == kind), ())
    named, name = given.get("alg"), given.get("kid", "")
    if named is not None:
        algorithms = tuple(each for each in algorithms if each == named)
    operations = given.get("key_ops", ["verify"])
    meant = isinstance(operations, list) and "verify" in operations
    if not algorithms or not meant or given.get("use", "sig") != "sig" or not isinstance(name, str):
        return None
    public = {member: value for member, value in given.items() if member not in _PRIVATE}
    try:
        key = jwt.PyJWK(public, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    if kind[0] == "RSA" and key.key_size < LEAST_RSA_BITS:
        return None
    return IssuerKey(name, algorithms, key)


class SigningKeys:
    """Cached keys of one issuer. Requests are serialized, and rare even with many bad tokens."""

    def __init__(
        self, issuer: str, *, clock: Callable[[], float], fetch: Fetch = fetch_json
    ) -> None:
        self._issuer = issuer
        self._clock = clock
        self._fetch = fetch
        self._turn = anyio.Lock()
        self._keys: tuple[IssuerKey, ...] = ()
        self._fetched = self._asked = -math.inf
        self._reason = ""

    async def key(self, name: str, algorithm: str) -> IssuerKey | None:
        """Return the key with id `name`, or None if the issuer does not have it.

        An empty `name` stands for the only key for `algorithm`. Raises VerifierUnavailable if the
        keys would have to be fetched and the issuer cannot be reached.
        """
        known = self._age <= STALE_S and self._found(name, algorithm) is not None
        if not (known and self._turn.locked()):  # a known key needs no wait for a fetch in progress
            await self._ask(name, algorithm)
        found = self._found(name, algorithm)
        if self._age > STALE_S or (found is None and self._reason):
            raise VerifierUnavailable(
                f"The authorization server {self._issuer} cannot be asked now whose this token is: "
                "keep it, and try again in a moment."
            )
        return found

    async def prepare(self) -> None:
        """Fetch the keys before they are needed; a failure is logged."""
        await self._ask("", "")

    @property
    def _age(self) -> float:
        return self._clock() - self._fetched

    def _found(self, name: str, algorithm: str) -> IssuerKey | None:
        fit = [each for each in self._keys if algorithm in each.algorithms]
        if name:
            return next((each for each in fit if each.id == name), None)
        return fit[0] if len(fit) == 1 else None

    def _wanting(self, name: str, algorithm: str) -> bool:
        """Return True if the keys should be fetched before this key is looked up."""
        since = self._clock() - self._asked
        if self._age > STALE_S:
            return since >= RETRY_S
        if self._age > FRESH_S or self._found(name, algorithm) is None:
            return since >= UNKNOWN_S
        return False

    async def _ask(self, name: str, algorithm: str) -> None:
        if not self._turn.locked() and not self._wanting(name, algorithm):
            return
        async with self._turn:
            if not self._wanting(name, algorithm):
                return
            self._asked = self._clock()
            try:
                keys = usable_keys(await self._fetch(await keys_address(self._issuer, self._fetch)))
                if not keys:
                    raise Unreachable(f"none of its keys is for {', '.join(ALGORITHMS)}")
            except Unreachable as error:
                self._failed(str(error))
                return
            if self._reason:
                logger.warning("the authorization server %s can be asked again", self._issuer)
            self._keys, self._fetched, self._reason = keys, self._clock(), ""

    def _failed(self, reason: str) -> None:
        self._asked = self._clock()
        if reason != self._reason:
            logger.error(
                "the authorization server %s cannot be asked: %s; nobody with a token of it may "
                "call once its keys are unknown or older than %.0f min",
                self._issuer,
                reason,
                STALE_S / 60,
            )
        self._reason = reason
