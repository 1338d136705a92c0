"""`keeper FD`: the process that maintains covers in running sandboxes, see `bare_program`.

It walks the mounted folders once and then watches them (inotify). A rename on the host removes a
cover, so new and replaced entries are covered in all running sandboxes. Entries with a secret's
name are handled first. Messages of the server, one packet each, and the answers:

    {"op": "watch", "mounts": […], "version": v}       first; then `covers` for each, and `ready`
    {"ping": n}                                  `{"pong": n}`
    {"op": "map", "id": n, "uid": …, "gid": …}   `mapped`, with a user namespace for an id-map
    {"op": "hold", "id": n, "since": v}          `held` once covers after v (-1: all) are applied;
        with descriptors: the sandbox's mount namespace, a pidfd of its process
    {"op": "again", "id": n, "mount": i}         walk a mount anew whose folder was replaced: `done`
    {"op": "rules", "id": n, "read": …, "write": …}    `done` once the Landlock ruleset that is
        passed allows these rights below the mounts; below strict ones by entry where needed
    {"op": "named", "id": n, "mount": i, "paths": […], "sources": […], "outside": […], "last": b}
        paths that hosts execute according to settings, replacing the former ones, and the files of
        these settings, below the mount and elsewhere: `done` after the last part

    {"op": "covers", "mount": i, "version": v, "covers": […], "inodes": […], "gone": […],
     "removed": […]}
        new covers: each path with its kind and its maker, if that matters and is known; `gone` are
        inodes that no longer belong to a secret, `removed` read-only paths that no longer exist
    {"op": "named" or "asks", "mount": i, "first": b, "last": b, "paths": […]}
        paths that hosts execute whatever their names, sent before their covers; and a request to
        read settings (again), with the folders of repositories
    {"op": "changed", "mount": i, "paths": […]}  changed files that agents obey, with their writers
    {"op": "said", "text": …}                    a line for the log
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_mcp.host_folders import secrets
from kernel_mcp.host_folders.covers import MOST_COVERS, TooManySecrets
from kernel_mcp.host_folders.id_maps import IdMaps
from kernel_mcp.host_folders.inodes import SharedInodes
from kernel_mcp.host_folders.makers import HOST, NAMED, by_code
from kernel_mcp.host_folders.mounted_folder import MountedFolder
from kernel_mcp.host_folders.named_paths import MOST_NAMED, last_names
from kernel_mcp.host_folders.namespaces import (
    RunningSandbox,
    SandboxNamespaces,
    Work,
    parts_of,
    weight,
)
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.host_folders.watching import Change, Watches
from kernel_specs import linux
from kernel_specs.template import packets

_INODE_BYTES = 50
"""Upper bound of the bytes of a device and an inode in a message."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""Escape in paths of /proc/PID/mountinfo."""
_MOST_CHANGES = 1 << 14
"""Maximum number of queued changes, as in Linux itself. Beyond it the mounts are walked again."""
_FEW_CHANGES = 64
"""Queued changes from which this process gives up its priority: code can cause any number."""


class RealtimePriority:
    """Scheduling priority of this process, so that covers are not late on a busy machine.

    The process gets the shortest time slice open to every user (0.1 ms; Linux 6.12), and is
    therefore scheduled sooner. Under a root server it also gets the policy SCHED_RR. If Linux
    refuses either, the process runs without it.
    """

    def __init__(self) -> None:
        self._on = False
        linux.shortest_turns()

    def on(self, wanted: bool) -> None:
        """Switch the real-time policy on or off."""
        if wanted == self._on:
            return
        self._on = wanted
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK if wanted else os.SCHED_OTHER
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, os.sched_param(int(wanted)))


