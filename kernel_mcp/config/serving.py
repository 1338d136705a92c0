"""Check the combination of settings for serving over HTTP."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from kernel_mcp.config.settings import GRANTS, OPTIONS, Settings
from kernel_mcp.errors import ConfigError


def check_serving(settings: Settings) -> None:
    """Raise ConfigError for settings that contradict each other."""
    if settings.fleet_store and not settings.fleet:
        raise ConfigError(
            "--fleet-store: it is for the nodes of a fleet: kernel-mcp node --fleet HOST:PORT "
            "--fleet-store PLACE"
        )
    if settings.http is None:
        _check_stdio(settings)
        return
    host, _ = settings.http
    if settings.no_auth:
        _check_open(settings, host)
    if settings.several and not settings.confined:
        raise ConfigError(
            "--sandbox none: with --tokens or --issuer there may be several principals, and "
            "without a sandbox the code of each can read the files of all. Take a sandbox, or "
            "leave --tokens and --issuer out"
        )
    if settings.issuer and not settings.public_url and not is_loopback(host):
        raise ConfigError(
            "--issuer: access tokens name the address that they are for; say which that is with "
            "--public-url, such as https://notebook.example.com"
        )
    if settings.public_url:
        _check_url(settings.public_url)


def is_loopback(host: str) -> bool:
    """Return True if an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_stdio(settings: Settings) -> None:
    """Raise ConfigError for flags that need HTTP.

    `--tokens` and `--public-url` are permitted, as `kernel-mcp token` uses them.
    """
    given = {
        "--issuer": settings.issuer,
        "--no-auth": settings.no_auth,
        "--trusted-proxy": settings.proxies,
        "--sse": settings.sse,
    }
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"{flag}: it is about a server on HTTP, and this one speaks MCP over stdin and "
                "stdout. Add --http HOST:PORT, such as --http 127.0.0.1:8000"
            )


def _check_open(settings: Settings, host: str) -> None:
    if settings.tokens is not None or settings.issuer:
        raise ConfigError(
            "--no-auth serves everyone, --tokens and --issuer do not: leave one of them out"
        )
    if not is_loopback(host):
        raise ConfigError(
            f"--no-auth: whoever reaches {host} could run code here. Listen on 127.0.0.1, or leave "
            "--no-auth out: the server then makes a token and prints it"
        )
    for option in OPTIONS:
        if option.group == GRANTS and getattr(settings, option.field):
            flag = "--gpu" if settings.gpu and option.field == "devices" else option.flag
            raise ConfigError(
                f"{flag}: with --no-auth every program of this machine and every user of it could "
                "use that. Leave --no-auth out: the server then makes a token and prints it"
            )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"--public-url {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"--public-url {url}: expected an address such as https://notebook.example.com"
        )
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"--public-url {url}: it may have a host, a port and a path, and nothing else"
        )
    if parts.path.rstrip("/").endswith("/mcp"):
        raise ConfigError(f"--public-url {url}: give it without /mcp, where MCP is served below it")
