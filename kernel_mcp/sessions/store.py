"""What sessions leave for later servers: an entry for each, written so that a crash leaves a whole.

In a folder of this user alone, which no session sees, an entry has a workspace in `w`, packages in
`p`, and in `k` its record and the newest dump of its variables, which are named by a manifest that
is replaced in one step. Who uses an entry holds flock(2) on a file in `l`, which ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from kernel_mcp.config.values import MIB
from kernel_mcp.errors import HibernationError
from kernel_mcp.linux.folders import private_folder, try_lock
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.linux.walk import measure
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.snapshot import Dump

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 * MIB
MOST_ENTRIES = 200_000
"""Files that are counted of one entry."""
OF_PRINCIPAL = "principal "
"""How the place of a key begins that is a principal and no folder."""
ID_CHARS = 32
_ID = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}")
ENDING_S = 5.0
"""How long one waits for a server that is about to end: clients start the next one meanwhile."""
LOOKING_S = 0.1
PAUSE_S = 0.01
_DUMP = "variables-"
_NEW = ".new"
_BRANCHED = "branched"
_GONE = ".gone"
"""How the record of an entry ends whose removal has begun."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """What finds an entry again: the working folder of the server and a session's name."""

    folder: str
    name: str

    @property
    def id(self) -> str:
        """How its folders are called."""
        text = json.dumps([self.folder, self.name])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:ID_CHARS]


