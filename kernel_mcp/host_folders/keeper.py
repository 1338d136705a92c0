"""`keeper FD`: a process that keeps covers where they belong, started by `bare_program`.

It walks the mounted folders once, watches them (inotify), and covers in the sandboxes that run
what appears or is replaced on the host: a rename there takes a cover off. One thread, so that it
may fork what enters a sandbox. Messages of the server, one packet each, and the answers:

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
import fcntl
import os
import select
import signal
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from kernel_mcp.host_folders import secrets
from kernel_mcp.linux.safe_tree import open_beneath
from kernel_specs.landlock import calls
from kernel_specs.template import linux

BLANK = "/run/blank"
"""Where every sandbox with mounts has an empty `file` and an empty `folder`."""
_BATCH = 100

# <sys/inotify.h>
_IN_ATTRIB, _IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_CREATE = 0x4, 0x8, 0x80, 0x100
_IN_Q_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_MASK = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE
_IN_ONLYDIR, _IN_NONBLOCK, _IN_CLOEXEC = 0x01000000, 0o4000, 0o2000000
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EVENT = struct.Struct("iIII")
_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>
READ_DIR = 1 << 3
ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""<linux/landlock.h>: listing, and the rights that a rule about a file may hold."""

_libc = ctypes.CDLL(None, use_errno=True)
Path = tuple[str, ...]


@dataclass
class Sandbox:
    """A sandbox that runs: its mount namespace, and a pidfd that is readable once it has ended."""

    namespace: int
    process: int


class Ground:
    """One mounted folder: its descriptor, its walk, and where sandboxes see it."""

    def __init__(self, number: int, data: dict[str, Any], watches: Watches) -> None:
        self.number = number
        self.host, self.guest = str(data["host"]), str(data["guest"])
        self._own = {tuple(path): str(kind) for path, kind in data["own"]}
        self._writable = data["writable"] is True
        self._strict = data["strict"] is True
        self._inner = [tuple(path) for path in data["inner"]]
        self._watches = watches
        self._root = -1
        self.walk = self._fresh()

    def _fresh(self) -> secrets.Walk:
        if self._root >= 0:
            os.close(self._root)
        self._root = os.open(self.host, os.O_PATH | os.O_CLOEXEC)
        return secrets.Walk(
            self._root,
            own=self._own,
            inner=self._inner,
            writable=self._writable,
            strict=self._strict,
            visit=lambda parts, fd: self._watches.add(self, parts, fd),
        )

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
        pending: list[tuple[Path, int]] = [((), access)]
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
        path: Path,
        rights: tuple[int, int],
        closed: Collection[Path],
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


