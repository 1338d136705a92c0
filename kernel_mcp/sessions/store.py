"""On-disk store of persisted sessions. A crash during a write leaves the old save or the new one.

It is a private folder of this user, which no session can access. An entry has its workspace in `w`,
its packages in `p`, and in `r` its record and the newest dump of its variables. Both are named by a
manifest that is replaced atomically. A server that uses an entry holds flock(2) on a file in `l`,
which Linux releases when the process ends.

Versions that support only format 1 keep records in `k`, and overwrite those that they cannot read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kernel_mcp.linux.folders import private_folder, try_lock
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.linux.walk import measure
from kernel_mcp.records import dataclass
from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.cell_journal import read_journal
from kernel_mcp.sessions.manifest import (
    COPY,
    ID_CHARS,
    MANIFEST,
    OF_PRINCIPAL,
    OtherSession,
    Saved,
    SessionKey,
    UnknownFormat,
)
from kernel_mcp.sessions.notifications import MOST_NAMES
from kernel_mcp.sessions.snapshot import Dump
from kernel_mcp.sessions.words import duration
from kernel_mcp.units import MIB

MOST_ENTRIES = 200_000
"""Maximum number of files that are counted in each folder of an entry."""
_ID = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}")
ENDING_S = 5.0
"""Maximum wait, in seconds, for a server that is ending: clients may start the next one before."""
LOOKING_S = 0.1
PAUSE_S = 0.01
_DUMP = "variables-"
_BRANCHED = "branched"
_ADOPTED = "adopted"
JOURNAL_FILE = "cells.now"
_GONE = ".gone"
"""Suffix of the record folder of an entry whose removal has begun."""
_WAS = ".was"
"""Suffix of the file that lists, for the next session of an entry, what was removed, and why."""
WORD = b'{"format": 2}'
"""A manifest for older versions. They report its format as the reason why a session is missing."""

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


BESIDE_BYTES = 2 * MIB
"""Bytes of the disk that variables must leave free, for the manifest and the history of cells,
which are written after them."""


class SaveFolder:
    """The saved variables of one session: the newest dump, and manifests that name it.

    `saved` is None if nothing was saved. All methods are blocking and raise OSError.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Variables may take `most_bytes`; 0 is no limit."""
        self.folder = folder
        self.saved: Saved | None = None
        self._most_bytes = most_bytes

    def dump(self) -> Dump | None:
        """Return the saved dump; None for none. Raises HibernationError if malformed."""
        saved = self.saved
        if saved is None or not saved.dump:
            return None
        path = self.folder / Path(saved.dump).name
        return Dump.of(path, saved.size, saved.variables, saved.checksum)

    def new_dump_path(self) -> Path:
        """Return the path for the next dump, which may have a file of a failed one."""
        return self.folder / (
            _DUMP + ("b" if self.saved and self.saved.dump == _DUMP + "a" else "a")
        )

    def bound(self) -> int:
        """Return the maximum bytes of the variables."""
        if not self._most_bytes:
            return sys.maxsize
        return max(0, self._most_bytes - self._beside())

    def free(self) -> int:
        """Return the bytes of the disk that are free for the variables."""
        disk = os.statvfs(self.folder)
        return max(0, disk.f_bavail * disk.f_frsize - BESIDE_BYTES)

    def _beside(self) -> int:
        """Return the bytes of other files that count towards the same bound."""
        return 0

    def commit(self, saved: Saved) -> None:
        """Replace the manifest by `saved`, and remove older dumps.

        If that fails, the former save stays.
        """
        manifest.write(self.folder, saved.data())
        self.saved = saved
        self.tidy()

    def tidy(self) -> None:
        """Remove dumps that the manifest does not name."""
        there = self.saved.dump if self.saved is not None else ""
        for old in self.folder.glob(f"{_DUMP}*"):
            if old.name != there:
                old.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder."""
        self.saved = None
        remove_tree(self.folder)


