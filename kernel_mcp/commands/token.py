"""`kernel-mcp token`: manage the tokens of principals that may call a server on HTTP."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kernel_mcp.commands.sessions import state_folder
from kernel_mcp.config.load import HELP, OTHERS, settings_from, settings_parser
from kernel_mcp.config.quotas import Quotas, quotas
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.identity import EVERY_SCOPE, SCOPES, editing
from kernel_mcp.identity.token_rows import GRANTS_ARE, TokenRow
from kernel_mcp.sessions.admin import ask_all
from kernel_mcp.units import format_bytes

_USAGE = "token: expected one of add, list, revoke; see kernel-mcp token --help"
_HELP = """\
usage: kernel-mcp token add|list|revoke [NAME] [flags]

Who may call a server on HTTP: the principals of the file of --tokens, and hashes of their tokens.

  add NAME        make a token of NAME and print it; the file keeps its hash alone
  list            names, scopes, quotas and doors
  revoke NAME     remove all tokens of NAME, or that of --hash DIGITS

A running server knows of each change at the next call. Each has its own flags:
kernel-mcp token add --help"""
_ABOUT = {
    "add": "Make a token and print it, this once. A name may have several, as while one replaces "
    "another.",
    "list": "Names, scopes, quotas, doors, and the first digits of each hash.",
    "revoke": "Remove tokens: calls with them are refused from now on.",
}
_EPILOG = """\
examples:
  kernel-mcp token add alice --tokens tokens.jsonl
  kernel-mcp token add ci --scope kernel:run --quota sessions=2,memory=4G --door network
  kernel-mcp token revoke --hash 3f9a1c2e
"""
_DIGITS = re.compile(rf"[0-9a-f]{{{editing.LEAST_PREFIX},64}}")


def run_token(argv: Sequence[str]) -> int:
    """Run one `token` command and return its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_HELP)
        return 0
    if command not in _ABOUT:
        raise ConfigError(_USAGE)
    epilog = f"{_EPILOG}\n{OTHERS}"
    shown = ("tokens", "quota") if command == "add" else ("tokens",)
    parser = settings_parser(f"kernel-mcp token {command}", _ABOUT[command], epilog, shown=shown)
    if command == "add":
        parser.add_argument("principal", metavar="NAME", help="of the principal")
        parser.add_argument(
            "--scope",
            action="append",
            metavar="SCOPES",
            help=f"what for: {', '.join(EVERY_SCOPE)} (default: {', '.join(SCOPES)})",
        )
        parser.add_argument(
            "--door",
            action="append",
            metavar="DOORS",
            help=f"of the server's that it may use: {GRANTS_ARE}; a comma list, repeatable "
            "(default: none)",
        )
    elif command == "revoke":
        parser.add_argument("principal", metavar="NAME", nargs="?", help="all of this principal")
        parser.add_argument("--hash", metavar="DIGITS", help="the one whose hash begins with these")
    flags = vars(parser.parse_args(list(rest)))
    own = {name: flags.pop(name, None) for name in ("principal", "scope", "door", "hash")}
    quota = flags.pop("quota", None) if command == "add" else None
    settings = settings_from(flags)
    if settings.tokens is None:
        raise ConfigError("no file: name it with --tokens FILE, or set KERNEL_MCP_TOKENS")
    if command == "add":
        return _add(settings, settings.tokens, own, quota)
    if command == "revoke":
        return _revoke(settings.tokens, own["principal"], own["hash"])
    return _list(settings.tokens)


def _add(settings: Settings, path: Path, own: dict[str, Any], quota: str | None) -> int:
    name, (url, known) = str(own["principal"]), _url(settings, path)
    token = editing.add(
        path,
        name,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        scopes=_parts(own["scope"]) or (),
        quota=None if quota is None else _pairs(quota),
        grants=_parts(own["door"]),
    )
    header = '--header "Authorization: Bearer TOKEN"'
    where = "" if known else f", once a server with this file is at {url}"
    print(
        f"kernel-mcp: the token of {name}, of which {path} has the hash alone. For a client{where}:"
        f"\n  claude mcp add --transport http notebook {url}/mcp {header}",
        file=sys.stderr,
        flush=True,
    )
    print(token)
    return 0


def _list(path: Path) -> int:
    rows = editing.listed(path)
    for row in rows:
        words = [
            row.principal or "(by subject)",
            f"claim {row.claim}" if row.claim else row.digest.hex()[:8],
            ",".join(each for each in EVERY_SCOPE if each in row.scopes) or "no scope",
            f"quotas {_quotas_in_words(row.quotas)}",
            f"doors {','.join(row.grants) or 'none'}",
            f"added {row.added or 'by hand'}",
        ]
        print("  ".join(words))
    names = {row.principal for row in rows}
    print(f"{_count(len(rows), 'row')}, {_count(len(names), 'principal')}")
    return 0


def _revoke(path: Path, name: str | None, digits: str | None) -> int:
    if not name and digits is None:
        raise ConfigError("token revoke: expected the NAME of a principal, or --hash DIGITS")
    if digits is not None:
        if not _DIGITS.fullmatch(digits):
            raise ConfigError(
                f"--hash {digits[:70]}: expected {editing.LEAST_PREFIX} to 64 of the digits that "
                "`kernel-mcp token list` shows"
            )
        same = [row for row in editing.listed(path) if row.digest.hex().startswith(digits)]
        if len(same) > 1:
            raise KernelMcpError(f"--hash {digits}: {len(same)} tokens begin so; give more digits")

    def unwanted(row: TokenRow) -> bool:
        if name and row.principal != name:
            return False
        return digits is None or bool(row.digest and row.digest.hex().startswith(digits))

    gone = editing.revoke(path, unwanted)
    if not gone:
        which = " and ".join(
            part
            for part in (f"of {name}" * bool(name), f"with --hash {digits}" * bool(digits))
            if part
        )
        raise KernelMcpError(f"{path} has no row {which}; `kernel-mcp token list` has them all")
    for row in gone:
        print(f"revoked {row.digest.hex()[:8] or f'claim {row.claim}'} of {row.principal}")
    return 0


def _parts(given: Sequence[str] | None) -> list[str] | None:
    """Return the entries of comma lists; None if no list was given."""
    if given is None:
        return None
    return [part.strip() for each in given for part in each.split(",") if part.strip()]


def _pairs(given: str) -> dict[str, str]:
    """Return quotas as written, by name. Raises ConfigError."""
    try:
        quotas(given)
    except ValueError as error:
        raise ConfigError(f"--quota {given}: {error}") from None
    pairs = [part.partition("=") for part in given.split(",") if part.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _quotas_in_words(given: Quotas) -> str:
    found = []
    for each in fields(given):
        value = getattr(given, each.name)
        if value is not None:
            sized = each.name in ("memory", "disk", "body") and value
            found.append(f"{each.name}={format_bytes(value) if sized else format(value, 'g')}")
    return ",".join(found) or "of the server"


def _url(settings: Settings, path: Path) -> tuple[str, bool]:
    """Return the address of a server with this tokens file, and True if it is known.

    It is that of a running server, else that of the settings.
    """
    served: Mapping[str, Any] = {}
    with suppress(ConfigError):  # others could answer in the folder
        for each in ask_all(state_folder(settings)):
            served = each if each.get("tokens") == os.path.realpath(path) else served
    address = served.get("http") or "{}:{}".format(*settings.http or ("127.0.0.1", 8000))
    host, _, port = address.rpartition(":")
    url = served.get("public_url") or settings.public_url
    url = url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return url.rstrip("/"), bool(served or settings.public_url or settings.http)


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