class Keeper:
    """Maintains the covers of one server until the server closes its socket."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._watches = Watches()
        self._folders: list[MountedFolder] = []
        self._inodes = SharedInodes()
        self._missing_watches = False
        """True once the missing watches are logged."""
        self._lacking_names: set[int] = set()
        """Mounts for which it is logged that not all executed paths are known."""
        self._full: set[int] = set()
        """Mounts for which it is logged that the limit of covers is reached."""
        self._namespaces = SandboxNamespaces()
        self._priority = RealtimePriority()
        self._mounted = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        """Table of this namespace's mounts, also readable from inside another namespace."""
        self._places: set[bytes] = set()
        """Mount points of the host."""
        self._changes: dict[Change, None] = {}
        self._version = 0
        self._log: dict[tuple[int, Parts], int] = {}
        """Version of each cover applied after the first walk, by mount and path."""
        self._id_maps = IdMaps()

    def run(self) -> None:
        """Serve until the server closes its socket."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        makers = self._watches.makers
        for fd in (self._watches.fileno(), makers.fileno()):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        poll.register(self._mounted, select.POLLPRI)
        while True:
            self._priority.on(len(self._changes) < _FEW_CHANGES)
            ready = [fd for fd, _ in poll.poll(0 if self._changes else None)]
            if makers.fileno() in ready:
                makers.note()
            if self._watches.fileno() in ready:
                self._on_events()
            if self._mounted in ready:
                self._on_mounts()
            if self._changes:
                self._changed(self._next())
            for fd in ready:
                if self._namespaces.ended(fd):
                    poll.unregister(fd)
            if self._server.fileno() in ready:
                received = packets.receive(self._server)
                if received is None:
                    return
                self._on_message(*received, poll)

    def _on_message(self, message: dict[str, Any], fds: list[int], poll: select.poll) -> None:
        if "ping" in message:
            self._send({"pong": message["ping"]})
            return
        operation, number = message["op"], message.get("id", 0)
        try:
            if operation == "watch":
                self._begin(number, message["mounts"], message["version"])
            elif operation == "map":
                namespace = self._id_maps.namespace(message["rows"])
                self._send({"op": "mapped", "id": number}, [namespace])
            elif operation == "hold":
                held = RunningSandbox(*fds)
                if failed := self._namespaces.hold(held, self._since(message["since"])):
                    raise OSError(failed)
                poll.register(held.process, select.POLLIN)
                self._send({"op": "held", "id": number})
                self._namespaces.prepare()
            elif operation == "rules":
                self._allow(fds[0], message["read"], message["write"])
                self._send({"op": "done", "id": number})
            elif operation == "named":
                self._on_named(self._folders[message["mount"]], message)
                self._send({"op": "done", "id": number})
            elif operation == "again":
                folder = self._folders[message["mount"]]
                folder.reopen()
                self._tell_covers(folder, list(folder.walk.covers.kinds), anew=True)
                if folder.writable:
                    self._ask(folder)
                self._send({"op": "done", "id": number})
        except TooManySecrets:
            self._send({"op": "failed", "id": number, "error": _TOO_MANY})
        except OSError as reason:
            self._send({"op": "failed", "id": number, "error": str(reason)})

    def _allow(self, ruleset: int, read: int, write: int) -> None:
        try:
            for folder in self._folders:
                folder.allow(ruleset, read, write)
        finally:
            os.close(ruleset)

    def _since(self, version: int) -> list[Work]:
        """Return the checks of all mounts, and the covers newer than a version (below 0: all).

        Outer folders come first.
        """
        places = [each.mount_check for each in self._folders]
        if version < 0:
            return places + [
                _work(each, path)
                for each in self._folders
                for path in sorted(each.walk.covers.kinds)
            ]
        missed = [place for place, covered in self._log.items() if covered > version]
        return places + [
            _work(self._folders[number], path)
            for number, path in missed
            if path in self._folders[number].walk.covers.kinds
        ]

    def _begin(self, number: int, mounts: Sequence[dict[str, Any]], version: int) -> None:
        """Walk the mounts and report the covers.

        `version` is the last one of the keeper that this one replaces, 0 for none. All covers get a
        newer one.
        """
        for index, data in enumerate(mounts):
            error = ""
            try:
                folder = MountedFolder(index, data, self._watches, self._inodes)
                self._folders.append(folder)
                if folder.is_folder:
                    for _ in folder.walk.below(()):
                        pass
                if index == len(mounts) - 1:
                    self._linked()
            except TooManySecrets:
                error = _TOO_MANY
            except OSError as reason:
                error = str(reason)
            if error:
                self._send({"op": "refused", "id": number, "mount": index, "error": error})
                return
        self._on_mounts()
        if version:
            self._version = version + 1
        for folder in self._folders:
            covers = list(folder.walk.covers.kinds)
            if version:
                self._log.update({(folder.number, path): self._version for path in covers})
            self._tell_covers(folder, covers, makers=False)
        self._note_lacking()
        for folder in self._folders:
            folder.walk.covers.done = True
            if folder.writable:
                self._ask(folder)
            if unfixed := folder.walk.covers.writable_links:
                self._send({"op": "said", "text": f"{folder.guest}: {unfixed} {_UNFIXED}"})
        self._send({"op": "ready", "id": number})

    def _on_named(self, folder: MountedFolder, message: dict[str, Any]) -> None:
        """Make the paths that settings name read-only, once the last part of the list is there."""
        folder.named_next += map(tuple, message["paths"])
        folder.sources.update(map(tuple, message["sources"]))
        self._watches.watch_outside(message["outside"])
        if not message["last"]:
            return
        folder.named_by_server, folder.named_next = folder.named_next, []
        if not folder.is_folder:
            return
        for found in folder.walk.fix(folder.named_by_server):
            self._cover(folder, found, begins=not message["again"], named=True)
        self._inodes.fixed.clear()

    def _on_events(self) -> None:
        """Cover entries with a secret's name at once; queue other changes until events are read."""
        for change in self._watches.events():
            if change is None or len(self._changes) >= _MOST_CHANGES:
                self._changes = dict.fromkeys(map(Change, self._folders))
            elif change.urgent:
                self._changed(change)
            else:
                self._changes[change] = None
        for folder in self._folders:
            if folder.rights_changed:
                self._restore(folder)
            self._tell_obeyed(folder)
            if folder.writable and self._watches.outside_changed:
                self._ask(folder)
        self._watches.outside_changed = False

    def _tell_obeyed(self, folder: MountedFolder) -> None:
        changed, folder.obeyed = folder.obeyed, {}
        for part in parts_of(list(changed), weight):
            written = [(path, folder.writer(path, modified=changed[path])) for path in part]
            self._send({"op": "changed", "mount": folder.number, "paths": written})

    def _restore(self, folder: MountedFolder) -> None:
        folder.rights_changed = False
        try:
            if folder.rights.restore():
                self._send({"op": "said", "text": f"{folder.guest}: {_RIGHTS}"})
        except OSError as reason:
            self._send({"op": "said", "text": f"{folder.guest}: {_RIGHTS_KEPT} ({reason})"})

    def _ask(self, folder: MountedFolder) -> None:
        """Ask the server to read settings again."""
        folder.walk.settings_changed = False
        self._tell_paths("asks", folder, list(folder.walk.git))

    def _tell_paths(self, operation: str, folder: MountedFolder, paths: Sequence[Parts]) -> None:
        parts = list(parts_of(paths, weight)) or [[]]
        for number, part in enumerate(parts):
            ends = {"first": number == 0, "last": number == len(parts) - 1}
            self._send({"op": operation, "mount": folder.number, "paths": part, **ends})

    def _note_lacking(self) -> None:
        if (self._watches.fileno() < 0 or self._watches.lacking) and not self._missing_watches:
            self._missing_watches = True
            self._send({"op": "said", "text": _NOT_WATCHED})

    def _on_mounts(self) -> None:
        """Examine what the host has mounted below the folders since they were walked."""
        os.lseek(self._mounted, 0, os.SEEK_SET)
        table = b"".join(iter(lambda: os.read(self._mounted, 1 << 16), b""))
        before, self._places = self._places, {line.split()[4] for line in table.splitlines()}
        for place in self._places - before:
            path = Path(os.fsdecode(_ESCAPED.sub(lambda each: bytes((int(each[1], 8),)), place)))
            for folder in self._folders:
                if path.is_relative_to(folder.host) and path != Path(folder.host):
                    self._changed(Change(folder, path.relative_to(folder.host).parts))

    def _next(self) -> Change:
        first = next(iter(self._changes))
        del self._changes[first]
        return first

    def _changed(self, change: Change) -> None:
        """Walk a changed entry, or a whole mount, and apply the covers that are missing."""
        folder, walk = change.folder, change.folder.walk
        try:
            hidden = change.hidden
            one = walk.one(change.parts, hidden=hidden) if change.parts else walk.below(())
            for found in one:
                self._cover(folder, found)
            if not change.parts:
                self._cover(folder, sorted(walk.covers.kinds))
            for each, paths in self._linked():
                self._cover(each, paths)
            self._note_lacking()
            self._tell_obeyed(folder)
            if walk.covers.over_limit:
                self._tell_covers(folder, walk.covers.over_limit)
                walk.covers.over_limit.clear()
                self._note_full(folder)
            if walk.inodes.reused or walk.covers.removed:
                self._tell_covers(folder, [])
            if folder.writable and (walk.settings_changed or change.parts in folder.sources):
                self._ask(folder)
        except TooManySecrets:
            self._note_full(folder)
        except OSError:
            return

    def _note_full(self, folder: MountedFolder) -> None:
        if folder.number not in self._full:
            self._full.add(folder.number)
            self._send({"op": "said", "text": f"{folder.guest}: {_TOO_MANY}"})

    def _note_lacking_names(self, folder: MountedFolder) -> None:
        if folder.number not in self._lacking_names:
            self._lacking_names.add(folder.number)
            self._send({"op": "said", "text": f"{folder.guest}: {_UNNAMED}"})

    def _linked(self) -> list[tuple[MountedFolder, list[Parts]]]:
        """Cover the hard links of new findings in all mounts; return the paths by mount."""
        if not any(each.walk.inodes.unsearched_links for each in self._folders):
            return []
        found = [(each, each.walk.linked(anyway=True)) for each in self._folders]
        if all(each.walk.covers.done for each in self._folders):
            self._inodes.fixed.clear()
        return found

    def _cover(
        self,
        folder: MountedFolder,
        paths: Sequence[Parts],
        *,
        begins: bool = False,
        named: bool = False,
    ) -> None:
        """Cover paths in all sandboxes, then report them; with `begins` there is no sandbox yet."""
        if not paths:
            return
        if begins:
            self._tell_covers(folder, paths)
            return
        for error in self._namespaces.cover([_work(folder, path) for path in paths]):
            self._send({"op": "said", "text": f"{folder.guest}: {_NOT_COVERED} ({error})"})
        self._version += 1
        for path in paths:
            self._log[folder.number, path] = self._version
        self._tell_covers(folder, paths, named=named)

    def _tell_covers(
        self,
        folder: MountedFolder,
        paths: Sequence[Parts],
        *,
        anew: bool = False,
        named: bool = False,
        makers: bool = True,
    ) -> None:
        covers, inodes = folder.walk.covers, folder.walk.inodes
        if folder.walk.named_paths.new_names:
            folder.walk.named_paths.new_names = False
            self._watches.makers.look_for(last_names(folder.walk.named_paths.all))
            self._tell_paths("named", folder, folder.walk.named_paths.all)
            if folder.walk.named_paths.lacking:
                self._note_lacking_names(folder)
        told = {"op": "covers", "mount": folder.number, "version": self._version}
        told["gone"] = [key for key in inodes.reused if key not in inodes.hidden]
        told["removed"] = list(covers.removed)
        fresh = list(inodes.new)
        inodes.reused.clear()
        covers.removed.clear()
        inodes.new.clear()

        def maker(path: Parts) -> str:
            if anew or not makers or self._version == 0:
                return ""
            who = folder.maker(path)
            known = who == HOST or by_code(who)
            return NAMED if named and not known and folder.is_older(path) else who

        kinds = (
            [(path, covers.kinds.get(path, secrets.FIXED), maker(path)) for path in part]
            for part in parts_of(paths, weight)
        )
        pieces: list[dict[str, Any]] = [{"covers": part} for part in kinds]
        pieces += [{"inodes": part} for part in parts_of(fresh, lambda _key: _INODE_BYTES)]
        for number, piece in enumerate(pieces or [{}]):
            first = anew and number == 0
            self._send({**told, "anew": first, "covers": [], "inodes": [], **piece})
            told["removed"] = []

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError):
            packets.send(self._server, message, fds)


