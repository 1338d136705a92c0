"""Walk through a mounted folder and record the paths that must be covered.

A cover hides a path, makes it read-only (`FIXED`) or keeps a folder in its place (`KEPT`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path

from kernel_mcp.host_folders import names
from kernel_mcp.host_folders.covers import Covers
from kernel_mcp.host_folders.inodes import Inodes, SharedInodes, inode_of, status_of
from kernel_mcp.host_folders.links import below, links_on
from kernel_mcp.host_folders.named_paths import NamedPaths
from kernel_mcp.host_folders.secrets import (
    FILE,
    FIXED,
    FOLDER,
    HIDING,
    KEPT,
    Parts,
    around,
    executed,
    holds_credentials,
    judged_by_content,
    obeyed,
    remarkable,
    secret,
    secret_by_name,
    settings_by_name,
)
from kernel_mcp.host_folders.signs import is_environment, is_repository, signs_in
from kernel_mcp.linux.safe_tree import open_beneath, opened_beneath
from kernel_mcp.records import dataclass

_LONGEST = 4096
"""Characters of a path below a mount (PATH_MAX): folders with longer paths are covered."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY


@dataclass(frozen=True)
class WalkRules:
    """Rules for the search of one mount.

    above     the path of the mount itself: rules for names may depend on the folders above
    own       covers that the server requests
    inner     the paths of other mounts in this one
    writable  True if sessions may write there: what the host executes is then read-only
    strict    settings files are covered whatever they contain, as the content may change
    """

    above: Parts = ()
    own: Mapping[Parts, str] = field(default_factory=dict)
    inner: frozenset[Parts] = frozenset()
    writable: bool = False
    strict: bool = False


