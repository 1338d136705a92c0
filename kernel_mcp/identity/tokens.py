"""Verification by a tokens file, which is read again when it has changed."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import INVALID, Principal, Unauthenticated, digest
from kernel_mcp.identity.token_rows import MOST_BYTES, TokenRow, parse
from kernel_mcp.linux.folders import require_unshared, trusted_users
from kernel_mcp.records import dataclass

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks for a change of the file while nobody calls."""

UNSETTLED_NS = 100_000_000
"""A file written within this time before it was read may change again without a new timestamp.

File systems keep times by the tick, of at most 10 ms.
"""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Identity of a file's content by its metadata, to detect changes without reading it."""

    device: int = -1
    inode: int = -1
    size: int = -1
    modified_ns: int = -1
    mode: int = -1
    owner: int = -1

    @classmethod
    def of(cls, found: os.stat_result) -> FileVersion:
        """Return the version of a file."""
        return cls(
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_mode,
            found.st_uid,
        )

    @property
    def settled(self) -> bool:
        """True if any later change of the file results in another version."""
        return not 0 <= time.time_ns() - self.modified_ns < UNSETTLED_NS


NO_FILE = FileVersion()


def read_tokens(path: Path) -> tuple[tuple[TokenRow, ...], FileVersion]:
    """Return the rows of a tokens file and its version. Raises ConfigError, OSError.

    ConfigError is also raised if another user may write to the file or replace it.
    """
    try:
        require_unshared(path)
    except PermissionError as error:
        raise ConfigError(str(error)) from None
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
        return read_open(opened, path)


def read_open(opened: BinaryIO, path: Path) -> tuple[tuple[TokenRow, ...], FileVersion]:
    """Return rows and version of a file that is open at its beginning, as `read_tokens` does.

    Raises ConfigError, OSError.
    """
    found = os.fstat(opened.fileno())
    version = FileVersion.of(found)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no file")
    if found.st_uid not in trusted_users():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, who could let anyone in; it has to be a file "
            "of this user or of root"
        )
    if mode & 0o022:
        raise ConfigError(
            f"others may write to {path} (mode {mode:04o}) and so let anyone in; close it with "
            f"`chmod go-w {path}`"
        )
    return parse(opened.read(MOST_BYTES + 1), str(path)), version


class TokenFile:
    """Verifier of the tokens in a file. A changed file is read again at the next call.

    A version with an error is logged and the previous rows stay in force. If the file is removed,
    no token is valid.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._turn = anyio.Lock()
        self._last_message = ""
        self.on_change: Callable[[str], None] = lambda _text: None
        """Called, in a thread, with a message about each change of the file."""
        self._rows: tuple[TokenRow, ...] = ()
        self._version: FileVersion | None = None
        try:
            self._take(*read_tokens(path))
        except FileNotFoundError:
            raise ConfigError(
                f"--tokens {path}: there is no such file; `kernel-mcp token add NAME --tokens "
                f"{path}` makes it"
            ) from None
        except OSError as error:
            raise ConfigError(f"--tokens {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"--tokens: {error}") from None

    @property
    def rows(self) -> tuple[TokenRow, ...]:
        """The rows in force."""
        return self._rows

    async def verify(self, token: str) -> Principal:
        """Return the principal of the row with this token. Raises Unauthenticated."""
        await self.refresh()
        wanted = digest(token)
        found = None
        for row in self._rows:  # all rows, so that timing reveals nothing
            if hmac.compare_digest(row.digest, wanted):
                found = row
        if found is None:
            raise Unauthenticated(INVALID)
        return Principal(found.principal, found.scopes, found.quotas, found.grants)

    async def claimed(self, claims: Mapping[str, Any]) -> TokenRow | None:
        """Return the first row whose claim an access token has, or None."""
        await self.refresh()
        return next((row for row in self._rows if row.claim and row.claim.holds(claims)), None)

    async def aclose(self) -> None:
        """Do nothing: the file is open only while it is read."""

    async def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._seen() == self._version:
            return
        async with self._turn:
            if self._seen() != self._version:
                await anyio.to_thread.run_sync(self._read_again)

    async def watch(self, ended: Callable[[frozenset[str]], Awaitable[None]]) -> None:
        """Look for changes of the file until cancelled, also while nobody calls.

        `ended` gets the principals of which the last row was removed. A file that is missing, or
        has just been written, removes none, as it may be whole in a moment.
        """
        known = self._principals()
        while True:
            await anyio.sleep(LOOK_S)
            with Barrier("following the tokens file"):
                await self.refresh()
                if self._version not in (None, NO_FILE):
                    gone, known = known - self._principals(), self._principals()
                    if gone:
                        await ended(gone)

    def _principals(self) -> frozenset[str]:
        return frozenset(row.principal for row in self._rows)

    def _seen(self) -> FileVersion | None:
        """Return the current version, NO_FILE without a file, or None if it is not known."""
        try:
            return FileVersion.of(self._path.stat())
        except OSError as error:
            return NO_FILE if error.errno in (errno.ENOENT, errno.ENOTDIR) else None

    def _read_again(self) -> None:
        seen = self._seen()
        try:
            self._take(*read_tokens(self._path))
        except (FileNotFoundError, NotADirectoryError):
            self._rows, self._version = (), NO_FILE
            self._report(logging.ERROR, f"{self._path} is gone: nobody may call until it is back")
        except (ConfigError, OSError) as error:
            self._version = seen if seen is not None and seen.settled else None
            self._report(
                logging.ERROR, f"the tokens stay as they were, their file is of no use: {error}"
            )

    def _take(self, rows: tuple[TokenRow, ...], version: FileVersion) -> None:
        changes = _changes(self._rows, rows) if self._last_message else ""
        self._rows = rows
        self._version = version if version.settled else None
        level, text = logging.INFO, f"{self._path} was read: {len(rows)} rows"
        if not rows:
            level = logging.WARNING
            text = f"{self._path} has no rows: nobody may call (kernel-mcp token add)"
        elif version.mode & 0o044:
            level = logging.WARNING
            text = f"others may read {self._path}, which has names and hashes: `chmod go-r` it"
        self._report(level, text, changes)

    def _report(self, level: int, text: str, changes: str = "") -> None:
        """Log a message and call `on_change`, unless it equals the last one without `changes`."""
        if text != self._last_message or changes:
            self._last_message = text
            text = f"{text}; {changes}" if changes else text
            logger.log(level, "%s", text)
            self.on_change(text)


MOST_CHANGES = 20


def _changes(before: Sequence[TokenRow], after: Sequence[TokenRow]) -> str:
    """Return in words which rows were added, removed or changed; empty for none."""
    old, new = (
        {(row.digest, row.claim): replace(row, line=0) for row in rows} for rows in (before, after)
    )
    found = [f"added {_name(new[key])}" for key in new if key not in old]
    found += [f"removed {_name(old[key])}" for key in old if key not in new]
    found += [f"changed {_name(new[key])}" for key in new if key in old and new[key] != old[key]]
    more = [f"and {len(found) - MOST_CHANGES} more"] if len(found) > MOST_CHANGES else []
    return ", ".join(found[:MOST_CHANGES] + more)


def _name(row: TokenRow) -> str:
    which = row.digest.hex()[:8] or f"claim {row.claim}"
    return f"{which} of {row.principal or 'principals by subject'}"
