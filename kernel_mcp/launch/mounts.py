"""The mounted folders of a server in its kernels, and the process that masks paths in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.config.mounts import Mount
from kernel_mcp.errors import ConfigError, KernelMcpError, LaunchError
from kernel_mcp.host_folders import Device, within
from kernel_mcp.host_folders.covers import MOST_COVERS
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.host_folders.namespaces import PINS, pins_of, weight
from kernel_mcp.host_folders.secrets import FIXED, HIDING
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.file_holders import FileHolders
from kernel_mcp.launch.git_settings import GitSettingsQuery, GitSettingsTracker
from kernel_mcp.launch.helper import HelperProcess
from kernel_mcp.launch.masked_sandboxes import MaskedSandboxes
from kernel_mcp.launch.mount_trees import MountTrees
from kernel_mcp.launch.new_files import NewFileQuarantine
from kernel_mcp.launch.readiness import WritableMounts
from kernel_mcp.linux.process import bare_program
from kernel_mcp.linux.safe_tree import open_place
from kernel_mcp.sandbox.base import (
    BY_BINDS,
    BY_RULES,
    BY_TREES,
    Builder,
    Grants,
)
from kernel_mcp.sandbox.landlock.rules import CHANGE, RUN, Ruleset
from kernel_mcp.sandbox.mounts import PROC, Folder, opens_proc
from kernel_mcp.sandbox.select import builder_for
from kernel_specs import linux
from kernel_specs.landlock import calls
from kernel_specs.template import packets

BEGIN_S = 180.0
"""Time limit in seconds for the first walk through all mounts; 100,000 files take about 1 s."""
ALL = -1
"""Version below that of every masked path: all masks are applied."""
KEEPER = "kernel_mcp.host_folders.keeper"

logger = logging.getLogger(__name__)


class MountGrants:
    """Client of the keeper, the process that watches the mounts and masks secrets below them.

    `blank` holds the empty file and folder that are mounted over masked paths.
    """

    def __init__(
        self,
        mounts: Sequence[Mount] = (),
        folder: Path = Path("/"),
        audit: Callable[[str, Mapping[str, Any]], None] = lambda _event, _facts: None,
        *,
        mount_method: str = BY_TREES,
        fixed: Sequence[Path] = (),
        devices: tuple[Device, ...] = (),
        builder: Callable[[], Builder] = builder_for,
    ) -> None:
        """`folder` belongs to the server and must exist; `audit` writes audit events.

        `mount_method` is that of the sandbox: by trees, binds or rules. `fixed` paths stay
        read-only below writable mounts. `devices` are in the /dev of every kernel. `builder` is
        called in a thread and returns the sandbox in which Git runs.
        """
        self._audit = audit
        self.devices = devices
        self.by_rules = mount_method == BY_RULES
        """True if kernels see the host's own files, restricted by Landlock rules."""
        self._fixed = fixed
        self.enters = mount_method == BY_TREES or (mount_method == BY_BINDS and os.geteuid() == 0)
        """True if the keeper can mask paths in sandboxes that already run."""
        self.shown = [ExposedMount(mount) for mount in mounts]
        self.trees = MountTrees(self.shown, mount_method, self._user_namespace)
        self.blank = folder / "blank"
        self.stage = folder / "stage"
        self.version = 0
        self.new_files = NewFileQuarantine(audit, fixed)
        self._settings = GitSettingsTracker(self.shown, GitSettingsQuery(builder), self._ask)
        self._settings_task: asyncio.Task[None] | None = None
        self._sandboxes = MaskedSandboxes()
        self._file_holders = FileHolders(
            self.blank, lambda: self._sandboxes.namespaces, self.new_files.note_held
        )
        self._ready = anyio.Event()
        self._opened = False
        self._beginning: asyncio.Task[None] | None = None
        self._keeper = HelperProcess(
            "the process that covers secrets below the mounted folders",
            lambda fd: bare_program(KEEPER, str(fd)),
            on_start=self._on_start,
            on_message=self._on_message,
            on_end=self._on_end,
        )
        self.remark: Callable[[str], None] = lambda _text: None
        """Called with a text that the next answer of every session includes."""

    def __bool__(self) -> bool:
        return bool(self.shown)

    @property
    def writable(self) -> WritableMounts:
        """The mounts and devices that kernels may write to."""
        proc = {PROC} if opens_proc(self.devices) else set()
        return WritableMounts(
            paths=frozenset((*proc, *(_listed(each.guest) for each in self.devices))),
            folders=frozenset(
                _listed(each.mount.guest) for each in self.shown if each.mount.writable
            ),
            fixed=self._read_only,
        )

    def _read_only(self) -> frozenset[str]:
        return frozenset(
            _listed("/".join((each.mount.guest, *path)))
            for each in self.shown
            for path, kind in each.covers.items()
            if kind == FIXED
        )

    @property
    def sealed(self) -> bool:
        """Return True if kernels can make no socket and need masks: with trees and binds."""
        return bool(self) and not self.by_rules

    @property
    def fits_message(self) -> bool:
        """Return True if all masked paths fit into half of one message to a template."""
        paths = [path for each in self.shown for path in each.covers]
        return sum(map(weight, paths)) < packets.PACKET_BYTES // 2

    @property
    def strict(self) -> list[str]:
        """Guest paths of the mounts that need a Landlock ruleset besides the sandbox."""
        strict = [each.mount.guest for each in self.shown if each.mount.strict]
        return [] if self.by_rules else strict

    def marks(self) -> tuple[tuple[int, int], ...]:
        """Return device and inode of each mounted folder now; missing folders are skipped.

        A template or sandbox that was made with other marks is stale.
        """
        found = []
        for each in self.shown:
            with contextlib.suppress(OSError):
                info = each.mount.host.stat()
                found.append((info.st_dev, info.st_ino))
        return tuple(found)

    def sights(self) -> tuple[object, ...]:
        """Return `marks`, and mtimes (ns) of folders in which kernels cannot read new entries."""
        found: list[object] = [*self.marks()]
        for each in self.shown:
            closed = each.closed if each.mount.strict or self.by_rules else ()
            for folder in closed:
                with contextlib.suppress(OSError):
                    found.append(each.mount.host.joinpath(*folder).lstat().st_mtime_ns)
        return tuple(found)

    def grants(self, *, network: bool) -> Grants:
        """Return the mounts, devices and network as a sandbox's report needs them."""
        return Grants(
            mounts=bool(self),
            writable=tuple(each.mount.guest for each in self.shown if each.mount.writable),
            network=network,
            devices=tuple(each.guest for each in self.devices),
        )

    @property
    def state(self) -> str:
        """Message that kernels cannot start while the keeper is being replaced; otherwise empty."""
        return "" if self._ready.is_set() or not self else _GONE

    @property
    def words(self) -> list[str]:
        """Lines of a report: the state, each mount, and the gaps."""
        return [*([self.state] if self.state else []), *map(str, self.shown), *self.gaps]

    @property
    def gaps(self) -> list[str]:
        """Messages about mounts: rules that this sandbox does not enforce, and unread settings."""
        found = self._settings.gaps
        if not self or (self.enters and not self.by_rules):
            return found
        return [*found, _BY_RULES if self.by_rules else _BY_DOCKER]

    async def open(self) -> None:
        """Start the keeper and search all mounts for secrets.

        Raises ConfigError for a mount that cannot be shown, or after `BEGIN_S`; LaunchError.
        """
        if not self:
            return
        for each in self.shown:
            around = [path for path in self._fixed if each.mount.host.is_relative_to(path)]
            if each.mount.writable and around:
                raise ConfigError(
                    f"--mount {each.mount}: this server or its kernels run what is in {around[0]}, "
                    "so that sessions may not change it. Mount it read-only, or have the server "
                    "and the environment of --python elsewhere."
                )
        (self.blank / "folder").mkdir(parents=True)
        (self.blank / "file").touch()
        self.stage.mkdir()
        for path, mode in ((self.blank, 0o755), (self.blank / "folder", 0o555)):
            path.chmod(mode)
        (self.blank / "file").chmod(0o444)
        for each in self.shown:
            (self.blank / PINS / pins_of(each.mount.guest)).mkdir(parents=True)
        (self.blank / PINS).chmod(0)
        with anyio.move_on_after(BEGIN_S):
            await self._begin()
            if os.geteuid() == 0:
                await self.trees.probe()
            self._settings_task = asyncio.create_task(self._settings.follow())
            self._warn_of_unmasked()
            return
        raise ConfigError(
            f"--mount: looking for secrets in the mounted folders took more than {BEGIN_S:g} s; "
            "mount the folders in them that are needed"
        )

    def _warn_of_unmasked(self) -> None:
        for each in self.shown:
            if each.mount.writable and (stays := each.read_only_summary):
                logger.warning(
                    "--mount %s: %s, as programs of the host execute that or take commands from it",
                    each.mount,
                    stays,
                )

    async def _begin(self) -> None:
        """Start the keeper and return once it has walked all mounts.

        Raises LaunchError, ConfigError.
        """
        self._keeper.start()
        if self._beginning is not None:
            await self._beginning

    def _on_start(self) -> None:
        self._beginning = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Make the keeper walk the mounts, and cover paths in running sandboxes.

        Raises LaunchError, ConfigError if the first keeper fails; a later one is replaced.
        """
        try:
            for each in self.shown:
                each.identity = _place(each.mount.host)
            requests = [self._watch_request(each) for each in self.shown]
            version = self.version + self._opened
            await self._ask({"op": "watch", "mounts": requests, "version": version})
            await self._settings.refresh(again=self._opened)
            for sandbox in self._sandboxes.running():
                await self._renew(sandbox)
        except KernelMcpError as error:
            if not self._opened:
                raise
            if self._keeper.running:
                self._keeper.replace(str(error))
            return
        self._opened = True
        self._ready.set()

    async def _renew(self, sandbox: tuple[int, int]) -> None:
        """Make a further keeper cover paths in a running sandbox. Raises LaunchError."""
        try:
            await self._ask({"op": "hold", "since": ALL}, sandbox)
        except LaunchError as error:
            if not self._keeper.running:
                raise
            if sandbox in self._sandboxes.running():
                self.remark(f"{_NOT_RENEWED} ({error})")
                logger.error("%s: %s", _NOT_RENEWED, error)

    def _watch_request(self, shown: ExposedMount) -> dict[str, Any]:
        inner = [
            Path(each.mount.guest).relative_to(shown.mount.guest).parts
            for each in self.shown
            if each is not shown and within(each.mount.guest, (shown.mount.guest,))
        ]
        mount = shown.mount
        return {
            "host": str(mount.host),
            "guest": mount.guest,
            "own": [
                (path.relative_to(mount.host).parts, FIXED)
                for path in self._fixed
                if mount.writable and path.is_relative_to(mount.host)
            ],
            "inner": inner,
            "writable": mount.writable,
            "strict": mount.strict or self.by_rules,
        }

    async def aclose(self) -> None:
        """End the keeper, and close all descriptors."""
        if self._settings_task is not None:
            self._settings_task.cancel()
            await asyncio.wait([self._settings_task])
        await self._keeper.aclose()
        if self._beginning is not None:
            self._beginning.cancel()
        await self._file_holders.aclose()
        self.trees.close()
        self._sandboxes.close()

    async def refresh(self, environment: KernelEnvironment) -> None:
        """Prepare the start of a kernel: walk mounts again whose folder was replaced.

        Waits up to `BEGIN_S` for a keeper that is being replaced. Raises LaunchError.
        """
        with anyio.move_on_after(BEGIN_S):
            while not self._ready.is_set():
                await self._ready.wait()
        if self.state:
            raise LaunchError(self.state)
        await self._settings.look()
        for number, each in enumerate(self.shown):
            place = _place(each.mount.host)
            if place != each.identity:
                await self._ask({"op": "again", "mount": number})
                each.identity = place
            self._hides(each.mount, environment)

    def _hides(self, mount: Mount, environment: KernelEnvironment) -> None:
        for path in map(str, environment.readonly):
            same = mount.guest == str(mount.host)
            if within(path, (mount.guest,)) and not same:
                raise LaunchError(
                    f"--mount {mount}: it would hide {path}, which the kernel's interpreter needs; "
                    "give it another place"
                )

    async def _user_namespace(self, rows: Sequence[tuple[int, int]]) -> int:
        """Return the descriptor of a user namespace that maps these ids."""
        _, fds = await self._ask({"op": "map", "rows": rows})
        return fds[0]

    async def ruleset(self) -> int:
        """Return the descriptor of a Landlock ruleset for one kernel; the caller closes it.

        For a sandbox that shows folders by rules, it handles all accesses. Otherwise it handles
        reading alone, and rules for paths outside the mounts are still missing.
        Raises LaunchError, OSError.
        """
        made = Ruleset().fd if self.by_rules else calls.make(calls.READING)
        read, change = (RUN, CHANGE) if self.by_rules else (calls.READING, calls.READING)
        try:
            await self._ask({"op": "rules", "read": int(read), "write": int(change)}, [made])
        except BaseException:
            os.close(made)
            raise
        return made

    async def apply_masks(self, pid: int, since: int) -> None:
        """Register a sandbox: the keeper masks paths in it that were found after version `since`.

        `pid` is a process of the sandbox. Raises LaunchError, OSError.
        """
        with self._sandboxes.adding(pid) as sandbox:
            await self._ask({"op": "hold", "since": since}, sandbox)

    async def _ask(
        self, message: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request to the keeper and return its answer. Raises LaunchError, ConfigError."""
        reply, fds = await self._keeper.ask(message, fds)
        if reply["op"] == "refused":
            raise ConfigError(f"--mount {self.shown[reply['mount']].mount}: {reply['error']}")
        if reply["op"] == "failed":
            raise LaunchError(f"the mounted folders cannot be shown: {reply['error']}")
        return reply, fds

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        linux.close_all(fds)
        operation = message["op"]
        if operation == "covers":
            shown = self.shown[message["mount"]]
            if message["anew"]:
                shown.covers.clear()
            covers = {tuple(path): kind for path, kind, _ in message["covers"]}
            makers = {tuple(path): maker for path, _, maker in message["covers"]}
            shown.forget(map(tuple, message["removed"]))
            if message["anew"] or not message["version"]:
                shown.note_links(covers)
            else:
                for parts in self.new_files.note(shown, covers, makers):
                    del covers[parts]
                self._file_holders.covered(shown, covers)
            for parts, kind in covers.items():
                if len(shown.covers) < MOST_COVERS or kind in HIDING:
                    shown.covers[parts] = kind
            shown.inodes.difference_update((device, inode) for device, inode in message["gone"])
            shown.inodes.update((device, inode) for device, inode in message["inodes"])
            self.version = max(self.version, message["version"])
        elif operation == "named":
            shown = self.shown[message["mount"]]
            if message["first"]:
                shown.named_paths.clear()
            shown.named_paths.update(map(tuple, message["paths"]))
        elif operation == "asks":
            shown = self.shown[message["mount"]]
            if message["first"]:
                shown.git.clear()
            shown.git += map(tuple, message["paths"])
            if message["last"]:
                self._settings.changed(message["mount"])
        elif operation == "changed":
            shown = self.shown[message["mount"]]
            self.new_files.note_changed(
                shown, [(tuple(path), who) for path, who in message["paths"]]
            )
        elif operation == "said":
            logger.warning("%s", message["text"])

    def _on_end(self, why: str) -> None:
        if self._ready.is_set():
            self._ready = anyio.Event()
        self.remark(
            f"The process that covers secrets below the mounted folders is replaced ({why}): what "
            "appears there meanwhile is covered once the next one runs"
        )


