"""An authorization server without a network: keys, the documents about them, and tokens."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from kernel_mcp.identity.discovery import Unreachable

ISSUER = "https://as.example"
AUDIENCE = "https://kernels.example/mcp"
_KINDS: dict[str, Any] = {
    "RS256": RSAAlgorithm,
    "PS256": RSAAlgorithm,
    "ES256": ECAlgorithm,
    "ES384": ECAlgorithm,
    "EdDSA": OKPAlgorithm,
}


class Clock:
    """A clock that stands still between two steps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def private_key(algorithm: str, bits: int = 2048) -> Any:
    """A fresh key."""
    if algorithm in ("RS256", "PS256"):
        return rsa.generate_private_key(65537, bits)
    if algorithm.startswith("ES"):
        return ec.generate_private_key(ec.SECP256R1() if algorithm == "ES256" else ec.SECP384R1())
    return ed25519.Ed25519PrivateKey.generate()


def public_jwk(algorithm: str, key: Any, name: str, **more: Any) -> dict[str, Any]:
    """The public half of a key, as sets have it."""
    found = json.loads(_KINDS[algorithm].to_jwk(key.public_key()))
    return {**found, "kid": name, "use": "sig", **more}


def encoded(value: object) -> str:
    """A part of a token: bytes, or what JSON has for a value."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def forged(token: str, header: dict[str, Any], secret: bytes = b"") -> str:
    """A token with another header: with its old signature, one by a secret, or none for `none`."""
    first, payload, signature = token.split(".")
    old = json.loads(base64.urlsafe_b64decode(first + "=="))
    start = f"{encoded({**old, **header})}.{payload}"
    if secret:
        signature = encoded(hmac.digest(secret, start.encode(), "sha256"))
    elif str(header.get("alg")).lower() == "none":
        signature = ""
    return f"{start}.{signature}"


class FakeIssuer:
    """Answers as the server of an issuer.

    asked  what was fetched
    down   why nothing can be, empty for nothing
    """

    def __init__(self, issuer: str = ISSUER) -> None:
        self.issuer = issuer
        self.keys: dict[str, tuple[str, Any]] = {}
        self.asked: list[str] = []
        self.down = ""
        self.pages: dict[str, dict[str, Any]] = {
            f"{issuer}/.well-known/oauth-authorization-server": {
                "issuer": issuer,
                "jwks_uri": f"{issuer}/jwks",
            }
        }

    def make(self, algorithm: str = "ES256", name: str = "k") -> None:
        """Publish a fresh key."""
        self.keys[name] = (algorithm, private_key(algorithm))

    async def fetch(self, url: str) -> dict[str, Any]:
        """See `Fetch`."""
        self.asked.append(url)
        if self.down:
            raise Unreachable(self.down)
        if url == f"{self.issuer}/jwks":
            found = [public_jwk(kind, key, name) for name, (kind, key) in self.keys.items()]
            return {"keys": found}
        if url not in self.pages:
            raise Unreachable(f"{url} answers 404", absent=True)
        return self.pages[url]

    def token(
        self,
        *,
        kid: str | None = "k",
        key: Any = None,
        algorithm: str = "",
        header: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """A good token but for what is said; a claim that is None is left out."""
        kind, own = self.keys.get(kid or "", ("ES256", None))
        now = int(time.time())
        said = {
            "iss": self.issuer,
            "sub": "alice",
            "aud": AUDIENCE,
            "exp": now + 600,
            "iat": now,
            "scope": "kernel:run kernel:install",
            **claims,
        }
        head = {"typ": "at+jwt", **({"kid": kid} if kid is not None else {}), **(header or {})}
        return jwt.encode(
            {name: value for name, value in said.items() if value is not None},
            key if key is not None else own,
            algorithm=algorithm or kind,
            headers=head,
        )
