"""Store of a node: persisted sessions on its disk, with a copy in the fleet's shared store.

Data that was not copied is lost with the node. A copy becomes valid when the session's row names
it, so an interrupted copy changes nothing. The row is signed and contains the SHA-256 of each part.
Only data with these digests is unpacked or loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from kernel_mcp.barriers import Barrier
from kernel_mcp.fleet.packing import Packed, pack, unpack
from kernel_mcp.fleet.session_table import (
    SavedPart,
    SessionRow,
    SessionTable,
    VersionedRow,
    data_of,
)
from kernel_mcp.fleet.signed import NotOurs, Overtaken
from kernel_mcp.fleet.storage import READ_BYTES
from kernel_mcp.linux.folders import try_lock
from kernel_mcp.linux.safe_tree import make_private, remove_tree
from kernel_mcp.linux.walk import entries_within, everything
from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.cell_journal import CellJournal
from kernel_mcp.sessions.manifest import Saved, SessionKey
from kernel_mcp.sessions.notifications import Notice, together
from kernel_mcp.sessions.store import SessionStore, Stored
from kernel_mcp.sessions.store_entry import JOURNAL_FILE, MOST_ENTRIES, StoreEntry

FOLDERS = ("workspace", "layer", "records")
DUMP = "dump"
_LOCK = "node"

logger = logging.getLogger(__name__)


class SharedStore(SessionStore):
    """Entries of one node's sessions, each with a copy in the fleet's shared store."""

    def __init__(
        self,
        folder: Path,
        table: SessionTable,
        *,
        most_bytes: int,
        most_s: float,
        most_files_bytes: int,
        overtaken: Callable[[str], object] = lambda _handle: None,
    ) -> None:
        """`most_files_bytes` is the limit on the copy of each folder of a session; 0 for none.

        `overtaken` is called, in any thread, with the handle of a session that another node has
        taken over.
        """
        super().__init__(folder, most_bytes=most_bytes, most_s=most_s)
        self.table = table
        self.scratch = folder / "t"
        self.most_files_bytes = most_files_bytes or 2**62
        self.overtaken = overtaken
        self.pending_notices: Callable[[str], Sequence[Notice]] = lambda _handle: ()
        """Function that returns the pending notices of a session; called in any thread."""
        self._known: dict[str, VersionedRow] = {}
        self._ended: dict[str, VersionedRow] = {}
        """Rows of ended sessions that are not removed from the shared store yet."""
        self._fingerprints: dict[str, dict[str, bytes]] = {}
        """Fingerprints of each session's folders when they were last copied."""
        self._lock = -1

    def make(self) -> None:
        """Create the folders, and remove what an earlier incarnation of the node left there.

        Raises OSError, PermissionError if others can write to them, and BlockingIOError if another
        node of this name uses them.
        """
        super().make()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        held = try_lock(os.open(self.scratch.with_name(_LOCK), flags, 0o600))
        if held is None:
            raise BlockingIOError("another node of this name has its sessions in the same folder")
        self._lock = held  # held until the process ends, as the lock of an entry
        remove_tree(self.former)
        for folder in (self.workspaces, self.layers, self.records, self.scratch):
            remove_tree(folder)
            folder.mkdir(mode=0o700)

    def close(self) -> None:
        """Release the folders for another node of this name."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _entry(self, key: SessionKey, lock: int) -> StoreEntry:
        return _SharedEntry(self, key, lock)

    def open_row(self, row: SessionRow) -> None:
        """Add the row of a new session. Raises Overtaken if its name was taken meanwhile."""
        self._known[row.handle] = self.table.open(row)

    def take(self, known: VersionedRow, key: SessionKey) -> SessionRow:
        """Copy a session that no node has to this disk, and take it over; return its old row.

        Raises Overtaken if another node was first, and NotOurs if the copy is not authentic. The
        shared store is unchanged then.
        """
        folders = self._folders(key)
        work = {name: self.scratch / f"{key.id}-{name}" for name in folders}
        record = self.records / key.id
        try:
            for name, place in work.items():
                remove_tree(place)
                if (part := known.row.parts.get(name)) is not None:
                    with self._fetched(known.row.handle, part) as file:
                        unpack(file, place)
            for place in (record, *folders.values()):
                remove_tree(place)
            make_private(record)
            self._write_record(known.row, record)
            for name, place in work.items():
                if place.is_dir():
                    place.rename(folders[name])
            taken = self.table.take(known)
        except BaseException:
            for place in (*work.values(), record, *folders.values()):
                remove_tree(place)
            raise
        self._known[known.row.handle] = taken
        return known.row

    def copy(self, entry: StoreEntry, saved: Saved) -> None:
        """Copy a saved session to the shared store and update its row. Raises Overtaken.

        Folders that have not changed since the last copy are skipped.
        """
        handle = entry.key.name
        if (known := self._known.get(handle)) is None:
            return  # it was given away
        left: list[Packed] = []
        before = known.row.parts
        parts: dict[str, SavedPart] = {}
        prints = dict(self._fingerprints.get(handle, {}))
        for name, place in self._folders(entry.key).items():
            found = _fingerprint(place)
            if name in before and prints.get(name) == found:
                parts[name] = before[name]
            else:
                parts[name] = self._copy_folder(handle, name, place, before.get(name), left)
                prints[name] = found
        if saved.dump:
            with open(entry.folder / saved.dump, "rb") as file:
                parts[DUMP] = self._put(handle, file, before.get(DUMP))
        row = replace(
            known.row,
            saved=saved.data(),
            parts=parts,
            branched=entry.branched,
        )
        if left:
            names = tuple(name for each in left for name in each.left_out)
            row = replace(row, left_out=names, omitted=sum(each.count for each in left))
        self._write(known, row)
        self._fingerprints[handle] = prints
        with Barrier("removing what sessions no longer need", handle):
            self._tidy(handle, {each.digest for each in (*parts.values(), *before.values())})

    def let_go(self, handle: str, *, whole: bool = True) -> None:
        """Release a session, so that any node can take it over.

        `whole` is True if everything was saved. Raises Overtaken.
        """
        if (known := self._known.get(handle)) is not None:
            self._write(known, known.row.left(self.now(), ended=whole))
            self.drop(handle)

    def clear(self, key: SessionKey) -> None:
        """Remove the data of a released session from this disk."""
        for place in (self.records / key.id, *self._folders(key).values()):
            remove_tree(place)

    def make_room(self) -> list[Stored]:
        """Remove nothing and return an empty list: all data here belongs to open sessions."""
        return []

    def drop(self, handle: str) -> None:
        """Write nothing more for a session, as this node does not have it any more."""
        self._known.pop(handle, None)
        self._fingerprints.pop(handle, None)

    def forget_row(self, handle: str) -> None:
        """Remove a session that has ended for good from the shared store; see `forget_ended`."""
        if (known := self._known.get(handle)) is None:
            return
        self.drop(handle)
        self._ended[handle] = known
        self.forget_ended(handle)

    def forget_ended(self, handle: str) -> None:
        """Remove a session that has ended, if an earlier attempt failed. Raises OSError."""
        if (known := self._ended.get(handle)) is None:
            return
        with contextlib.suppress(Overtaken):
            self.table.forget(known)
            self._tidy(handle, set())
        self._ended.pop(handle, None)

    def _folders(self, key: SessionKey) -> Mapping[str, Path]:
        return {
            "workspace": self.workspaces / key.id,
            "layer": self.layers / key.id,
            "records": self.records / key.id / "r",
        }

    def _write(self, known: VersionedRow, row: SessionRow) -> None:
        """Write a row, with the pending notices of its session. Raises Overtaken.

        If an earlier write succeeded without confirmation, it is written after that version.
        """
        handle = row.handle
        notices = self.pending_notices(handle)
        loss = together(each.loss for each in notices)
        row = replace(
            row,
            unheard=tuple(each.text for each in notices),
            lost=None if loss is None else dataclasses.asdict(loss),
        )
        try:
            try:
                written = self.table.write(VersionedRow(known.version, row))
            except Overtaken:
                there = self.table.find(handle)
                if there is None or not self.table.is_mine(there.row):
                    raise
                written = self.table.write(VersionedRow(there.version, row))
        except Overtaken:
            self.drop(handle)
            self.overtaken(handle)
            raise
        self._known[handle] = written

    def _write_record(self, row: SessionRow, record: Path) -> None:
        if row.saved is None:
            return
        saved = row.saved
        if row.branched:
            (record / "branched").touch()
        if (part := row.parts.get(DUMP)) is not None and saved.get("dump"):
            with self._fetched(row.handle, part) as file:
                os.link(file.name, record / Path(str(saved["dump"])).name)
        CellJournal(record / JOURNAL_FILE).close()  # the journal on the other node's disk is lost
        manifest.write(record, saved)

    def _copy_folder(
        self, handle: str, name: str, folder: Path, before: SavedPart | None, left: list[Packed]
    ) -> SavedPart:
        most = self.most_files_bytes
        with self._temporary() as file:
            packed = pack(folder, file, most_bytes=most, most_entries=_most_entries(name, most))
            if packed.count:
                left.append(packed)
            file.seek(0)
            return self._put(handle, file, before)

    def _put(self, handle: str, file: IO[bytes], before: SavedPart | None) -> SavedPart:
        """Write a file to the shared store, unless it equals the part `before`; return its part."""
        digest, size = hashlib.sha256(), 0
        while piece := file.read(READ_BYTES):
            digest.update(piece)
            size += len(piece)
        part = SavedPart(digest.hexdigest(), size)
        if part != before:
            file.seek(0)
            self.table.signed.place.put(data_of(handle, part.digest), file)
        return part

    @contextlib.contextmanager
    def _fetched(self, handle: str, part: SavedPart) -> Any:
        """Download a part to a temporary file inside this block. Raises NotOurs if it differs."""
        digest, size = hashlib.sha256(), 0
        with self._temporary() as file:
            with self._opened(handle, part) as source:
                while piece := source.read(READ_BYTES):
                    digest.update(piece)
                    size += len(piece)
                    if size > part.size:
                        break
                    file.write(piece)
            if SavedPart(digest.hexdigest(), size) != part:
                raise NotOurs(
                    f"what was saved of session {handle} is not what its node had written: "
                    "somebody else has changed the store of the fleet. It is not used, and the "
                    "session cannot go on: begin another one with create_session."
                )
            file.flush()
            file.seek(0)
            yield file

    def _opened(self, handle: str, part: SavedPart) -> IO[bytes]:
        try:
            return self.table.signed.place.open(data_of(handle, part.digest))
        except FileNotFoundError:
            raise NotOurs(
                f"what was saved of session {handle} is not in the store of the fleet any more: "
                "somebody else has removed it. The session cannot go on: begin another one with "
                "create_session."
            ) from None

    @contextlib.contextmanager
    def _temporary(self) -> Any:
        with tempfile.NamedTemporaryFile(dir=self.scratch) as file:
            yield file

    def _tidy(self, handle: str, needed: set[str]) -> None:
        place = self.table.signed.place
        for name in place.names(data_of(handle)):
            if name not in needed:
                place.remove(data_of(handle, name))


class _SharedEntry(StoreEntry):
    """An entry that is copied to the shared store with each commit."""

    def __init__(self, store: SharedStore, key: SessionKey, lock: int) -> None:
        """See `StoreEntry`."""
        super().__init__(store, key, lock)
        self._store = store

    def commit(self, saved: Saved) -> None:
        """See `StoreEntry`. Also raises Overtaken."""
        super().commit(saved)
        self._store.copy(self, saved)

    def remove(self) -> None:
        """See `StoreEntry`."""
        super().remove()
        self._store.forget_row(self.key.name)


def _most_entries(name: str, most_bytes: int) -> int:
    return entries_within(most_bytes) if name == "workspace" else MOST_ENTRIES


def _fingerprint(folder: Path) -> bytes:
    """Return a fingerprint of a folder: a hash of names, modes, sizes, inodes and times.

    File contents are not read.
    """
    found = hashlib.sha256()
    for entry in sorted(everything(folder), key=lambda each: each.path) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            info = entry.stat(follow_symlinks=False)
            facts = (info.st_mode, info.st_size, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
            found.update(repr((entry.path, facts)).encode("utf-8", "surrogateescape"))
    return found.digest()
