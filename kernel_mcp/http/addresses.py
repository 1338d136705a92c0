"""Hosts and origins that requests to a server may name."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from kernel_mcp.config.serving import is_loopback

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Addresses:
    """The hosts and origins that requests may name; every host with `any_host`."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str], *, any_host: bool) -> None:
        self._hosts = frozenset(each.lower() for each in hosts)
        self._origins = frozenset(each.lower() for each in origins)
        self._any = any_host

    @classmethod
    def of(cls, host: str, public_url: str) -> Addresses:
        """Return the addresses of a server bound to `host`; `public_url` may be empty.

        A server bound to all interfaces without `public_url` accepts every host.
        """
        own = f"[{host}]" if ":" in host else host
        wild = host in ("0.0.0.0", "::")
        hosts = [own, *(_LOOPBACK if is_loopback(host) or wild else ())]
        origins = [f"http://{each}" for each in hosts]
        if public_url:
            parts = urlsplit(public_url)
            hosts.append(parts.netloc)
            origins.append(f"{parts.scheme}://{parts.netloc}")
        return cls(hosts, origins, any_host=wild and not public_url)

    def host(self, given: str) -> bool:
        """Return True if a `Host` header names this server, with any port."""
        given = given.lower().rstrip(".")
        return bool(given) and (self._any or given in self._hosts or _bare(given) in self._hosts)

    def origin(self, given: str) -> bool:
        """Return True if pages of this `Origin` may call, with any port."""
        given = given.lower()
        scheme, _, netloc = given.partition("://")
        return given in self._origins or f"{scheme}://{_bare(netloc)}" in self._origins


def _bare(netloc: str) -> str:
    """Return the host of `HOST[:PORT]`."""
    host, colon, port = netloc.rpartition(":")
    return host if colon and port.isdecimal() else netloc
