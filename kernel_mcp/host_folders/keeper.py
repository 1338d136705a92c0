"""`keeper FD`: a process that keeps covers where they belong, started by `bare_program`.

It walks the mounted folders once, watches them (inotify), and covers in the sandboxes that run
what appears or is replaced on the host: a rename there takes a cover off. Names of secrets come
before all else that happens. Messages of the server, one packet each, and the answers:

    {"op": "watch", "mounts": […]}               first; then `covers` for each, and `ready`
    {"op": "map", "id": n, "uid": …, "gid": …}   `mapped`, with a user namespace for an id-map
    {"op": "hold", "id": n, "since": v}          `held` once covers after v (-1: all) are there;
        with descriptors: the sandbox's mount namespace, a pidfd of its process
    {"op": "again", "id": n, "mount": i}         walk a mount anew whose folder was replaced: `done`
    {"op": "rules", "id": n, "read": …, "write": …}    `done` once a Landlock ruleset, which comes
        along, allows these rights below the mounts; below strict ones entry by entry where needed

    {"op": "covers", "mount": i, "version": v, "covers": […], "inodes": […], "gone": […]}
        these are added; the last are inodes that are no secret's any more
    {"op": "said", "text": …}                    something for the log
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kernel_mcp.host_folders import secrets
from kernel_mcp.host_folders.entering import Entering, Sandbox, Work, parts_of, weight
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.linux.safe_tree import open_beneath, open_place
from kernel_specs.landlock import calls
from kernel_specs.template import linux

_INODE_BYTES = 50
"""Of a device and an inode in a message, at most."""

# <sys/inotify.h>
_IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = (
    0x8,
    0x40,
    0x80,
    0x100,
    0x200,
)
_IN_Q_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_MASK = _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_IN_ONLYDIR, _IN_NONBLOCK, _IN_CLOEXEC = 0x01000000, 0o4000, 0o2000000
_EVENT = struct.Struct("iIII")
READ_DIR = 1 << 3
ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""<linux/landlock.h>: listing, and the rights that a rule about a file may hold."""
_MOST_CHANGES = 1 << 14
"""That wait; as Linux keeps itself. Beyond, all is walked through."""
_FEW_CHANGES = 64
"""So many may wait before this process goes after others: code in a session can make more."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Change:
    """An entry that is new, was replaced, written or removed; without parts, any may be."""

    ground: Ground
    parts: Parts = ()
    hidden: bool = False
    """Whether it had a secret's name before."""

    @property
    def urgent(self) -> bool:
        """Whether it may have to be covered for its name."""
        named = (secrets.secret(self.parts, kind) for kind in (stat.S_IFREG, stat.S_IFDIR))
        return self.hidden or secrets.judged_by_content(self.parts) or any(named)


