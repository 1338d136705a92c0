"""One saved session on disk: the folder of its variables, and its entry in a store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Protocol

from kernel_mcp.linux.folders import private_folder
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.linux.walk import measure
from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.manifest import MANIFEST, OtherSession, Saved, SessionKey, UnknownFormat
from kernel_mcp.sessions.snapshot import Dump
from kernel_mcp.units import MIB

logger = logging.getLogger(__name__)

MOST_ENTRIES = 200_000
"""Maximum number of files that are counted in each folder of an entry."""
_DUMP = "variables-"
_BRANCHED = "branched"
_ADOPTED = "adopted"
JOURNAL_FILE = "cells.now"
OUTPUT_FILE = "output.now"
GONE = ".gone"
"""Suffix of the record folder of an entry whose removal has begun."""
WORD = b'{"format": 2}'
"""A manifest for older versions. They report its format as the reason why a session is missing."""
BESIDE_BYTES = 2 * MIB
"""Bytes of the disk that variables must leave free, for the manifest and the history of cells,
which are written after them."""

HIBERNATED_BYTES = 256 * MIB
"""Bytes of variables that a session may have at its hibernation, however large its files are."""


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

    def bound(self, *, hibernating: bool) -> int:
        """Return the maximum bytes of the variables.

        With `hibernating` other files of the session leave at least `HIBERNATED_BYTES`.
        """
        if not self._most_bytes:
            return sys.maxsize
        least = min(HIBERNATED_BYTES, self._most_bytes) if hibernating else 0
        return max(least, self._most_bytes - self._beside())

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


class EntryFolders(Protocol):
    """The folders of a store, each with a folder for each entry, and its bound in bytes."""

    workspaces: Path
    layers: Path
    records: Path
    former: Path
    most_bytes: int


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

    def __init__(self, store: EntryFolders, key: SessionKey, lock: int, id: str = "") -> None:  # noqa: A002  # what it is
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
        return last_use(self.folder)

    @property
    def leftover(self) -> bool:
        """True if there is a dump of variables."""
        return any(self.folder.glob(f"{_DUMP}*"))

    @property
    def output_path(self) -> Path:
        """Path of the journal of output since the last save."""
        return self.folder / OUTPUT_FILE

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
        return bytes_in(self.workspace) + bytes_in(self.layer) + bytes_in(self.records)

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
        return self.folder.with_name(self.folder.name + GONE)

    def mark_closing(self) -> None:
        """Mark the entry as about to be unlocked, so that other servers wait for it."""
        if self._lock >= 0:
            os.pwrite(self._lock, b"ends", 0)

    def close(self) -> None:
        """Release the lock of the entry."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def last_use(folder: Path) -> float:
    """Return the time of the last write to an entry, in seconds since 1970; 0 without one."""
    times = [0.0]
    for path in (folder, folder / MANIFEST, folder / JOURNAL_FILE):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def bytes_in(folder: Path) -> int:
    """Return the bytes in a folder; 0 if it does not exist."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return measure(fd, most_entries=MOST_ENTRIES, most_bytes=2**62).bytes
    finally:
        os.close(fd)