@dataclass(frozen=True, slots=True)
class Saved:
    """The manifest of an entry.

    moment       when the variables were saved, in seconds since 1970; 0 for never
    cell         the last cell whose work they hold
    through      the last cell when they were saved, which may have been undone
    python       version, implementation and machine of the kernel that saved them
    environment  its packages, as `name==version`
    doors        what was open, by kind
    undone       whether the session has gone back behind `cell` since
    asked        what the session had asked for of its kernels
    variables    what the dump holds, as `Dump.row`
    history      the cells, as `History.state`
    """

    folder: str
    name: str
    moment: float = 0.0
    cell: int | None = None
    through: int = 0
    python: tuple[str, str, str] = ("", "", "")
    environment: tuple[str, ...] = ()
    doors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    dump: str = ""
    size: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Any] = field(default_factory=dict)
    undone: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Saved:
        """What a manifest says. Raises ValueError for another format."""
        if data.get("format") != FORMAT:
            raise ValueError(
                f"its format is {data.get('format')!r}, and this server knows {FORMAT}"
            )
        try:
            doors = {str(kind): tuple(map(str, each)) for kind, each in data["doors"].items()}
            version, implementation, machine = map(str, data["python"])
            return cls(
                folder=str(data["folder"]),
                name=str(data["name"]),
                moment=float(data["moment"]),
                cell=None if data["cell"] is None else int(data["cell"]),
                through=int(data["through"]),
                python=(version, implementation, machine),
                environment=tuple(map(str, data["environment"])),
                doors=doors,
                asked=dict(data["asked"]),
                dump=str(data["dump"]),
                size=int(data["size"]),
                variables=dict(data["variables"]),
                history=dict(data["history"]),
                undone=bool(data["undone"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None

    @property
    def names(self) -> list[str]:
        """Those of the variables."""
        found = self.variables.get("names")
        return [str(each) for each in found] if isinstance(found, list) else []

    @property
    def key(self) -> Key:
        """What finds it."""
        return Key(self.folder, self.name)


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as a list of them shows it: `used` is when a server last wrote to it."""

    id: str
    saved: Saved | None
    bytes: int
    used: float
    held: bool

    @property
    def owner(self) -> str:
        """The principal of its session; those of no principal have one owner."""
        folder = self.saved.folder if self.saved is not None else ""
        return folder if folder.startswith(OF_PRINCIPAL) else ""


class Entry:
    """One session's place in a store, for the server that holds it. All methods block.

    `saved` is None where nothing was saved yet, or cannot be read: `problem` says why. `branched`
    says that the session had branches when its last server was killed, or has some now.
    """

    def __init__(self, store: SessionStore, key: Key, lock: int, id: str = "") -> None:  # noqa: A002  # what it is
        """Without an `id` it is that of the `key`."""
        id = id or key.id  # noqa: A001
        self.key = key
        self.workspace = store.workspaces / id
        self.layer = store.layers / id
        self.folder = store.records / id
        self.records = self.folder / "r"
        self.saved: Saved | None = None
        self.problem = ""
        self.branched = False
        self._store = store
        self._lock = lock

    @property
    def used(self) -> float:
        """When something was last written to it, in seconds since 1970."""
        return _used(self.folder)

    @property
    def trace(self) -> Path:
        """The file that names the cells since the last save."""
        return self.folder / "cells.now"

    def make(self) -> None:
        """Make what is missing of its folders, and read what was saved."""
        for folder in (self.folder, self.records):
            private_folder(folder)
        self.branched = (self.folder / _BRANCHED).exists()
        try:
            self.saved = _read(self.folder)
        except ValueError as reason:
            self.problem = str(reason)

    def branch(self, branched: bool) -> None:
        """Tell the next server whether there are branches. Raises OSError."""
        mark = self.folder / _BRANCHED
        mark.touch() if branched else mark.unlink(missing_ok=True)
        self.branched = branched

    def dump(self) -> Dump | None:
        """The variables that were saved. Raises HibernationError where they cannot be had."""
        saved = self.saved
        if saved is None or not saved.dump:
            return None
        path = self.folder / Path(saved.dump).name
        if not path.is_file() or path.stat().st_size != saved.size:
            raise HibernationError("what was saved is not there, or not whole")
        return Dump.of(path, saved.size, saved.variables)

    def fresh(self) -> Path:
        """Where to write the next dump; what a failed one left there is replaced."""
        return self.folder / (
            _DUMP + ("b" if self.saved and self.saved.dump == _DUMP + "a" else "a")
        )

    def room(self) -> int:
        """Bytes that the variables of this session may take."""
        if not self._store.most_bytes:
            return 2**62
        others = _holds(self.workspace) + _holds(self.layer) + _holds(self.records)
        return max(0, self._store.most_bytes - others)

    def commit(self, saved: Saved) -> None:
        """Make this what was saved. Raises OSError; what was saved before stays then."""
        data = {"format": FORMAT, **dataclasses.asdict(saved)}
        text = json.dumps(data).encode("utf-8", "surrogateescape")
        place = self.folder / (MANIFEST + _NEW)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(place, flags, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place.rename(self.folder / MANIFEST)
        sync(self.folder)
        self.saved = saved
        self.tidy()

    def tidy(self) -> None:
        """Remove dumps that were not saved."""
        there = self.saved.dump if self.saved is not None else ""
        for old in self.folder.glob(f"{_DUMP}*"):
            if old.name != there:
                old.unlink(missing_ok=True)

    def drop_variables(self, cell: int) -> None:
        """Forget the variables that were saved: after this cell there are none."""
        if self.saved is not None:
            none = dataclasses.replace(self.saved, dump="", size=0, variables={}, moment=0.0)
            self.commit(dataclasses.replace(none, cell=cell, through=cell, undone=False))

    def remove(self) -> None:
        """Remove all of it. Raises OSError when something stays.

        From its first step on there is nothing to come back, and `finish_removal` can go on.
        """
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._gone)
        self.finish_removal()

    def finish_removal(self) -> None:
        """Remove what is left of an entry whose removal has begun. Raises OSError."""
        for each in (self.layer, self.workspace, self._gone):
            remove_tree(each)

    @property
    def _gone(self) -> Path:
        return self.folder.with_name(self.folder.name + _GONE)

    def ends(self) -> None:
        """Have others wait for it: it is about to be closed."""
        if self._lock >= 0:
            os.pwrite(self._lock, b"ends", 0)

    def close(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class SessionStore:
    """The entries of this user's sessions below `folder`, which is made where it is missing.

    They may hold `most_bytes` together, 0 for no bound, and last `most_s` seconds after their last
    use; `now` is the time in seconds since 1970. All methods block.
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
        self.records = folder / "k"
        self.most_bytes = most_bytes
        self.most_s = most_s
        self.now = now
        self._folder = folder
        self._locks = folder / "l"

    def make(self) -> None:
        """Make its folders. Raises OSError, PermissionError where others could write to them."""
        private_folder(self._folder)
        for folder in (self.workspaces, self.layers, self.records, self._locks):
            folder.mkdir(mode=0o700, exist_ok=True)

    def open(self, key: Key) -> Entry | None:
        """The entry of a key, empty where there is none; None while another server has it.

        One that has expired is removed first. Raises OSError.
        """
        lock = self._hold_in_time(key.id)
        if lock is None:
            return None
        entry = self._entry(key, lock)
        try:
            if not entry.folder.exists():
                entry.finish_removal()
            elif self._expired(entry.folder):
                entry.remove()
            entry.make()
        except BaseException:
            entry.close()
            raise
        return entry

    def _entry(self, key: Key, lock: int) -> Entry:
        return Entry(self, key, lock)

    def has(self, key: Key) -> bool:
        """Whether something was saved for a key, and lasts."""
        folder = self.records / key.id
        return (folder / MANIFEST).is_file() and not self._expired(folder)

    def entries(self) -> list[Stored]:
        """All entries, the one used last first."""
        return sorted(self._entries(), key=lambda each: -each.used)

    def forget(self, id: str) -> bool:  # noqa: A002  # what it is
        """Remove an entry; False while a server has it. Raises OSError."""
        lock = self._hold(id)
        if lock is None:
            return False
        entry = Entry(self, Key("", ""), lock, id)
        try:
            entry.remove()
            (self._locks / id).unlink(missing_ok=True)
        finally:
            entry.close()
        return True

    def collect(self) -> None:
        """Finish removals that were cut short; what cannot be removed is logged."""
        for id in self._left_behind():  # noqa: A001
            lock = self._hold(id)
            if lock is None:
                continue  # a server removes it, or has it again
            entry = Entry(self, Key("", ""), lock, id)
            try:
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
            with contextlib.suppress(FileNotFoundError):
                found |= {path.name.removesuffix(_GONE) for path in folder.iterdir()}
        return {id for id in found if _ID.fullmatch(id) and not (self.records / id).exists()}  # noqa: A001

    def make_room(self) -> list[Stored]:
        """Remove what has expired, then the longest unused until all fit; what was removed.

        Of principals, those go first that have the most, and nothing of one that has no more than
        an equal part.
        """
        removed: list[Stored] = []
        found = self.entries()
        for each in reversed(found):
            if self.now() - each.used > self.most_s:
                self._discard(each, removed)
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
            if self._discard(each, removed):
                held[each.owner] -= each.bytes
        return removed

    def _discard(self, each: Stored, removed: list[Stored]) -> bool:
        with contextlib.suppress(OSError):
            if not each.held and self.forget(each.id):
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
                continue  # nothing of a server's
            saved = None
            with contextlib.suppress(ValueError, OSError):
                saved = _read(folder)
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
        """As `_hold`, but wait for who says that it ends, and for who only looks."""
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
        """A descriptor with the lock of an entry; None while another process has that."""
        path = self._locks / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while (fd := try_lock(os.open(path, flags, 0o600))) is not None:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # one that was removed meanwhile
        return None


def _read(folder: Path) -> Saved | None:
    """What the manifest in a folder says. Raises ValueError, OSError."""
    path = folder / MANIFEST
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            text = file.read(MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > MOST_MANIFEST_BYTES:
        raise ValueError("it is too large")
    try:
        data = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        raise ValueError("it is damaged") from None
    if not isinstance(data, dict):
        raise ValueError("it is damaged")
    return Saved.of(data)


def _used(folder: Path) -> float:
    """When something was last written to an entry; 0 for one that is not there."""
    times = [0.0]
    for path in (folder, folder / MANIFEST, folder / "cells.now"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _holds(folder: Path) -> int:
    """Bytes in a folder; 0 where there is none."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return measure(fd, most_entries=MOST_ENTRIES, most_bytes=2**62).bytes
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
