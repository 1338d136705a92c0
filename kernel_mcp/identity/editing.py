"""Changes of a tokens file: whole or not at all, one after another, other rows byte for byte."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kernel_mcp.config.values import quotas
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.identity import EVERY_SCOPE, SCOPES, digest, new_token
from kernel_mcp.identity.rows import Row, doors_named, parse, principal_named, scopes_named
from kernel_mcp.identity.tokens import read_open
from kernel_mcp.linux.folders import require_unshared

LEAST_PREFIX = 4
"""Digits of a hash that name a token."""


def add(
    path: Path,
    principal: str,
    *,
    now: str,
    scopes: Sequence[str] = (),
    quota: Mapping[str, Any] | None = None,
    doors: Sequence[str] | None = None,
) -> str:
    """A new token of `principal`, whose row is in the file then; the file is made if need be.

    Without `quota` and `doors` those of the principal's other rows hold. Raises KernelMcpError.
    """
    try:
        principal_named(principal)
        scopes_named(scopes)
        doors_named(doors or ())
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
        for key, value in (("quotas", quota), ("doors", doors)):
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
        _replace(place, opened, content)
    return token


def revoke(path: Path, unwanted: Callable[[Row], bool]) -> list[Row]:
    """Remove rows; those that were. Raises KernelMcpError."""
    with _held(path, make=False) as (place, opened):
        content, rows = _content(opened, path)
        gone = [row for row in rows if unwanted(row)]
        if gone:
            _replace(place, opened, _without(content, {row.line for row in gone}))
    return gone


def listed(path: Path) -> tuple[Row, ...]:
    """The rows of a file. Raises KernelMcpError."""
    with _explained(path), path.open("rb") as opened:
        return read_open(opened, path)[0]


def _table_of(content: bytes, row: Row | None) -> dict[str, Any]:
    """What the line of a row has, as it is written."""
    if row is None:
        return {}
    found = json.loads(content.split(b"\n")[row.line - 1])
    assert isinstance(found, dict)
    return found


def _without(content: bytes, numbers: Collection[int]) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join(line for number, line in enumerate(lines, 1) if number not in numbers)


def _content(opened: BinaryIO, path: Path) -> tuple[bytes, tuple[Row, ...]]:
    """What is in a file that is valid as it is."""
    rows, _ = read_open(opened, path)
    opened.seek(0)
    return opened.read(), rows


@contextmanager
def _held(path: Path, *, make: bool) -> Iterator[tuple[Path, BinaryIO]]:
    """The file, which no other of these commands changes meanwhile, behind all links.

    The lock is on the file itself: who may not open it cannot hold it up.
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
            opened.close()  # another command has put a new one there
        yield place, opened


def _is_still(place: Path, opened: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(opened.fileno()), place.stat())
    except FileNotFoundError:
        return False


def _replace(place: Path, opened: BinaryIO, content: bytes) -> None:
    """Put a new file with the owner of the old one in its place."""
    old = os.fstat(opened.fileno())
    fd, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    fresh = Path(name)
    try:
        with open(fd, "wb") as written:
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, old.st_uid, old.st_gid)
            os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o644 | 0o600)
            written.write(content)
            written.flush()
            os.fsync(fd)
        fresh.rename(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the system in one line."""
    try:
        yield
    except FileNotFoundError:
        missing = path if path.parent.is_dir() else path.parent
        raise KernelMcpError(f"{path}: there is no {missing}") from None
    except OSError as error:
        raise KernelMcpError(f"{path}: {error.strerror or error}") from error