class StoreEntry(SaveFolder):
    """The entry of one session in a store, for the server that has locked it.

    All methods are blocking.

    saved      content of the manifest; None if nothing was saved or it cannot be read
    problem    reason why the manifest cannot be read; empty for none
    unknown    set if the entry has an unknown format; nothing may be written to it
    other      set if the entry has the save of another session; nothing may be written to it
    repaired   reason why the copy of the manifest was read; empty if it was not
    overtaken  variables that an older version has saved since the last save; None if it has not
    removed    reason why the store removed an earlier save, and its variables; None if it did not
    branched   True if the session has branches, or had some when its last server was killed
    adopted    True if the session has adopted a branch since its variables were saved
    """

    def __init__(self, store: SessionStore, key: SessionKey, lock: int, id: str = "") -> None:  # noqa: A002  # what it is
        """`id` is by default that of the `key`."""
        id = id or key.id  # noqa: A001
        super().__init__(store.records / id, store.most_bytes)
        self.key = key
        self.workspace = store.workspaces / id
        self.layer = store.layers / id
        self.former = store.former / id
        self.records = self.folder / "r"
        self.problem = self.repaired = ""
        self.unknown: UnknownFormat | None = None
        self.other: OtherSession | None = None
        self.overtaken: tuple[str, ...] | None = None
        self.removed: tuple[str, tuple[str, ...]] | None = None
        self.branched = self.adopted = False
        self._lock = lock

    @property
    def used(self) -> float:
        """Time of the last write to it, in seconds since 1970."""
        return _used(self.folder)

    @property
    def leftover(self) -> bool:
        """True if there is a dump of variables."""
        return any(self.folder.glob(f"{_DUMP}*"))

    @property
    def journal_path(self) -> Path:
        """Path of the journal of cells since the last save."""
        return self.folder / JOURNAL_FILE

    def make(self) -> None:
        """Create its missing folders, and read what was saved. Raises OSError."""
        self.saved, self.problem, self.repaired = None, "", ""
        self.unknown = self.other = None
        for folder in (self.folder, self.records):
            private_folder(folder)
        self.branched = (self.folder / _BRANCHED).exists()
        self.adopted = (self.folder / _ADOPTED).exists()
        try:
            self.saved, self.repaired = manifest.read(self.folder, self.folder.name)
        except UnknownFormat as reason:
            self.unknown = reason
        except OtherSession as reason:
            self.other = reason
        except ValueError as reason:
            self.problem = str(reason)
        self.overtaken = self._overtaken()

    def _overtaken(self) -> tuple[str, ...] | None:
        """Return the names of variables that an older version has saved since the last save.

        None if it has saved nothing. Unless it has ever saved something, `WORD` is written for it.
        """
        place = self.former / MANIFEST
        try:
            private_folder(self.former)
            if not place.exists() or place.read_bytes() == WORD:
                place.write_bytes(WORD)
                return None
            saved, _ = manifest.read(self.former, self.former.name)
            mine = self.folder / MANIFEST
            if mine.exists() and mine.stat().st_mtime > place.stat().st_mtime:
                return None
            return () if saved is None else tuple(saved.names)
        except UnknownFormat as reason:
            return reason.names
        except (OSError, ValueError) as error:
            logger.warning("no word can be left for older versions: %s", error)
            return None

    def set_branched(self, branched: bool) -> None:
        """Record, for the next server, if there are branches. Raises OSError."""
        mark = self.folder / _BRANCHED
        mark.touch() if branched else mark.unlink(missing_ok=True)
        self.branched = branched

    def set_adopted(self, adopted: bool) -> None:
        """Record, for the next server, if an adopted branch is unsaved. Raises OSError."""
        mark = self.folder / _ADOPTED
        mark.touch() if adopted else mark.unlink(missing_ok=True)
        self.adopted = adopted

    def _beside(self) -> int:
        return _holds(self.workspace) + _holds(self.layer) + _holds(self.records)

    def drop_variables(self, cell: int) -> None:
        """Remove the saved variables: after `cell` there are none."""
        if self.saved is not None:
            none = dataclasses.replace(
                self.saved, dump="", size=0, checksum="", variables={}, moment=0.0
            )
            self.commit(dataclasses.replace(none, cell=cell, through=cell, undone=False))

    def remove(self) -> None:
        """Remove the entry. Raises OSError if a part of it remains.

        After the first step nothing can be restored, and `finish_removal` can remove the rest.
        """
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._gone)
        self.finish_removal()

    def finish_removal(self) -> None:
        """Remove the rest of an entry whose removal has begun. Raises OSError."""
        for each in (self.layer, self.workspace, self.former, self._gone):
            remove_tree(each)

    @property
    def _gone(self) -> Path:
        return self.folder.with_name(self.folder.name + _GONE)

    def mark_closing(self) -> None:
        """Mark the entry as about to be unlocked, so that other servers wait for it."""
        if self._lock >= 0:
            os.pwrite(self._lock, b"ends", 0)

    def close(self) -> None:
        """Release the lock of the entry."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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
        if not former.is_dir() or place.exists() or place.with_name(id + _GONE).exists():
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
            held = sum(_holds(each) for each in parts)
            yield Stored(folder.name, saved, held, _used(folder), lock is None)

    def _expired(self, folder: Path) -> bool:
        used = _used(folder)
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
        found = {path.name.removesuffix(_GONE) for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    return {name for name in found if _ID.fullmatch(name)}


def _used(folder: Path) -> float:
    """Return the time of the last write to an entry, in seconds since 1970; 0 without one."""
    times = [0.0]
    for path in (folder, folder / MANIFEST, folder / JOURNAL_FILE):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _holds(folder: Path) -> int:
    """Return the bytes in a folder; 0 if it does not exist."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return measure(fd, most_entries=MOST_ENTRIES, most_bytes=2**62).bytes
    finally:
        os.close(fd)
