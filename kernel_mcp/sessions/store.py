"""On-disk store of persisted sessions. A crash during a write leaves the old save or the new one.

It is a private folder of this user, which no session can access. An entry has its workspace in `w`,
its packages in `p`, and in `r` its record and the newest dump of its variables. Both are named by a
manifest that is replaced atomically. A server that uses an entry holds flock(2) on a file in `l`,
which Linux releases when the process ends.

Versions that support only format 1 keep records in `k`, and overwrite those that they cannot read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kernel_mcp.linux.folders import private_folder, try_lock
from kernel_mcp.records import dataclass
from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.cell_journal import read_journal
from kernel_mcp.sessions.manifest import (
    COPY,
    ID_CHARS,
    MANIFEST,
    OF_PRINCIPAL,
    Saved,
    SessionKey,
)
from kernel_mcp.sessions.notifications import MOST_NAMES
from kernel_mcp.sessions.store_entry import GONE, JOURNAL_FILE, WORD, StoreEntry, bytes_in, last_use
from kernel_mcp.sessions.words import duration

_ID = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}")
ENDING_S = 5.0
"""Maximum wait, in seconds, for a server that is ending: clients may start the next one before."""
LOOKING_S = 0.1
SECRET_BYTES = 32
_SECRET = "secret"
PAUSE_S = 0.01
_WAS = ".was"
"""Suffix of the file that lists, for the next session of an entry, what was removed, and why."""

ROOM = "others took the room that kept sessions have (--persist)"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """A listed entry. `used` is the time of the last write; `held` is True if it is locked.

    `saved` is None if nothing was saved or the manifest cannot be read.
    """

    id: str
    saved: Saved | None
    bytes: int
    used: float
    held: bool

    @property
    def owner(self) -> str:
        """The principal of its session; empty for sessions of no principal."""
        folder = self.saved.folder if self.saved is not None else ""
        return folder if folder.startswith(OF_PRINCIPAL) else ""


class SessionStore:
    """The entries of this user's sessions below `folder`, which `make` creates if missing.

    They may have `most_bytes` together, 0 for no limit, and expire `most_s` seconds after their
    last use; `now` returns the time in seconds since 1970. All methods are blocking.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        most_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.workspaces = folder / "w"
        self.layers = folder / "p"
        self.records = folder / "r"
        self.former = folder / "k"
        self.most_bytes = most_bytes
        self.most_s = most_s
        self.now = now
        self._folder = folder
        self._locks = folder / "l"

    def make(self) -> None:
        """Create its folders. Raises OSError, such as PermissionError if others can write there."""
        private_folder(self._folder)
        for folder in (self.workspaces, self.layers, self.records, self.former, self._locks):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._take_all_over()

    def secret(self) -> bytes:
        """Return a random key that all servers with this store share. Raises OSError.

        It is made at the first call.
        """
        path = self._folder / _SECRET
        with contextlib.suppress(FileNotFoundError):
            if len(found := path.read_bytes()) == SECRET_BYTES:
                return found
            path.unlink()
        with tempfile.NamedTemporaryFile(dir=self._folder) as made:
            made.write(secrets.token_bytes(SECRET_BYTES))
            made.flush()
            with contextlib.suppress(FileExistsError):  # another server was first
                os.link(made.name, path)
        return path.read_bytes()

    def open(self, key: SessionKey) -> StoreEntry | None:
        """Lock and return the entry of a key, empty if new; None if another server has locked it.

        An expired entry is removed first. Raises OSError.
        """
        lock = self._hold_in_time(key.id)
        if lock is None:
            return None
        entry = self._entry(key, lock)
        try:
            self._take_over(key.id)
            if not entry.folder.exists():
                entry.finish_removal()
            elif self._expired(entry.folder):
                self._leave_word(entry.folder, self._expiry)
                entry.remove()
            entry.removed = self._take_word(key.id)
            entry.make()
        except BaseException:
            entry.close()
            raise
        return entry

    def _entry(self, key: SessionKey, lock: int) -> StoreEntry:
        return StoreEntry(self, key, lock)

    def has(self, key: SessionKey) -> bool:
        """Return True if a key has a save or a cell in the journal, not expired. Raises OSError."""
        folder = self.records / key.id
        saved = any((folder / name).is_file() for name in (MANIFEST, COPY))
        return (saved or bool(read_journal(folder / JOURNAL_FILE))) and not self._expired(folder)

    def _take_all_over(self) -> None:
        """Move all unlocked saves of older versions to this version's folder. Raises OSError."""
        for id in _names(self.former):  # noqa: A001
            if not (self.records / id).exists() and (lock := self._hold(id)) is not None:
                try:
                    self._take_over(id)
                finally:
                    os.close(lock)

    def _take_over(self, id: str) -> None:  # noqa: A002  # what it is
        """Move an older version's save to this version's folder, with the entry locked here.

        Raises OSError.
        """
        former, place = self.former / id, self.records / id
        if not former.is_dir() or place.exists() or place.with_name(id + GONE).exists():
            return
        with contextlib.suppress(OSError):
            if (former / MANIFEST).read_bytes() == WORD:
                return
        self.records.mkdir(mode=0o700, exist_ok=True)
        former.rename(place)

    def entries(self) -> list[Stored]:
        """Return all entries, most recently used first. Raises OSError."""
        self._take_all_over()
        return sorted(self._entries(), key=lambda each: -each.used)

    def forget(self, id: str, why: str = "") -> bool:  # noqa: A002  # what it is
        """Remove an entry; return False if a server has locked it. Raises OSError.

        A notice of the next session with its key reports `why`, unless that is empty.
        """
        lock = self._hold(id)
        if lock is None:
            return False
        entry = StoreEntry(self, SessionKey("", ""), lock, id)
        try:
            self._leave_word(entry.folder, why)
            entry.remove()
            (self._locks / id).unlink(missing_ok=True)
        finally:
            entry.close()
        return True

    @property
    def _expiry(self) -> str:
        return f"it was not used for {duration(self.most_s)} (--persist)"

    def _leave_word(self, folder: Path, why: str) -> None:
        """Write the names of variables about to be removed, and why, unless `why` is empty."""
        word = folder.with_name(folder.name + _WAS)
        word.unlink(missing_ok=True)
        saved = None
        with contextlib.suppress(ValueError, OSError):
            saved, _ = manifest.read(folder, folder.name)
        if why and saved is not None and saved.names:
            text = json.dumps({"why": why, "names": saved.names[:MOST_NAMES]})
            with contextlib.suppress(OSError):  # a full disk
                word.write_text(text)

    def _take_word(self, id: str) -> tuple[str, tuple[str, ...]] | None:  # noqa: A002
        """Read and delete the file of `_leave_word`: reason and variables; None without a file."""
        word = self.records / f"{id}{_WAS}"
        try:
            said = json.loads(word.read_text())
            word.unlink()
            return str(said["why"]), tuple(map(str, said["names"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return "no reason can be read", ()

    def drop_words(self, older_s: float = 0.0) -> None:
        """Remove the files that `_leave_word` wrote `older_s` seconds ago or earlier."""
        for word in self.records.glob(f"*{_WAS}"):
            with contextlib.suppress(OSError):
                if self.now() - word.stat().st_mtime >= older_s:
                    word.unlink()

    def collect(self) -> None:
        """Complete interrupted removals; log a failure."""
        self.drop_words(self.most_s)
        for id in self._left_behind():  # noqa: A001
            lock = self._hold(id)
            if lock is None:
                continue  # a server is removing it, or uses it again
            entry = StoreEntry(self, SessionKey("", ""), lock, id)
            try:
                self._take_over(id)
                if not entry.folder.exists():
                    entry.finish_removal()
                    (self._locks / id).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("what is left of a closed session cannot be removed: %s", error)
            finally:
                entry.close()

    def _left_behind(self) -> set[str]:
        found: set[str] = set()
        for folder in (self.records, self.workspaces, self.layers):
            found |= _names(folder)
        return {id for id in found if not (self.records / id).exists()}  # noqa: A001

    def make_room(self) -> list[Stored]:
        """Remove expired entries, then the least recently used until all fit; return the removed.

        Entries of the principal with the most bytes are removed first. A principal within an equal
        share keeps all. Locked entries stay.
        """
        removed: list[Stored] = []
        found = self.entries()
        for each in reversed(found):
            if self.now() - each.used > self.most_s:
                self._discard(each, removed, self._expiry)
        left = [each for each in reversed(found) if each not in removed]
        if not self.most_bytes:
            return removed
        held: Counter[str] = Counter()
        for each in left:
            held[each.owner] += each.bytes
        part = self.most_bytes / max(1, len(held))
        idle = [each for each in left if not each.held]
        while idle and held.total() > self.most_bytes:
            each = max(idle, key=lambda one: held[one.owner])
            if held[each.owner] <= part:
                break
            idle.remove(each)
            if self._discard(each, removed, ROOM):
                held[each.owner] -= each.bytes
        return removed

    def _discard(self, each: Stored, removed: list[Stored], why: str) -> bool:
        with contextlib.suppress(OSError):
            if not each.held and self.forget(each.id, why):
                removed.append(each)
                return True
        return False

    def _entries(self) -> Iterator[Stored]:
        try:
            folders = sorted(self.records.iterdir())
        except FileNotFoundError:
            return
        for folder in folders:
            if not _ID.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue  # not an entry
            saved = None
            with contextlib.suppress(ValueError, OSError):
                saved, _ = manifest.read(folder, folder.name)
            lock = self._hold(folder.name)
            if lock is not None:
                os.close(lock)
            parts = (folder, self.workspaces / folder.name, self.layers / folder.name)
            held = sum(bytes_in(each) for each in parts)
            yield Stored(folder.name, saved, held, last_use(folder), lock is None)

    def _expired(self, folder: Path) -> bool:
        used = last_use(folder)
        return bool(used) and self.now() - used > self.most_s

    def _hold_in_time(self, name: str) -> int | None:
        """Lock an entry like `_hold`, but wait for a server that is ending or only lists it.

        None if another server still has the lock after `ENDING_S` or `LOOKING_S` seconds.
        """
        began = time.monotonic()
        while (lock := self._hold(name)) is None:
            with contextlib.suppress(OSError):
                ends = (self._locks / name).stat().st_size > 0
            if time.monotonic() - began > (ENDING_S if ends else LOOKING_S):
                return None
            time.sleep(PAUSE_S)
        os.ftruncate(lock, 0)
        return lock

    def _hold(self, name: str) -> int | None:
        """Lock an entry and return the descriptor; None if another process has the lock."""
        path = self._locks / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while (fd := try_lock(os.open(path, flags, 0o600))) is not None:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # the file was removed before it was locked
        return None


def _names(folder: Path) -> set[str]:
    """Return the ids of entries that have a file or folder in `folder`."""
    try:
        found = {path.name.removesuffix(GONE) for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    return {name for name in found if _ID.fullmatch(name)}
