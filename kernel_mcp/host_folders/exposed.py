"""Mounted folders from the host's side, as file tools and `info` use them."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path

from kernel_mcp.config.mounts import Mount
from kernel_mcp.host_folders import names, secrets, within
from kernel_mcp.host_folders.secrets import quoted
from kernel_mcp.linux.safe_tree import open_beneath, open_place
from kernel_mcp.records import dataclass
from kernel_specs import linux

MOST_REPORTS = 200
"""Maximum number of new entries reported per mount and hour: code can create any number."""
_HOUR_S = 3600.0
_SHOWN = 8
"""Covered paths that are listed by name."""
_A_LIST = (
    "what programs of the host execute there is known by a list of tools and by what Git's "
    "settings name, which is no boundary"
)
_STRICT = "strict (what appears beside a covered file is readable in later sessions only)"
_LONGEST_KEPT = 50
"""Characters of its name that a quarantined entry keeps; Linux permits 255 bytes in all."""


@dataclass
class ExposedMount:
    """One mount from the host's side, where file tools apply the same covers as sandboxes.

    identity            device and inode of the folder that was walked
    covers              kinds of covers by path below it
    inodes              device and inode of what is covered
    id_mapped           True if kernels of a root server have its owner's rights there
    rights              remark on who else may read it, "" for none
    owned_by_root       True if new files of sessions belong to root, who owns the folder
    quarantine_numbers  next numbers for names of quarantined entries
    links               symlinks that hosts execute, with inode and time of change; Linux
                        cannot cover a symlink
    new_entries         newest entries that hosts execute and that appeared since the server's
                        start, with their new name if they were quarantined, else ""
    changed_files       newest files that agents and build servers obey and that code may have
                        changed
    named_paths         paths that hosts execute although no rule for names matches them
    git                 folders that Git recognises as repositories
    report_times        times of the latest reports
    """

    mount: Mount
    identity: tuple[int, int] = (0, 0)
    covers: dict[tuple[str, ...], str] = field(default_factory=dict)
    inodes: set[tuple[int, int]] = field(default_factory=set)
    id_mapped: bool = True
    rights: str = ""
    owned_by_root: bool = False
    quarantine_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    links: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    new_entries: dict[str, str] = field(default_factory=dict)
    changed_files: dict[str, None] = field(default_factory=dict)
    named_paths: set[tuple[str, ...]] = field(default_factory=set)
    git: list[tuple[str, ...]] = field(default_factory=list)
    report_times: deque[float] = field(default_factory=partial(deque, maxlen=MOST_REPORTS))

    def __str__(self) -> str:
        """Return a readable summary: its path, its access, and the first covered paths."""
        host = "" if str(self.mount.host) == self.mount.guest else f" (of {self.mount.host})"
        how = "can be changed, outside --disk" if self.mount.writable else "read-only"
        how = f"sessions begin here, {how}" if self.mount.start else how
        if self.mount.strict:
            how += f", {_STRICT}"
        covered = self._listed("covered", secrets.HIDING) + self._listed("fixed", {secrets.FIXED})
        if self.new_entries:
            last = list(self.new_entries.items())[-_SHOWN:]
            words = [f"{quoted(a)} (now {quoted(now)})" if now else quoted(a) for a, now in last]
            covered += f"; appeared, and the host may execute it: {', '.join(words)}"
        if self.changed_files:
            last_names = ", ".join(map(quoted, list(self.changed_files)[-_SHOWN:]))
            covered += f"; changed, and agents or build servers obey it: {last_names}"
        if self.mount.writable and not self.single:
            covered += f"; {_A_LIST}"
        if self.owned_by_root:
            how += ", new files belong to root as the folder does"
        rights = f"; {self.rights}" if self.rights else ""
        return f"{self.mount.guest}{host}: {how}{rights}{covered}"

    def _listed(self, word: str, kinds: Collection[str]) -> str:
        paths = [path for path, kind in self.covers.items() if kind in kinds]
        words = [quoted(secrets.readable(path)) for path in sorted(paths, key=len)]
        more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        return f"; {word}: {', '.join(words[:_SHOWN])}{more}" if words else ""

    @property
    def read_only_summary(self) -> str:
        """Text that names the read-only paths of a writable mount; empty if there are none."""
        return self._listed("read-only", {secrets.FIXED}).removeprefix("; ")

    @property
    def executable(self) -> list[tuple[str, ...]]:
        """Covered paths that hosts execute by their names."""
        return [
            path
            for path, kind in self.covers.items()
            if kind != secrets.KEPT
            if self.executes(path)
        ]

    def executes(self, parts: tuple[str, ...]) -> bool:
        """Return True if hosts execute a path by its own name."""
        return secrets.executed((*self.mount.host.parts[1:], *parts))

    @property
    def closed(self) -> set[tuple[str, ...]]:
        """Folders that contain a covered path, at any depth."""
        return secrets.around(self.covers)

    @property
    def single(self) -> bool:
        """True if the mount is a single file."""
        return not self.mount.host.is_dir()

    def parts(self, path: str) -> tuple[str, ...] | None:
        """Return the parts of a normalised absolute path below the mount; None if it is outside."""
        if not within(path, (self.mount.guest,)):
            return None
        return tuple(Path(path).relative_to(self.mount.guest).parts)

    def covers_path(self, root: int, parts: tuple[str, ...]) -> bool:
        """Return True if a path, or a folder above it, is covered below the open folder `root`."""
        if self.single:
            return False
        if self.hides_path(parts):
            return True
        above = self.mount.host.parts[1:]
        if not parts or secrets.secret_by_name(parts, above):
            return bool(parts)
        path = (*above, *parts)
        return secrets.judged_by_content(path) and secrets.holds_credentials(root, parts, path)

    def hides_path(self, parts: tuple[str, ...]) -> bool:
        """Return True if a path, or a folder above it, is known to be hidden."""
        return bool(secrets.HIDING.intersection(self._kinds(parts)))

    def is_read_only(self, parts: tuple[str, ...]) -> bool:
        """Return True if a path below a writable mount stays read-only, as hosts execute it.

        Names that would turn their folder into a repository or an environment count as well.
        """
        ways = [parts[:end] for end in range(1, len(parts) + 1)]
        fixed = secrets.FIXED in self._kinds(parts) or not self.named_paths.isdisjoint(ways)
        signs = parts[-1:] != () and parts[-1] in names.SIGNS_OF_FILES
        return fixed or signs or any(map(self.executes, ways))

    def _kinds(self, parts: tuple[str, ...]) -> set[str]:
        return {self.covers.get(parts[:end], "") for end in range(1, len(parts) + 1)}

    def in_read_only_folder(self, parts: tuple[str, ...]) -> bool:
        """Return True if a path is in a read-only folder, where no session could change it."""
        return secrets.FIXED in self._kinds(parts[:-1])

    def note_links(self, covers: Mapping[tuple[str, ...], str]) -> None:
        """Record the symlinks among read-only covers."""
        for parts in (path for path, kind in covers.items() if kind == secrets.FIXED):
            info = self._status(parts)
            if info is not None and stat.S_ISLNK(info.st_mode):
                self.links[parts] = (info.st_ino, info.st_ctime_ns)

    def is_original(self, parts: tuple[str, ...]) -> bool:
        """Return True if a covered entry is still the original.

        Only a symlink can be replaced despite its cover. False for a path that is not covered, or
        only kept in its place.
        """
        if parts not in self.links:
            return self.covers.get(parts, secrets.KEPT) != secrets.KEPT
        info = self._status(parts)
        return info is None or (info.st_ino, info.st_ctime_ns) == self.links[parts]

    def forget(self, removed: Iterable[tuple[str, ...]]) -> None:
        """Forget entries that the host has removed or moved; later ones of that name are new."""
        for parts in removed:
            self.covers.pop(parts, None)
            self.links.pop(parts, None)
            if not self.new_entries.get(secrets.readable(parts), "moved"):
                del self.new_entries[secrets.readable(parts)]

    def record_entry(self, name: str, now: str) -> bool:
        """Record a new entry, renamed to `now` if quarantined; return True to report it."""
        stays = self.new_entries.pop(name, None) == now == ""
        self.new_entries[name] = now
        if len(self.new_entries) > MOST_REPORTS:
            del self.new_entries[next(iter(self.new_entries))]
        if stays or self.rate_limited:
            return False
        self.report_times.append(time.monotonic())
        return True

    @property
    def rate_limited(self) -> bool:
        """True while reports are suppressed: `MOST_REPORTS` were made within the last hour."""
        return (
            len(self.report_times) == MOST_REPORTS
            and self.report_times[0] > time.monotonic() - _HOUR_S
        )

    def is_another_name(self, parts: tuple[str, ...]) -> bool:
        """Return True if a file is read-only only because hosts execute a hard link of it."""
        if self.executes(parts) or parts in self.named_paths:
            return False
        info = self._status(parts)
        return info is not None and stat.S_ISREG(info.st_mode) and info.st_nlink > 1

    def holds(self, parts: tuple[str, ...]) -> bool:
        """Return True if there is an entry at a path."""
        return self._status(parts) is not None

    def changed_at(self, parts: tuple[str, ...]) -> float:
        """Return the Unix time of an entry's last change or move; now if it is gone."""
        info = self._status(parts)
        return time.time() if info is None else info.st_ctime

    def _status(self, parts: tuple[str, ...]) -> os.stat_result | None:
        try:
            return self.mount.host.joinpath(*parts).lstat()
        except OSError:
            return None

    def executed_entries(self, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the entries because of which hosts execute a path.

        These are the path itself, or entries that make it an environment or a repository. Empty for
        a folder that is neither any longer.
        """
        info = self._status(parts)
        folder = info is not None and stat.S_ISDIR(info.st_mode)
        if self.executes(parts) or parts in self.named_paths or not folder:
            return [parts]
        inner = [(*parts, name) for name in (names.ENVIRONMENT, names.GIT_SIGN)]
        return [path for path in inner if self._status(path) is not None]

    def quarantine(self, parts: tuple[str, ...]) -> str:
        """Rename an entry to a name that no program executes; return the new path in readable form.

        Raises OSError.
        """
        with self.open_folder() as root:
            folder = open_beneath(root, parts[:-1], os.O_PATH | os.O_DIRECTORY)
        try:
            for number in self.quarantine_numbers:
                name = f"{parts[-1][:_LONGEST_KEPT]}.set-aside-{number}"
                try:
                    os.lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    os.rename(parts[-1], name, src_dir_fd=folder, dst_dir_fd=folder)
                    break
        finally:
            os.close(folder)
        return secrets.readable((*parts[:-1], name))

    def covers_file(self, info: os.stat_result) -> bool:
        """Return True if a file is covered under any name, or is a device, pipe or socket."""
        known = (info.st_dev, info.st_ino) in self.inodes
        usual = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        return not self.single and (known or not (usual or stat.S_ISLNK(info.st_mode)))

    @contextlib.contextmanager
    def open_folder(self) -> Iterator[int]:
        """Yield a descriptor of the folder, or of a single file's parent folder. Raises OSError."""
        host = self.mount.host.parent if self.single else self.mount.host
        root = open_place(host)
        try:
            yield root
        finally:
            os.close(root)


@contextlib.contextmanager
def acting_as_owner(path: Path) -> Iterator[None]:
    """Access files as the owner of `path` in this thread of a root server (setfsuid(2)).

    No component of `path` may be a symlink. Other servers are not affected.

    Keep the block to a few calls: that user may have no access to Python's own library.
    Raises OSError.
    """
    if os.geteuid() != 0:
        yield
        return
    place = open_place(path)
    try:
        info = os.fstat(place)
    finally:
        os.close(place)
    uid, gid = info.st_uid, info.st_gid
    linux.setfsgid(gid)
    linux.setfsuid(uid)
    try:
        yield
    finally:
        linux.setfsuid(0)
        linux.setfsgid(os.getegid())
