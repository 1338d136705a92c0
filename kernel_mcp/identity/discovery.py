"""Discovery of an authorization server's metadata: RFC 8414, OpenID Connect Discovery."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx2

from kernel_mcp.errors import ConfigError
from kernel_mcp.units import KIB

MOST_BYTES = 256 * KIB
"""Most bytes of a document; large key sets have 50 KiB."""
FETCH_S = 5.0
"""Timeout in seconds for a document, from the connection to its last byte."""
_OAUTH = "/.well-known/oauth-authorization-server"
_OPENID = "/.well-known/openid-configuration"

Fetch: TypeAlias = Callable[[str], Awaitable[dict[str, Any]]]
"""Function that fetches a JSON object from a URL. Raises Unreachable."""


class Unreachable(Exception):
    """A document is not available; the message is the reason.

    absent  True if the server answered that there is none
    """

    def __init__(self, text: str, *, absent: bool = False) -> None:
        super().__init__(text)
        self.absent = absent


def checked_issuer(issuer: str) -> str:
    """Return the issuer's identifier unchanged. Raises ConfigError if it is not valid."""
    if reason := insecure(issuer):
        raise ConfigError(f"--issuer {issuer}: {reason}")
    if "?" in issuer or "#" in issuer:
        raise ConfigError(f"--issuer {issuer}: an issuer has neither a query nor a fragment")
    return issuer


def insecure(url: str) -> str:
    """Return why a URL is not safe to fetch keys from; empty if it is."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number
    except ValueError:
        return "that is no address"
    if not parts.hostname or parts.username is not None or parts.password is not None:
        return "expected https://HOST, without a user"
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname)):
        return ""
    return "keys that came by anything but https could be anyone's (http: on loopback alone)"


def is_loopback(host: str) -> bool:
    """Return True if a host is `localhost` or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def documents(issuer: str) -> tuple[str, ...]:
    """Return the URLs of an issuer's metadata, in the order of the MCP specification."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    found = (f"{origin}{_OAUTH}{path}", f"{origin}{_OPENID}{path}", f"{origin}{path}{_OPENID}")
    return tuple(dict.fromkeys(found))


async def keys_address(issuer: str, fetch: Fetch) -> str:
    """Return the URL of an issuer's key set. Raises Unreachable."""
    reason = ""
    for url in documents(issuer):
        try:
            document = await fetch(url)
        except Unreachable as error:
            reason = reason or str(error)
            if error.absent:
                continue
            break
        named = document.get("issuer")
        if named != issuer:  # RFC 8414, section 3.3
            reason = f"{url} is of the issuer {str(named)[:200]!r}: --issuer has to be the same"
            continue
        address = document.get("jwks_uri")
        if not isinstance(address, str):
            reason = f"{url} names no `jwks_uri`"
            continue
        if insecure(address) or (issuer.startswith("https:") and not address.startswith("https:")):
            reason = f"{url} names keys at {address[:200]!r}, which is not https"
            continue
        return address
    raise Unreachable(reason)


async def fetch_json(url: str) -> dict[str, Any]:
    """Fetch a JSON object without redirects, in bounded time and size. Raises Unreachable."""
    try:
        with anyio.fail_after(FETCH_S):
            return _object(await _body(url), url)
    except TimeoutError:
        raise Unreachable(f"{url} did not answer within {FETCH_S:.0f} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error


async def _body(url: str) -> bytes:
    local = is_loopback(urlsplit(url).hostname or "")
    # in a thread: it creates a TLS context, which reads all certificates of the system
    client = await anyio.to_thread.run_sync(
        lambda: httpx2.AsyncClient(trust_env=not local, follow_redirects=False, timeout=FETCH_S)
    )
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    body = b""
    async with client, client.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            raise Unreachable(
                f"{url} answers {response.status_code}",
                absent=400 <= response.status_code < 500 and response.status_code != 429,
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise Unreachable(f"{url} answers with a compressed document, which nobody asked for")
        async for part in response.aiter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise Unreachable(f"{url} has more than {MOST_BYTES // KIB} KiB")
    return body


def _object(body: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"{url} is no JSON object")
    return found