class Watches:
    """The folders that inotify watches, by its numbers."""

    def __init__(self) -> None:
        self._fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        self._places: dict[int, tuple[Ground, Path]] = {}
        self.lacking = 0

    def fileno(self) -> int:
        """What to poll; -1 where Linux gives none."""
        return int(self._fd)

    def add(self, ground: Ground, parts: Path, folder: int) -> None:
        """Watch an open folder."""
        path = f"/proc/self/fd/{folder}".encode()
        number = _libc.inotify_add_watch(self._fd, path, _MASK | _IN_ONLYDIR)
        if number < 0:
            self.lacking += 1
        else:
            self._places[number] = (ground, parts)

    def events(self) -> Iterator[tuple[Ground, Path] | None]:
        """What has changed, by ground and path; None when some of it is not known any more."""
        try:
            data = os.read(self._fd, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        place = 0
        while place < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0")
            place += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                yield None
            elif mask & _IN_IGNORED:
                self._places.pop(number, None)
            elif number in self._places and name:
                ground, parts = self._places[number]
                path = (*parts, os.fsdecode(name))
                # while a file is written it may come to hold credentials; no other write matters
                if not mask & _IN_CLOSE_WRITE or secrets.judged_by_content(path):
                    yield ground, path


class Keeper:
    """Serves one server until that is gone."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._watches = Watches()
        self._grounds: list[Ground] = []
        self._sandboxes: dict[int, Sandbox] = {}
        self._version = 0
        self._log: list[tuple[int, Ground, Path]] = []
        """What was covered after the first walk, by version."""
        self._maps: dict[tuple[int, ...], int] = {}

    def run(self) -> None:
        """Serve; returns when the server has gone."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        if self._watches.fileno() >= 0:
            poll.register(self._watches.fileno(), select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._watches.fileno() in ready:
                self._on_events()
            for fd in ready:
                if (ended := self._sandboxes.pop(fd, None)) is not None:
                    poll.unregister(fd)
                    linux.close_all([ended.namespace, ended.process])
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
                missed = self._since(message["since"])
                if missed:
                    self._enter(held, missed)
                self._sandboxes[held.process] = held
                poll.register(held.process, select.POLLIN)
                self._tell({"op": "held", "id": number})
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

    def _since(self, version: int) -> list[tuple[Ground, Path]]:
        """What has been covered after a version, below 0 all of it; outer folders come first."""
        if version < 0:
            return [
                (each, path) for each in self._grounds for path in sorted(each.walk.found.covers)
            ]
        return [each[1:] for each in self._log if each[0] > version]

    def _begin(self, number: int, mounts: Sequence[dict[str, Any]]) -> None:
        for index, data in enumerate(mounts):
            error = ""
            try:
                ground = Ground(index, data, self._watches)
                self._grounds.append(ground)
                if ground.is_folder:
                    ground.walk.all()
            except secrets.TooManySecrets:
                error = _TOO_MANY
            except OSError as reason:
                error = str(reason)
            if error:
                self._tell({"op": "refused", "id": number, "mount": index, "error": error})
                return
            self._tell_covers(ground, list(ground.walk.found.covers))
        if self._watches.fileno() < 0 or self._watches.lacking:
            self._tell({"op": "said", "text": _NOT_WATCHED})
        self._tell({"op": "ready", "id": number})

    def _on_events(self) -> None:
        for change in self._watches.events():
            if change is None:
                for ground in self._grounds:
                    self._changed(ground, None)
            else:
                self._changed(*change)

    def _changed(self, ground: Ground, start: Path | None) -> None:
        """Cover what is new at a place, or anywhere without one, if it is still there."""
        try:
            found = ground.walk.one(start) if start else ground.walk.below(())
            if start is None:
                found = list(ground.walk.found.covers)
            if found:
                self._cover(ground, found)
            elif ground.walk.found.gone:
                self._tell_covers(ground, [])
        except secrets.TooManySecrets:
            self._tell({"op": "said", "text": f"{ground.guest}: {_TOO_MANY}"})
        except OSError:
            return

    def _cover(self, ground: Ground, paths: Sequence[Path]) -> None:
        """Cover in all sandboxes, then tell the server."""
        work = [(ground, path) for path in paths]
        for held in list(self._sandboxes.values()):
            self._cover_in(held, ground, work)
        self._version += 1
        self._log += [(self._version, ground, path) for path in paths]
        self._tell_covers(ground, paths)

    def _cover_in(self, held: Sandbox, ground: Ground, work: Sequence[tuple[Ground, Path]]) -> None:
        try:
            self._enter(held, work)
        except OSError as reason:
            if not select.select([held.process], [], [], 0)[0]:  # it has not ended
                text = f"{ground.guest}: {_NOT_COVERED} ({reason})"
                self._tell({"op": "said", "text": text})

    def _enter(self, held: Sandbox, work: Sequence[tuple[Ground, Path]]) -> None:
        """Have a child enter a sandbox and cover there what is not; raises OSError if it cannot."""
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(Exception):
                if os.geteuid() != 0:
                    user = fcntl.ioctl(held.namespace, _NS_GET_USERNS)
                    linux.setns(user, linux.CLONE_NEWUSER)
                linux.setns(held.namespace, linux.CLONE_NEWNS)
                for ground, path in work:
                    put(ground.guest, path, ground.walk.found.covers.get(path, secrets.FILE))
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise OSError(f"a sandbox could not be entered (status {status})")

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

    def _tell_covers(self, ground: Ground, paths: Sequence[Path], *, anew: bool = False) -> None:
        found = ground.walk.found
        told = {"op": "covers", "mount": ground.number, "version": self._version}
        told["gone"] = [key for key in found.gone if key not in found.inodes]
        fresh = list(found.fresh)
        found.gone.clear()
        found.fresh.clear()
        for first in range(0, max(len(paths), len(fresh), 1), _BATCH):
            batch = [(path, found.covers[path]) for path in paths[first : first + _BATCH]]
            told["anew"], told["covers"] = anew and first == 0, batch
            told["inodes"] = fresh[first : first + _BATCH]
            self._tell(told)

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError):
            linux.send(self._server, message, fds)


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


def put(guest: str, path: Path, kind: str) -> None:
    """Cover a path below a mount in this mount namespace, unless something does. Raises OSError."""
    current = os.open(guest, _PASSED)
    try:
        for name in path[:-1]:
            deeper = os.open(name, _PASSED, dir_fd=current)
            os.close(current)
            current = deeper
        target = open_beneath(current, path[-1:], os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return  # gone, a link, or beyond another mount: covered
    finally:
        os.close(current)
    try:
        tree = _cover_of(kind, target)
        try:
            linux.move_mount(tree, target)
        finally:
            os.close(tree)
    finally:
        os.close(target)


def _cover_of(kind: str, target: int) -> int:
    if kind in secrets.HIDING:
        return linux.open_tree(f"{BLANK}/{kind}")
    tree = linux.open_tree(target, recursive=True)
    if kind == secrets.FIXED:
        linux.set_attributes(tree, linux.MOUNT_ATTR_RDONLY, recursive=True)
    return tree


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