class Ground:
    """One mounted folder: its descriptor, its walk, and where sandboxes see it."""

    def __init__(
        self,
        number: int,
        data: dict[str, Any],
        watches: Watches,
        inodes: dict[tuple[int, int], int],
    ) -> None:
        self.number = number
        self.host, self.guest = str(data["host"]), str(data["guest"])
        self._own = {tuple(path): str(kind) for path, kind in data["own"]}
        self._writable = data["writable"] is True
        self._strict = data["strict"] is True
        self._inner = [tuple(path) for path in data["inner"]]
        self._watches = watches
        self._inodes = inodes
        self._root = -1
        self.walk = self._fresh()

    def _fresh(self) -> secrets.Walk:
        if self._root >= 0:
            os.close(self._root)
        self._root = -1
        self._root = open_place(Path(self.host))
        return secrets.Walk(
            self._root,
            own=self._own,
            inner=self._inner,
            writable=self._writable,
            strict=self._strict,
            visit=lambda parts, fd: self._watches.add(self, parts, fd),
            inodes=self._inodes,
        )

    @property
    def place(self) -> Work:
        """What sandboxes have to have at its place."""
        info = os.fstat(self._root)
        return self.guest, (), f"{info.st_dev}:{info.st_ino}"

    @property
    def is_folder(self) -> bool:
        """Whether it is no single file."""
        return stat.S_ISDIR(os.fstat(self._root).st_mode)

    def again(self) -> None:
        """Open and walk the folder that is at the place now."""
        self.walk = self._fresh()
        if self.is_folder:
            self.walk.all()

    def allow(self, ruleset: int, read: int, write: int) -> None:
        """Add Landlock rules; where a folder holds a secret, one for each entry that is shown.

        Raises OSError.
        """
        access = write if self._writable else read
        closed = self.walk.closed() if self._strict else set()
        if () not in closed:
            calls.allow(ruleset, self._root, access if self.is_folder else access & ON_FILES)
            return
        pending: list[tuple[Parts, int]] = [((), access)]
        while pending:
            parts, access = pending.pop()
            with suppress(OSError):  # gone, or closed to this user: it stays without rules
                folder = open_beneath(self._root, parts, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    if read & READ_DIR:
                        calls.allow(ruleset, folder, READ_DIR)
                    for name in os.listdir(folder):  # noqa: PTH208  # an open folder
                        path = (*parts, name)
                        rights = self._allow_entry(ruleset, folder, path, (access, read), closed)
                        if rights:
                            pending.append((path, rights))
                finally:
                    os.close(folder)

    def _allow_entry(
        self,
        ruleset: int,
        folder: int,
        path: Parts,
        rights: tuple[int, int],
        closed: Collection[Parts],
    ) -> int:
        """Allow one entry `rights`, or those to read; what to allow in it if it is closed."""
        try:
            place = os.open(path[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return 0
        try:
            info = os.fstat(place)
            kind = None if stat.S_ISLNK(info.st_mode) else self.walk.shows(path, place, info)
            if kind is None:
                return 0
            access = rights[1 if kind == secrets.FIXED else 0]
            if not stat.S_ISDIR(info.st_mode):
                calls.allow(ruleset, place, access & ON_FILES)
            elif path in closed:
                return access
            else:
                calls.allow(ruleset, place, access)
            return 0
        finally:
            os.close(place)


class Hurry:
    """Has this process run before others, which a cover cannot wait for on a busy machine.

    Under a root server always (a real-time one), else with the shortest turns that Linux gives to
    all (0.1 ms; Linux 6.12), and then sooner. What Linux refuses is left.
    """

    def __init__(self) -> None:
        self._on = False
        linux.shortest_turns()

    def on(self, wanted: bool) -> None:
        """Begin, or leave off."""
        if wanted == self._on:
            return
        self._on = wanted
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK if wanted else os.SCHED_OTHER
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, os.sched_param(int(wanted)))


class Watches:
    """The folders that inotify watches, by its numbers."""

    def __init__(self) -> None:
        self._fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        self._places: dict[int, tuple[Ground, Parts]] = {}
        self._moved: set[int] = set()
        """Cookies of renames whose first name was a secret's."""
        self.lacking = 0

    def fileno(self) -> int:
        """What to poll; -1 where Linux gives none."""
        return int(self._fd)

    def add(self, ground: Ground, parts: Parts, folder: int) -> None:
        """Watch an open folder."""
        path = f"/proc/self/fd/{folder}".encode()
        number = _libc.inotify_add_watch(self._fd, path, _MASK | _IN_ONLYDIR)
        if number < 0:
            self.lacking += 1
        else:
            self._places[number] = (ground, parts)

    def events(self) -> Iterator[Change | None]:
        """What has changed; None when some of it is not known any more."""
        try:
            data = os.read(self._fd, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        place = 0
        while place < len(data):
            number, mask, cookie, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0")
            place += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                yield None
            elif mask & _IN_IGNORED:
                self._places.pop(number, None)
            elif number in self._places and name:
                ground, parts = self._places[number]
                path = (*parts, os.fsdecode(name))
                if mask & _IN_MOVED_FROM:
                    if ground.walk.hides(path):
                        if len(self._moved) >= _FEW_CHANGES:  # they left what is watched
                            self._moved.clear()
                        self._moved.add(cookie)
                    continue
                if mask & _IN_MOVED_TO and cookie in self._moved:
                    self._moved.remove(cookie)
                    yield Change(ground, path, hidden=True)
                    continue
                # while a file is written it may come to hold credentials; no other write matters
                if not mask & _IN_CLOSE_WRITE or secrets.judged_by_content(path):
                    yield Change(ground, path)


class Keeper:
    """Serves one server until that is gone."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._watches = Watches()
        self._grounds: list[Ground] = []
        self._inodes: dict[tuple[int, int], int] = {}
        """Of what is covered in any of them: files have names in several."""
        self._full: set[int] = set()
        """Those of which the log says that not all is covered: code can make any number."""
        self._entering = Entering()
        self._hurry = Hurry()
        self._changes: dict[Change, None] = {}
        self._version = 0
        self._log: dict[tuple[int, Parts], int] = {}
        """The version of what was covered last after the first walk, by mount and path."""
        self._maps: dict[tuple[int, ...], int] = {}

    def run(self) -> None:
        """Serve; returns when the server has gone."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        if self._watches.fileno() >= 0:
            poll.register(self._watches.fileno(), select.POLLIN)
        while True:
            self._hurry.on(len(self._changes) < _FEW_CHANGES)
            ready = [fd for fd, _ in poll.poll(0 if self._changes else None)]
            if self._watches.fileno() in ready:
                self._on_events()
            if self._changes:
                self._changed(self._next())
            for fd in ready:
                if self._entering.ended(fd):
                    poll.unregister(fd)
            if self._server.fileno() in ready:
                received = linux.receive(self._server)
                if received is None:
                    return
                self._on_message(*received, poll)

    def _on_message(self, message: dict[str, Any], fds: list[int], poll: select.poll) -> None:
        operation, number = message["op"], message.get("id", 0)
        try:
            if operation == "watch":
                self._begin(number, message["mounts"])
            elif operation == "map":
                self._tell({"op": "mapped", "id": number}, [self._map(message["rows"])])
            elif operation == "hold":
                held = Sandbox(*fds)
                if failed := self._entering.hold(held, self._since(message["since"])):
                    raise OSError(failed)
                poll.register(held.process, select.POLLIN)
                self._tell({"op": "held", "id": number})
                self._entering.prepare()
            elif operation == "rules":
                self._allow(fds[0], message["read"], message["write"])
                self._tell({"op": "done", "id": number})
            elif operation == "again":
                ground = self._grounds[message["mount"]]
                ground.again()
                self._tell_covers(ground, list(ground.walk.found.covers), anew=True)
                self._tell({"op": "done", "id": number})
        except secrets.TooManySecrets:
            self._tell({"op": "failed", "id": number, "error": _TOO_MANY})
        except OSError as reason:
            self._tell({"op": "failed", "id": number, "error": str(reason)})

    def _allow(self, ruleset: int, read: int, write: int) -> None:
        try:
            for ground in self._grounds:
                ground.allow(ruleset, read, write)
        finally:
            os.close(ruleset)

    def _since(self, version: int) -> list[Work]:
        """The places, and what was covered after a version, below 0 all; outer folders first."""
        places = [each.place for each in self._grounds]
        if version < 0:
            return places + [
                _work(each, path)
                for each in self._grounds
                for path in sorted(each.walk.found.covers)
            ]
        missed = [place for place, covered in self._log.items() if covered > version]
        return places + [_work(self._grounds[number], path) for number, path in missed]

    def _begin(self, number: int, mounts: Sequence[dict[str, Any]]) -> None:
        for index, data in enumerate(mounts):
            error = ""
            try:
                ground = Ground(index, data, self._watches, self._inodes)
                self._grounds.append(ground)
                if ground.is_folder:
                    for _ in ground.walk.below(()):
                        pass
                if index == len(mounts) - 1:
                    self._linked()
            except secrets.TooManySecrets:
                error = _TOO_MANY
            except OSError as reason:
                error = str(reason)
            if error:
                self._tell({"op": "refused", "id": number, "mount": index, "error": error})
                return
        for ground in self._grounds:
            self._tell_covers(ground, list(ground.walk.found.covers))
        if self._watches.fileno() < 0 or self._watches.lacking:
            self._tell({"op": "said", "text": _NOT_WATCHED})
        self._tell({"op": "ready", "id": number})

    def _on_events(self) -> None:
        """Cover secrets by name at once; all else waits until there are no more events."""
        for change in self._watches.events():
            if change is None or len(self._changes) >= _MOST_CHANGES:
                self._changes = dict.fromkeys(map(Change, self._grounds))
            elif change.urgent:
                self._changed(change)
            else:
                self._changes[change] = None

    def _next(self) -> Change:
        first = next(iter(self._changes))
        del self._changes[first]
        return first

    def _changed(self, change: Change) -> None:
        """Cover what is new at a place, or anywhere, if it is still there."""
        ground, walk = change.ground, change.ground.walk
        try:
            hidden = change.hidden
            one = walk.one(change.parts, hidden=hidden) if change.parts else walk.below(())
            for found in one:
                self._cover(ground, found)
            if not change.parts:
                self._cover(ground, sorted(walk.found.covers))
            for each, paths in self._linked():
                self._cover(each, paths)
            if walk.found.gone:
                self._tell_covers(ground, [])
        except secrets.TooManySecrets:
            if ground.number not in self._full:
                self._full.add(ground.number)
                self._tell({"op": "said", "text": f"{ground.guest}: {_TOO_MANY}"})
        except OSError:
            return

    def _linked(self) -> list[tuple[Ground, list[Parts]]]:
        """Other names, in all mounts, of files found last."""
        if not any(each.walk.found.linked for each in self._grounds):
            return []
        return [(each, each.walk.linked(anyway=True)) for each in self._grounds]

    def _cover(self, ground: Ground, paths: Sequence[Parts]) -> None:
        """Cover in all sandboxes, then tell the server."""
        if not paths:
            return
        for error in self._entering.cover([_work(ground, path) for path in paths]):
            self._tell({"op": "said", "text": f"{ground.guest}: {_NOT_COVERED} ({error})"})
        self._version += 1
        for path in paths:
            self._log[ground.number, path] = self._version
        self._tell_covers(ground, paths)

    def _map(self, rows: Sequence[Sequence[int]]) -> int:
        """A user namespace with these maps: user and group, each on disk and as seen."""
        key = tuple(number for row in rows for number in row)
        if key in self._maps:
            return self._maps[key]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                linux.unshare(linux.CLONE_NEWUSER)
                os.write(write, b"1")
                signal.pause()
            os._exit(1)
        try:
            os.close(write)
            if not os.read(read, 1):
                raise OSError("Linux gives no user namespace, which an id-map takes")
            for name, (disk, seen) in zip(("uid_map", "gid_map"), rows, strict=True):
                with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
                    file.write(f"{disk} {seen} 1\n")
            self._maps[key] = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(read)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return self._maps[key]

    def _tell_covers(self, ground: Ground, paths: Sequence[Parts], *, anew: bool = False) -> None:
        found = ground.walk.found
        told = {"op": "covers", "mount": ground.number, "version": self._version}
        told["gone"] = [key for key in found.gone if key not in found.inodes]
        fresh = list(found.fresh)
        found.gone.clear()
        found.fresh.clear()
        kinds = ([(path, found.covers[path]) for path in part] for part in parts_of(paths, weight))
        pieces: list[dict[str, Any]] = [{"covers": part} for part in kinds]
        pieces += [{"inodes": part} for part in parts_of(fresh, lambda _key: _INODE_BYTES)]
        for number, piece in enumerate(pieces or [{}]):
            first = anew and number == 0
            self._tell({**told, "anew": first, "covers": [], "inodes": [], **piece})

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError):
            linux.send(self._server, message, fds)


def _work(ground: Ground, path: Parts) -> Work:
    return ground.guest, path, ground.walk.found.covers.get(path, secrets.FILE)


_TOO_MANY = (
    f"more than {secrets.MOST_COVERS} files and folders in it would have to be covered; mount the "
    "folders in it that are needed"
)
_NOT_COVERED = (
    "a running session shows what has appeared or was replaced there; reset or close the sessions"
)
_NOT_WATCHED = (
    "not every mounted folder can be watched, as Linux gives this user no more inotify watches "
    "(fs.inotify.max_user_watches): secrets that appear or are replaced there while sessions run "
    "are not covered until a new kernel starts"
)


def stage(folder: str, trees: Sequence[int], command: Sequence[str]) -> NoReturn:
    """Put detached mounts into `folder`, named 0, 1, …, for a command alone; execute that."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    for number, tree in enumerate(trees):
        target = f"{folder}/{number}"
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)  # noqa: PTH102  # pathlib would take the start 10 ms
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        linux.move_mount(tree, target)
        os.close(tree)
    os.execv(command[0], list(command))


def main(argv: Sequence[str]) -> int:
    """Serve the server whose socket is the descriptor `argv[0]`; or `stage FOLDER FDS COMMAND…`."""
    if argv[0] == "stage":
        stage(argv[1], [int(fd) for fd in argv[2].split(",")], argv[3:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("kernel-keeper")
    with socket.socket(fileno=int(argv[0])) as server:
        server.set_inheritable(False)
        Keeper(server).run()
    return 0