class Walk:
    """Searches a mount, whose folder is open as `root`, for paths to cover.

    `visit` is called with each folder and its descriptor, `obeys` with each file of a writable
    mount that agents obey. Walks may share inodes, so that one covers the hard links of secrets
    that another found.
    """

    def __init__(
        self,
        root: int,
        rules: WalkRules = WalkRules(),  # noqa: B008  # immutable
        *,
        visit: Callable[[Parts, int], None] = lambda _parts, _fd: None,
        obeys: Callable[[Parts], None] = lambda _parts: None,
        shared: SharedInodes | None = None,
    ) -> None:
        self._root = root
        self._rules = rules
        self._visit = visit
        self._obeys = obeys
        self.covers = Covers(root, rules.above)
        self.inodes = Inodes(root, shared or SharedInodes(), visit)
        self.named_paths = NamedPaths()
        self.git: dict[Parts, None] = {}
        """Folders that Git recognises as repositories."""
        self.settings_changed = False
        """True if settings have appeared since the server was last asked to read them."""
        self.folders = 0
        """Number of folders walked."""
        self._awaited: set[Parts] = set()
        """Missing targets of links that have a secret's name."""

    def all(self) -> Covers:
        """Walk the whole mount. Raises OSError if its top cannot be read, and TooManySecrets."""
        for _ in self.below(()):
            pass
        self.linked()
        self.covers.done = True
        return self.covers

    def below(self, start: Parts) -> Iterator[list[Parts]]:
        """Walk the mount below `start`; yield the paths to cover when found. Raises as `all`."""
        links: dict[Parts, tuple[str | None, bool]] = {}
        pending = [start]
        while pending or links:
            if not pending:
                path, (hides, fixed) = links.popitem()
                pending += self._follow(path, hides, fixed=fixed)
                continue
            parts = pending.pop()
            if sum(map(len, parts)) + len(parts) > _LONGEST:
                self._cover(parts, FOLDER, None)
                continue
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except FileNotFoundError:
                continue
            except OSError as reason:
                if not parts:
                    raise
                # another file system or not readable: covered; a symlink by now: skipped
                if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                    self._cover(parts, FOLDER, None)
                continue
            try:
                self.folders += 1
                self._visit(parts, fd)
                pending += self._entries(parts, fd, links)
            finally:
                os.close(fd)
            if fresh := self.covers.take_fresh():
                yield fresh
        if fresh := self.covers.take_fresh():
            yield fresh

    def left(self, parts: Parts) -> bool:
        """Record that an entry has left its path; return True if that ends read-only covers."""
        kinds = self.covers.kinds
        if kinds.get(parts) in (FIXED, KEPT):
            gone = [path for path in kinds if path[: len(parts)] == parts]
        elif self._was_sign(parts):
            gone = [parts[:-1]]
        else:
            return False
        self.covers.end(gone, parts[:-1])
        return True

    def _was_sign(self, parts: Parts) -> bool:
        """Return True if a folder was read-only only because of the entry at this path."""
        folder = parts[:-1]
        if parts[-1] not in names.SIGNS or self.covers.kinds.get(folder) != FIXED:
            return False
        fixed = self._rules.own.get(folder) == FIXED or executed((*self._rules.above, *folder))
        if fixed or self.named_paths.executes(folder, stat.S_IFDIR):
            return False
        others = signs_in(self._root, folder)
        return not (is_environment(folder, others) or is_repository(others))

    def hides(self, parts: Parts) -> bool:
        """Return True if a path has a secret's name or lies in a hidden folder."""
        return secret_by_name(parts, self._rules.above) or self.covers.hides_above(parts)

    def one(self, parts: Parts, *, hidden: bool = False) -> Iterator[list[Parts]]:
        """Examine one entry that is new or has changed; yield the paths to cover now.

        A `hidden` entry had a secret's name before and is covered in any case.
        """
        if self.covers.hides_above(parts):
            self.inodes.hide_below(parts)
            return
        try:
            with opened_beneath(self._root, parts) as fd:
                info = os.fstat(fd)
                known = self.inodes.is_hidden(fd, info)
                link = stat.S_ISLNK(info.st_mode)
                hides, fixed = self._verdict(parts, info.st_mode)
                if self._rules.writable and stat.S_ISREG(info.st_mode):
                    fixed = self.inodes.note_replaced(fd, info, fixed=fixed)
        except FileNotFoundError:
            return
        except OSError as reason:
            if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                # another file system, or not readable
                self._cover(parts, FOLDER if self._is_folder(parts) else FILE, None)
                yield self.covers.take_fresh()
            return
        if hides is None and (known or hidden) and not link:
            hides = FOLDER if stat.S_ISDIR(info.st_mode) else FILE  # a secret under another name
        if hides is None and self.covers.kinds.get(parts) in HIDING:
            hides = self.covers.kinds[parts]  # the target of a link with a secret's name
        signed = parts[-1] in names.SIGNS and self._note_signs(
            parts[:-1], signs_in(self._root, parts[:-1])
        )
        if fixed:
            self._fix_entry(parts, hidden=hides is not None, link=link)
        more: list[Parts] = []
        if link:
            more = self._follow(parts, hides, fixed=fixed or self.covers.fixes(parts))
        elif hides is not None:
            self._cover(parts, hides, info)
        elif stat.S_ISDIR(info.st_mode):
            more = [parts]
        if fresh := self.covers.take_fresh():
            yield fresh
        if signed and len(parts) == 1:  # from now on HEAD at the top is read-only
            yield from self.one((names.GIT_SIGN,))
        for start in more:
            yield from self.below(start)

    def fix(self, asked: Iterable[Parts]) -> Iterator[list[Parts]]:
        """Make the paths `asked` read-only instead of those of the last call; yield the covers."""
        for parts in self.named_paths.replace_from_settings(asked):
            self.covers.done, done = False, self.covers.done  # follow links as in the first walk
            try:
                yield from self.one(parts)
                yield self.linked()
            finally:
                self.covers.done = done

    def closed(self) -> set[Parts]:
        """Return the folders that contain a covered path or another mount, at any depth."""
        return around(self.covers.kinds) | around(dict.fromkeys(self._rules.inner, FOLDER))

    def shows(self, parts: Parts, fd: int, info: os.stat_result) -> str | None:
        """Return None if an open entry is hidden, `FIXED` if it is read-only, else ""."""
        if parts in self._rules.inner or self.inodes.is_hidden(fd, info):
            return None
        known = self.covers.kinds.get(parts, "")
        hides, fixed = self._verdict(parts, info.st_mode)
        if known in HIDING or hides is not None:
            return None
        return FIXED if fixed or known == FIXED else ""

    def _entries(
        self, parts: Parts, fd: int, links: dict[Parts, tuple[str | None, bool]]
    ) -> Iterator[Parts]:
        """Cover entries of a folder; yield the folders to walk and put its symlinks into `links`.

        Only links that must be followed are put there, with the cover of their target.
        """
        writable = self._rules.writable
        within = writable and self.covers.fixes(parts)
        all_obeyed = obeyed((*self._rules.above[-1:], *parts, ""))
        signs = set()
        with os.scandir(fd) as entries:
            for entry in entries:
                path = (*parts, entry.name)
                if path in self._rules.inner:
                    continue
                if entry.name in names.SIGNS:
                    signs.add(entry.name)
                link, folder = entry.is_symlink(), entry.is_dir(follow_symlinks=False)
                plain = entry.is_file(follow_symlinks=False)
                mode = stat.S_IFDIR if folder else stat.S_IFREG if plain else stat.S_IFSOCK
                hides, fixed = self._verdict(path, stat.S_IFLNK if link else mode)
                if fixed:
                    self._fix_entry(path, hidden=hides is not None, link=link)
                if writable and not folder and (all_obeyed or obeyed((entry.name,))):
                    self._obeys(path)
                if plain and writable and (within or fixed):
                    self.inodes.note_fixed(status_of(entry))
                if link:
                    leads = hides or fixed or within
                    if leads or judged_by_content((*self._rules.above, *path)):
                        links[path] = (hides, fixed or within)
                elif hides is not None:
                    self._cover(path, hides, status_of(entry))
                elif folder:
                    yield path
        if self._note_signs(parts, signs) and not within:
            yield parts  # again: its link targets and hard links become read-only, too

    def _verdict(self, parts: Parts, mode: int) -> tuple[str | None, bool]:
        """Return the cover that hides an entry (None for none), and True if it is read-only."""
        usual = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        known = (
            parts in self._rules.own
            or parts in self._awaited
            or self.named_paths.executes(parts, mode)
        )
        if usual and not (known or remarkable(parts[-1])):
            return None, False
        path = (*self._rules.above, *parts)
        own = self._rules.own.get(parts)
        hides = own if own in HIDING else secret(path, mode)
        if hides is None and parts in self._awaited and not stat.S_ISLNK(mode):
            hides = FOLDER if stat.S_ISDIR(mode) else FILE
        if hides is None and stat.S_ISREG(mode) and self._may_hold_credentials(path, parts):
            hides = FILE
        fixed = own == FIXED or executed(path) or self.named_paths.executes(parts, mode)
        return hides, fixed and self._rules.writable

    def _may_hold_credentials(self, named: Parts, parts: Parts) -> bool:
        """Return True if a file may hold credentials, by the rules for the path `named`."""
        if not judged_by_content(named):
            return False
        always = self._rules.strict and settings_by_name(named)
        return always or holds_credentials(self._root, parts, named)

    def _note_signs(self, folder: Parts, signs: Collection[str]) -> bool:
        """Make a folder read-only if it is an environment or a repository, by these `signs` in it.

        At the top of the mount, only entries of a repository become read-only. Return True if that
        changed anything.
        """
        if not (self._rules.writable and signs):
            return False
        repository = is_repository(signs)
        if repository and folder not in self.git:
            self.git[folder] = None
            self.settings_changed = True
        if folder == () and repository:
            executes = (names.GIT_SIGN,) if self.covers.done else names.GIT_EXECUTES
            return self.named_paths.add((name,) for name in executes)
        if not (repository or is_environment(folder, signs)) or self.covers.fixes(folder):
            return False
        self.covers.fix(folder)
        return True

    def _fix_entry(self, parts: Parts, *, hidden: bool, link: bool) -> None:
        """Make one entry read-only; for a link or a hidden entry, only keep the folders above."""
        if self.covers.kinds.get(parts) is None:
            self.settings_changed = True
        if hidden and not link:
            self.covers.keep(parts[:-1])
        else:
            self.covers.fix(parts)

    def _cover(self, parts: Parts, kind: str, info: os.stat_result | None) -> None:
        """Hide a path, and record its inode if the status is known."""
        if info is not None:
            self.inodes.hide(parts, info)
            if kind == FOLDER:
                self.inodes.hide_below(parts)
        self.covers.add(parts, kind)

    def _cover_link(self, parts: Parts, info: os.stat_result) -> None:
        with contextlib.suppress(OSError), opened_beneath(self._root, parts) as fd:
            if self.inodes.is_hidden(fd, info):
                self._cover(parts, FILE, info)

    def _is_folder(self, parts: Parts) -> bool:
        path = Path(f"/proc/self/fd/{self._root}", *parts)
        return path.is_dir() and not path.is_symlink()

    def _follow(self, parts: Parts, hides: str | None, *, fixed: bool) -> list[Parts]:
        """Cover the target of a link if it is below the mount; return the folders to walk next."""
        links, goal = self._way(parts)
        if goal is None or goal == ():
            return []
        # after the first walk a link may be made by code: the server decides
        fixed = fixed and not self.covers.done
        if fixed:
            self.named_paths.add_link_targets(
                [goal, *(each for each in links if each not in (None, (), parts))]
            )
        info = self._look(goal)
        if hides is None and self._may_hold_credentials((*self._rules.above, *parts), goal):
            hides = FILE
        if info is None and hides is not None:
            self._awaited.add(goal)
        elif info is not None and hides is not None and self.covers.kinds.get(goal) not in HIDING:
            self._cover(goal, FOLDER if stat.S_ISDIR(info.st_mode) else FILE, info)
        if info is None or not fixed or self.covers.fixes(goal):
            return []
        self.covers.fix_link(goal)
        return [goal] if stat.S_ISDIR(info.st_mode) else []

    def goal(self, parts: Parts) -> Parts | None:
        """Return the target of a path with links resolved; None if it is not below the mount."""
        return self._way(parts)[1]

    def _way(self, parts: Parts) -> tuple[list[Parts | None], Parts | None]:
        """Return the links on a path, and its target; None stands for each outside the mount."""
        top = os.path.realpath(f"/proc/self/fd/{self._root}")
        links, end = links_on("/".join((top, *parts)))
        return [below(link, top) for link in links], below(end, top)

    def _look(self, parts: Parts) -> os.stat_result | None:
        with contextlib.suppress(OSError), opened_beneath(self._root, parts) as fd:
            return os.fstat(fd)
        return None

    def linked(self, *, anyway: bool = False) -> list[Parts]:
        """Cover the hard links of files found since the last call; return the paths covered.

        This reads the inode of every file. It is skipped if no file found has several names, unless
        `anyway` is set.
        """
        if not (self.inodes.unsearched_links or anyway):
            return []
        self.inodes.unsearched_links = False
        pending: list[Parts] = [()]
        while pending:
            parts = pending.pop()
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    pending += self._other_names(parts, entries)
            finally:
                os.close(fd)
        return self.covers.take_fresh()

    def _other_names(self, parts: Parts, entries: Iterable[os.DirEntry[str]]) -> Iterator[Parts]:
        """Cover the hard links in one folder; yield the folders to continue with."""
        for entry in entries:
            path = (*parts, entry.name)
            if path in self._rules.inner or self.covers.kinds.get(path) in HIDING:
                continue
            if entry.is_dir(follow_symlinks=False):
                own = self._rules.own.get(path)
                if not (own or secret((*self._rules.above, *path), stat.S_IFDIR)):
                    yield path
                continue
            info = status_of(entry)
            if info and inode_of(info) in self.inodes.hidden:
                self._cover_link(path, info)
            elif info and inode_of(info) in self.inodes.fixed:
                self.covers.fix_link(path)