def _work(folder: MountedFolder, path: Parts) -> Work:
    return folder.guest, path, folder.walk.covers.kinds.get(path, secrets.FILE)


_TOO_MANY = (
    f"more than {MOST_COVERS} files and folders in it would have to be covered; mount the "
    "folders in it that are needed"
)
_UNFIXED = (
    "further names (hard links) of files that programs of the host execute are not kept "
    "read-only, as there are too many: sessions can change those files by them"
)
_UNNAMED = (
    f"settings and links name more than {MOST_NAMED} paths in it that programs of the host "
    "execute; sessions can change what is at the others"
)
_RIGHTS = (
    "rights to the mounted folder itself, which a session or a program of the host gave to "
    "others, were taken back; restart the server to give others rights to it"
)
_RIGHTS_KEPT = "rights to the mounted folder were given to others and cannot be taken back"
_NOT_COVERED = (
    "a running session shows what has appeared or was replaced there; reset or close the sessions"
)
_NOT_WATCHED = (
    "not every mounted folder can be watched, as half of this user's inotify watches are taken "
    "(fs.inotify.max_user_watches): secrets that appear or are replaced there while sessions run "
    "are not covered until a new kernel starts"
)


def main(argv: Sequence[str]) -> int:
    """Serve the server whose socket is the descriptor `argv[0]`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("kernel-keeper")
    with socket.socket(fileno=int(argv[0])) as server:
        server.set_inheritable(False)
        Keeper(server).run()
    return 0
