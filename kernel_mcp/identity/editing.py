"""Changes of a tokens file: atomic, serialized, and with other rows unchanged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kernel_mcp.config.quotas import quotas
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.identity import EVERY_SCOPE, SCOPES, digest, new_token
from kernel_mcp.identity.token_rows import (
    TokenRow,
    grants_named,
    parse,
    principal_named,
    scopes_named,
)
from kernel_mcp.identity.tokens import read_open
from kernel_mcp.linux.folders import replace_file, require_unshared

LEAST_PREFIX = 4
"""Fewest hexadecimal digits of a hash that identify a token."""


def add(
    path: Path,
    principal: str,
    *,
    now: str,
    scopes: Sequence[str] = (),
    quota: Mapping[str, Any] | None = None,
    grants: Sequence[str] | None = None,
) -> str:
    """Add a row with a new token of `principal`, and return the token.

    The file is created if it does not exist. `quota` and `grants` default to those of the
    principal's other rows. Raises KernelMcpError.
    """
    try:
        principal_named(principal)
        scopes_named(scopes)
        grants_named(grants or ())
        quotas(quota or {})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    token = new_token()
    with _held(path, make=True) as (place, opened):
        content, rows = _content(opened, path)
        row: dict[str, Any] = {
            "principal": principal,
            "sha256": digest(token).hex(),
            "scopes": [each for each in EVERY_SCOPE if each in (scopes or SCOPES)],
        }
        known = _table_of(
            content, next((each for each in rows if each.principal == principal), None)
        )
        for key, value in (("quotas", quota), ("doors", grants)):
            chosen = known.get(key) if value is None else value
            if chosen:
                row[key] = chosen
        row["added"] = now
        if content and not content.endswith(b"\n"):
            content += b"\n"
        content += json.dumps(row).encode() + b"\n"
        try:
            parse(content, str(path))
        except ConfigError as error:
            raise KernelMcpError(
                f"{error}. Leave --quota and --door out to have those of the other rows, or revoke "
                "those first"
            ) from None
        replace_file(place, content, most_mode=0o644)
    return token


def revoke(path: Path, unwanted: Callable[[TokenRow], bool]) -> list[TokenRow]:
    """Remove the rows for which `unwanted` is True, and return them. Raises KernelMcpError."""
    with _held(path, make=False) as (place, opened):
        content, rows = _content(opened, path)
        gone = [row for row in rows if unwanted(row)]
        if gone:
            left = _without(content, {row.line for row in gone})
            replace_file(place, left, most_mode=0o644)
    return gone


def listed(path: Path) -> tuple[TokenRow, ...]:
    """Return the rows of a tokens file. Raises KernelMcpError."""
    with _explained(path), path.open("rb") as opened:
        return read_open(opened, path)[0]


def _table_of(content: bytes, row: TokenRow | None) -> dict[str, Any]:
    """Return the JSON object of a row as it is in the file; empty for None."""
    if row is None:
        return {}
    found = json.loads(content.split(b"\n")[row.line - 1])
    assert isinstance(found, dict)
    return found


def _without(content: bytes, numbers: Collection[int]) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join(line for number, line in enumerate(lines, 1) if number not in numbers)


def _content(opened: BinaryIO, path: Path) -> tuple[bytes, tuple[TokenRow, ...]]:
    """Return bytes and rows of an open file. Raises ConfigError if it is not valid."""
    rows, _ = read_open(opened, path)
    opened.seek(0)
    return opened.read(), rows


@contextmanager
def _held(path: Path, *, make: bool) -> Iterator[tuple[Path, BinaryIO]]:
    """Lock the file inside this block; yield its path without symlinks, and the open file.

    The lock is on the file itself, so users who may not open it cannot block it.
    """
    with _explained(path), contextlib.ExitStack() as stack:
        require_unshared(path)
        place = Path(os.path.realpath(path))
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if make else 0)
        while True:
            opened = stack.enter_context(open(os.open(place, flags, 0o600), "r+b"))
            fcntl.flock(opened, fcntl.LOCK_EX)
            if _is_still(place, opened):
                break
            opened.close()  # another command has replaced it
        yield place, opened


def _is_still(place: Path, opened: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(opened.fileno()), place.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert OSErrors of this block to a KernelMcpError that names `path`."""
    try:
        yield
    except FileNotFoundError:
        missing = path if path.parent.is_dir() else path.parent
        raise KernelMcpError(f"{path}: there is no {missing}") from None
    except OSError as error:
        raise KernelMcpError(f"{path}: {error.strerror or error}") from error
