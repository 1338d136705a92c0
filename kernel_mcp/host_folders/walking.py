"""Walk through a mounted folder and record the paths that must be covered.

A cover hides a path, makes it read-only (`FIXED`) or keeps a folder in its place (`KEPT`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kernel_mcp.host_folders import names
from kernel_mcp.host_folders.findings import (
    MOST_COVERS,
    TooManySecrets,
    WalkFindings,
    born,
    status_of,
)
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
from kernel_mcp.linux.safe_tree import open_beneath

_LONGEST = 4096
"""Characters of a path below a mount (PATH_MAX): folders with longer paths are covered."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY


_OWN_OBJECTS = frozenset(("objects", "refs"))


class Walk:
    """Searches a mount, whose folder is open as `root`, for paths to cover.

    `visit` is called with each folder and its descriptor, `obeys` with each file of a writable
    mount that agents obey. `above` is the path of the mount itself: rules for names may depend on
    the folders above. `own` are further covers that the server requests, `inner` the paths of other
    mounts in this one. With `strict`, settings files are covered whatever they contain, as the
    content may change.

    Walks may share `inodes`, so that one covers the hard links of secrets that another found. They
    may also share `twins`, the read-only files with several names. These names are searched for
    until the walk is `done`.
    """

    def __init__(
        self,
        root: int,
        *,
        above: Parts = (),
        own: Mapping[Parts, str] | None = None,
        inner: Sequence[Parts] = (),
        writable: bool = False,
        strict: bool = False,
        visit: Callable[[Parts, int], None] = lambda _parts, _fd: None,
        obeys: Callable[[Parts], None] = lambda _parts: None,
        inodes: dict[tuple[int, int], int] | None = None,
        twins: set[tuple[int, int]] | None = None,
    ) -> None:
        self._root = root
        self._writable = writable
        self._strict = strict
        self._above_all = above
        self._own = own or {}
        self._inner = frozenset(inner)
        self._visit = visit
        self._obeys = obeys
        self._link_names = set() if twins is None else twins
        self.done = False
        self.findings = WalkFindings(inodes={} if inodes is None else inodes)
        self.named_paths = NamedPaths()
        self._awaited: set[Parts] = set()
        """Missing targets of links that have a secret's name."""
        self._touched: dict[Parts, None] = {}
        self._replaced: dict[tuple[int, int], int] = {}
        """Birth times of files made read-only since the first walk, by device and inode."""

    def all(self) -> WalkFindings:
        """Walk the whole mount. Raises OSError if its top cannot be read, and TooManySecrets."""
        for _ in self.below(()):
            pass
        self.linked()
        self.done = True
        return self.findings

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
                self.findings.folders += 1
                self._visit(parts, fd)
                pending += self._entries(parts, fd, links)
            finally:
                os.close(fd)
            if self._touched:
                yield self._taken()
        if self._touched:
            yield self._taken()

    def _taken(self) -> list[Parts]:
        touched, self._touched = self._touched, {}
        return list(touched)

    def left(self, parts: Parts) -> bool:
        """Record that an entry has left its path; return True if that ends read-only covers."""
        covers = self.findings.covers
        if covers.get(parts) in (FIXED, KEPT):
            gone = [path for path in covers if path[: len(parts)] == parts]
        elif self._was_sign(parts):
            gone = [parts[:-1]]
        else:
            return False
        removed = [path for path in gone if covers.pop(path) in (FIXED, KEPT)]
        fixed = around({path: FIXED for path in covers if self._keeps(path)})
        for path in self._above(parts[:-1]):
            if path not in fixed and covers.get(path) == KEPT:
                del covers[path]
                removed.append(path)
            elif path in fixed and path not in covers:
                covers[path] = KEPT
        self.findings.removed += removed
        return True

    def _keeps(self, parts: Parts) -> bool:
        """Return True if the folders above a covered path must not be moved away."""
        kind = self.findings.covers[parts]
        return kind == FIXED or (kind in HIDING and executed((*self._above_all, *parts)))

    def _was_sign(self, parts: Parts) -> bool:
        """Return True if a folder was read-only only because of the entry at this path."""
        folder = parts[:-1]
        if parts[-1] not in names.SIGNS or self.findings.covers.get(folder) != FIXED:
            return False
        fixed = self._own.get(folder) == FIXED or executed((*self._above_all, *folder))
        return not (
            fixed or self.named_paths.executes(folder, stat.S_IFDIR) or any(self._made_by(folder))
        )

    def hides(self, parts: Parts) -> bool:
        """Return True if a path has a secret's name or lies in a hidden folder."""
        return secret_by_name(parts, self._above_all) or self._inside(parts)

    def _inside(self, parts: Parts) -> bool:
        covers = self.findings.covers
        return any(covers.get(parts[:end]) in HIDING for end in range(1, len(parts)))

    def one(self, parts: Parts, *, hidden: bool = False) -> Iterator[list[Parts]]:
        """Examine one entry that is new or has changed; yield the paths to cover now.

        A `hidden` entry had a secret's name before and is covered in any case.
        """
        if self._inside(parts):
            self._know_below(parts)
            return
        try:
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        except OSError as reason:
            if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                # another file system, or not readable
                self._cover(parts, FOLDER if self._is_folder(parts) else FILE, None)
                yield self._taken()
            return
        try:
            info = os.fstat(fd)
            known = self._known(fd, info)
            link = stat.S_ISLNK(info.st_mode)
            hides, fixed = self._verdict(parts, info.st_mode)
            if self._writable and stat.S_ISREG(info.st_mode):
                fixed = self._note_replaced(fd, info, fixed=fixed)
        finally:
            os.close(fd)
        if hides is None and (known or hidden) and not link:
            hides = FOLDER if stat.S_ISDIR(info.st_mode) else FILE  # a secret under another name
        if hides is None and self.findings.covers.get(parts) in HIDING:
            hides = self.findings.covers[parts]  # the target of a link with a secret's name
        signed = self._note_signs(parts[:-1], {parts[-1]}, by_siblings=True)
        if fixed:
            self._fix_entry(parts, hidden=hides is not None, link=link)
        more: list[Parts] = []
        if link:
            more = self._follow(parts, hides, fixed=fixed or self._fixed(parts))
        elif hides is not None:
            self._cover(parts, hides, info)
        elif stat.S_ISDIR(info.st_mode):
            more = [parts]
        if self._touched:
            yield self._taken()
        if signed and len(parts) == 1:  # from now on HEAD at the top is read-only
            yield from self.one((names.GIT_SIGN,))
        for start in more:
            yield from self.below(start)

    def _note_replaced(self, fd: int, info: os.stat_result, *, fixed: bool) -> bool:
        """Record a file that is read-only now, but of which code may have made a hard link before.

        Return True if the file, by this or another name, is read-only.
        """
        key = (info.st_dev, info.st_ino)
        if fixed:
            self._replaced.pop(key, None)
            if len(self._replaced) >= MOST_COVERS:
                del self._replaced[next(iter(self._replaced))]
            self._replaced[key] = born(fd)
            if info.st_nlink > 1:
                self._link_names.add(key)
                self.findings.unsearched_links = True
        return fixed or (info.st_nlink > 1 and self._replaced.get(key) == born(fd))

    def fix(self, asked: Iterable[Parts]) -> Iterator[list[Parts]]:
        """Make the paths `asked` read-only instead of those of the last call; yield the covers."""
        for parts in self.named_paths.replace_from_settings(asked):
            self.done, done = False, self.done  # follow links as in the first walk
            try:
                yield from self.one(parts)
                yield self.linked()
            finally:
                self.done = done

    def closed(self) -> set[Parts]:
        """Return the folders that contain a covered path or another mount, at any depth."""
        return around(self.findings.covers) | around(dict.fromkeys(self._inner, FOLDER))

    def shows(self, parts: Parts, fd: int, info: os.stat_result) -> str | None:
        """Return None if an open entry is hidden, `FIXED` if it is read-only, else ""."""
        if parts in self._inner or self._known(fd, info):
            return None
        known = self.findings.covers.get(parts, "")
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
        within = self._writable and self._fixed(parts)
        all_obeyed = obeyed((*self._above_all[-1:], *parts, ""))
        signs = set()
        with os.scandir(fd) as entries:
            for entry in entries:
                path = (*parts, entry.name)
                if path in self._inner:
                    continue
                if entry.name in names.SIGNS:
                    signs.add(entry.name)
                link, folder = entry.is_symlink(), entry.is_dir(follow_symlinks=False)
                plain = entry.is_file(follow_symlinks=False)
                mode = stat.S_IFDIR if folder else stat.S_IFREG if plain else stat.S_IFSOCK
                hides, fixed = self._verdict(path, stat.S_IFLNK if link else mode)
                if fixed:
                    self._fix_entry(path, hidden=hides is not None, link=link)
                if self._writable and not folder and (all_obeyed or obeyed((entry.name,))):
                    self._obeys(path)
                if plain and self._writable and (within or fixed):
                    self._note_twin(entry)
                if link:
                    leads = hides or fixed or within
                    if leads or judged_by_content((*self._above_all, *path)):
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
            parts in self._own or parts in self._awaited or self.named_paths.executes(parts, mode)
        )
        if usual and not (known or remarkable(parts[-1])):
            return None, False
        path = (*self._above_all, *parts)
        own = self._own.get(parts)
        hides = own if own in HIDING else secret(path, mode)
        if hides is None and parts in self._awaited and not stat.S_ISLNK(mode):
            hides = FOLDER if stat.S_ISDIR(mode) else FILE
        if hides is None and stat.S_ISREG(mode) and self._may_hold_credentials(path, parts):
            hides = FILE
        fixed = own == FIXED or executed(path) or self.named_paths.executes(parts, mode)
        return hides, fixed and self._writable

    def _may_hold_credentials(self, named: Parts, parts: Parts) -> bool:
        """Return True if a file may hold credentials, by the rules for the path `named`."""
        if not judged_by_content(named):
            return False
        always = self._strict and settings_by_name(named)
        return always or holds_credentials(self._root, parts, named)

    def _note_signs(self, folder: Parts, seen: set[str], *, by_siblings: bool = False) -> bool:
        """Make a folder read-only if it is an environment or a repository.

        At the top of the mount, only entries of a repository become read-only. `seen` are names in
        the folder. Return True if that changed anything.
        """
        signs = seen.intersection(names.SIGNS)
        if not (self._writable and signs):
            return False
        environment, repository = self._made_by(folder, None if by_siblings else signs)
        if repository and folder not in self.findings.git:
            self.findings.git[folder] = None
            self.findings.settings_changed = True
        if folder == () and repository:
            executes = (names.GIT_SIGN,) if self.done else names.GIT_EXECUTES
            return self.named_paths.add((name,) for name in executes)
        if not (environment or repository) or self._fixed(folder):
            return False
        self._fix(folder)
        return True

    def _made_by(self, folder: Parts, signs: Collection[str] | None = None) -> tuple[bool, bool]:
        """Return (is an environment, is a repository) by the `signs` in a folder.

        Without `signs` the names in the folder are looked up. The top of the mount is never an
        environment.
        """
        if signs is None:
            top = "/".join((f"/proc/self/fd/{self._root}", *folder))
            signs = {name for name in names.SIGNS if os.path.lexists(f"{top}/{name}")}
        environment = names.ENVIRONMENT in signs and folder != ()
        whole = _OWN_OBJECTS.issubset(signs) or "commondir" in signs
        return environment, names.GIT_SIGN in signs and whole

    def _fix_entry(self, parts: Parts, *, hidden: bool, link: bool) -> None:
        """Make one entry read-only; for a link or a hidden entry, only keep the folders above."""
        if self.findings.covers.get(parts) is None:
            self.findings.settings_changed = True
        if not (hidden or link):
            self._fix(parts)
            return
        self._keep(parts[:-1])
        if link:
            self._cover(parts, FIXED, None)

    def _fix(self, parts: Parts) -> None:
        """Make a path read-only and keep the folders above it in place."""
        self._keep(parts[:-1])
        self._cover(parts, FIXED, None)

    def _keep(self, parts: Parts) -> None:
        """Keep a folder and those above it from being moved away."""
        for path in self._above(parts):
            self._cover(path, self.findings.covers.get(path, KEPT), None)

    def _fixed(self, parts: Parts) -> bool:
        return any(self.findings.covers.get(path) == FIXED for path in self._above(parts))

    def _note_twin(self, entry: os.DirEntry[str]) -> None:
        info = status_of(entry)
        if info is not None and info.st_nlink > 1:
            self._link_names.add((info.st_dev, info.st_ino))
            self.findings.unsearched_links = True

    def _fix_too(self, parts: Parts) -> None:
        """Cover a further name of a read-only file; beyond half of the limit only count it."""
        if self._fixed(parts):
            return
        if len(self.findings.covers) < MOST_COVERS // 2:
            self._fix(parts)
        else:
            self.findings.writable_links += 1

    @staticmethod
    def _above(parts: Parts) -> list[Parts]:
        return [parts[:end] for end in range(1, len(parts) + 1)]

    def _cover(self, parts: Parts, kind: str, info: os.stat_result | None) -> None:
        if info is not None:
            self._know(parts, info)
            if kind == FOLDER:
                self._know_below(parts)
        full = len(self.findings.covers) >= MOST_COVERS
        if full and parts not in self.findings.covers:
            self._forget_the_gone()
            if len(self.findings.covers) >= MOST_COVERS:
                if not (self.done and (kind in (FIXED, KEPT) or executed(parts))):
                    raise TooManySecrets
                if kind != KEPT:
                    self.findings.over_limit.append(parts)
                return
        self.findings.covers[parts] = kind
        self._touched[parts] = None

    def _know(self, parts: Parts, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino)
        known = key in self.findings.inodes
        self.findings.inodes[key] = self._birth(parts, info)
        self.findings.new_inodes.append(key)
        if info.st_nlink > 1 and not (stat.S_ISDIR(info.st_mode) or known):
            self.findings.unsearched_links = True

    def _know_below(self, start: Parts) -> None:
        """Register the inodes in a covered folder, or of one file there, to find hard links."""
        pending = [start]
        while pending:
            parts = pending.pop()
            with contextlib.suppress(OSError):  # gone, a symlink, or not readable
                fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
                try:
                    info = os.fstat(fd)
                finally:
                    os.close(fd)
                if stat.S_ISLNK(info.st_mode):
                    continue
                self._know(parts, info)
                if stat.S_ISDIR(info.st_mode):
                    fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
                    try:
                        self._visit(parts, fd)
                        pending += [(*parts, name) for name in os.listdir(fd)]  # noqa: PTH208
                    finally:
                        os.close(fd)

    def _cover_link(self, parts: Parts, info: os.stat_result) -> None:
        with contextlib.suppress(OSError):
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
            try:
                if self._known(fd, info):
                    self._cover(parts, FILE, info)
            finally:
                os.close(fd)

    def _known(self, fd: int, info: os.stat_result) -> bool:
        """Return True if an open file is covered under another name.

        The birth time is compared as well, since inode numbers are reused.
        """
        key = (info.st_dev, info.st_ino)
        before = self.findings.inodes.get(key)
        if before is None or born(fd) in (before, 0):
            return before is not None
        del self.findings.inodes[key]
        self.findings.reused_inodes.append(key)
        return False

    def _birth(self, parts: Parts, info: os.stat_result) -> int:
        with contextlib.suppress(OSError):
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino):
                    return born(fd)
            finally:
                os.close(fd)
        return 0

    def _is_folder(self, parts: Parts) -> bool:
        path = Path(f"/proc/self/fd/{self._root}", *parts)
        return path.is_dir() and not path.is_symlink()

    def _forget_the_gone(self) -> None:
        top = f"/proc/self/fd/{self._root}"
        for parts in list(self.findings.covers):
            if not os.path.lexists("/".join((top, *parts))):
                del self.findings.covers[parts]

    def _follow(self, parts: Parts, hides: str | None, *, fixed: bool) -> list[Parts]:
        """Cover the target of a link if it is below the mount; return the folders to walk next."""
        links, goal = self._way(parts)
        if goal is None or goal == ():
            return []
        fixed = fixed and not self.done  # a later link may be made by code: the server decides
        if fixed:
            self.named_paths.add_link_targets(
                [goal, *(each for each in links if each not in (None, (), parts))]
            )
        info = self._look(goal)
        if hides is None and self._may_hold_credentials((*self._above_all, *parts), goal):
            hides = FILE
        if info is None and hides is not None:
            self._awaited.add(goal)
        elif (
            info is not None and hides is not None and self.findings.covers.get(goal) not in HIDING
        ):
            self._cover(goal, FOLDER if stat.S_ISDIR(info.st_mode) else FILE, info)
        if info is None or not fixed or self._fixed(goal):
            return []
        self._fix_too(goal)
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
        try:
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def linked(self, *, anyway: bool = False) -> list[Parts]:
        """Cover the hard links of files found since the last call; return the paths covered.

        This reads the inode of every file. It is skipped if no file found has several names, unless
        `anyway` is set.
        """
        if not (self.findings.unsearched_links or anyway):
            return []
        self.findings.unsearched_links = False
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
        return self._taken()

    def _other_names(self, parts: Parts, entries: Iterable[os.DirEntry[str]]) -> Iterator[Parts]:
        """Cover the hard links in one folder; yield the folders to continue with."""
        for entry in entries:
            path = (*parts, entry.name)
            if path in self._inner or self.findings.covers.get(path) in HIDING:
                continue
            if entry.is_dir(follow_symlinks=False):
                if not (self._own.get(path) or secret((*self._above_all, *path), stat.S_IFDIR)):
                    yield path
                continue
            info = status_of(entry)
            if info and (info.st_dev, info.st_ino) in self.findings.inodes:
                self._cover_link(path, info)
            elif info and (info.st_dev, info.st_ino) in self._link_names:
                self._fix_too(path)