_NOT_RENEWED = (
    "secrets that appear below the mounted folders are not covered in a session that runs: reset "
    "or close the sessions"
)
_BY_DOCKER = (
    "mounts by docker, whose containers this user cannot enter: secrets that appear or are "
    "replaced while sessions run are not covered in these, unless the mount is strict"
)
_BY_RULES = (
    "mounts by Landlock: what appears beside something covered is readable in later sessions only, "
    "and nothing can be made or removed there; other secrets that appear while sessions run are "
    "not covered in these"
)
_GONE = (
    "the process that covers secrets below the mounted folders is being replaced, and no kernel is "
    "started before the next one runs; the log says why. Try again."
)


def _place(path: Path) -> tuple[int, int]:
    """Return device and inode of a mounted folder. Raises LaunchError if it is gone."""
    try:
        fd = open_place(path)
    except OSError as reason:
        raise LaunchError(f"--mount {path}: it cannot be shown any more: {reason.strerror}") from (
            reason
        )
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    return info.st_dev, info.st_ino


def _listed(path: str) -> str:
    """Return a path as /proc/PID/mountinfo escapes it, decoded as UTF-8 with replacements."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in text)


def as_folder(shown: ExposedMount, source: Path) -> Folder:
    """Return the mount at `source` as an argument of the sandbox's command.

    Masked paths that no longer exist are dropped, also from `shown`.
    """
    for path in list(shown.covers):
        if not os.path.lexists(shown.mount.host.joinpath(*path)):
            del shown.covers[path]
    covers = tuple(
        ("/".join(path), kind)
        for path, kind in sorted(shown.covers.items())
        if not shown.hides_path(path[:-1])  # may have been found before the folder that hides it
        if not shown.mount.host.joinpath(*path).is_symlink()
    )
    mount = shown.mount
    return Folder(source, mount.guest, mount.writable, covers, is_folder=not shown.single)
