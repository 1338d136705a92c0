"""What below a mounted folder sessions do not get: known secrets, and doors to processes.

A list of names, as best effort: what has another name is shown. Hard links to what is found, and
what a symbolic link of such a name leads to, count as well.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_mcp.linux.safe_tree import open_beneath

FILE, FOLDER = "file", "folder"
"""What a cover looks like: empty, either way."""
FIXED, KEPT = "fixed", "kept"
"""Below a writable mount: read-only; and what cannot be moved away, as something fixed is in it."""
HIDING = frozenset((FILE, FOLDER))

_FOLDERS = frozenset(
    (".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".terraform.d")
)
_FOLDERS_BELOW = frozenset(
    (
        *((".config", name) for name in ("gcloud", "gh", "hub", "op", "rclone", "doctl")),
        (".local", "share", "keyrings"),
    )
)
"""Ends of paths."""
_FILES = frozenset(
    (
        *(".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"),
        *(".mylogin.cnf", ".dockercfg", ".boto", ".s3cfg", ".vault-token", ".htpasswd"),
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".credentials.json", ".claude.json"),
        *(".bash_history", ".zsh_history", ".python_history", ".psql_history", ".mysql_history"),
    )
)
_FILES_BELOW = frozenset(
    ((".streamlit", "secrets.toml"), (".cargo", "credentials.toml"), (".codex", "auth.json"))
)
_ENVIRONMENT = ".env"
"""What the names of files with variables begin with."""
_BY_CONTENT = frozenset(("config", "pip.conf", "uv.toml", ".condarc", ".gitmodules"))
"""Files that are covered when they hold credentials; `config` below a `.git` only."""
_CREDENTIALS = re.compile(
    rb"https?://[^/\s@]+@|://[^/\s:@]*:[^/\s@]+@"
    rb"|(?:extraheader|authorization|password|passwd|token|secret)\s*[=:]",
    re.IGNORECASE,
)
_EXECUTED_FOLDERS = frozenset(
    (
        *(".git", ".claude", ".vscode", ".idea", ".cursor", ".devcontainer", ".husky", ".codex"),
        *(".gemini", ".direnv"),
    )
)
_EXECUTED_FILES = frozenset(
    (
        *(".git", ".mcp.json", ".envrc", ".pre-commit-config.yaml", "kernel-mcp.toml"),
        *(".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv", ".gitconfig"),
    )
)
"""What programs of the host execute, or take commands from: of a `.git` the hooks, the settings and
more. As a file it names a folder elsewhere."""
_OF_AN_ENVIRONMENT = "pyvenv.cfg"
_MOST_READ = 1 << 20
MOST_COVERS = 1000
"""Below one mount; each takes the start of a kernel some 20 µs."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY


@dataclass
class Found:
    """What a walk has found below a mount.

    covers   kinds of covers by path below it
    inodes   device and inode of every covered file and folder
    linked   whether any covered file has further names
    folders  how many were looked at
    """

    covers: dict[tuple[str, ...], str] = field(default_factory=dict)
    inodes: set[tuple[int, int]] = field(default_factory=set)
    linked: bool = False
    folders: int = 0


class TooManySecrets(Exception):
    """More than `MOST_COVERS`."""


def secret(parts: Sequence[str], mode: int) -> str | None:
    """The cover for a path below a mount by its name and file mode; None when it is shown."""
    name = parts[-1]
    if stat.S_ISDIR(mode):
        below = any(tuple(parts[-len(end) :]) == end for end in _FOLDERS_BELOW)
        return FOLDER if name in _FOLDERS or below else None
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return FILE  # a socket, a FIFO or a device: someone listens behind it
    below = any(tuple(parts[-len(end) :]) == end for end in _FILES_BELOW)
    return FILE if name in _FILES or name.startswith(_ENVIRONMENT) or below else None


def readable(parts: Sequence[str]) -> str:
    """A path for people; what is no text of one line in it is escaped."""
    text = os.fsencode("/".join(parts)).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def secret_by_name(parts: Sequence[str]) -> bool:
    """Whether any component of a path is one of a secret, whatever kind of file it is."""
    return any(
        secret(parts[:end], kind) is not None
        for end in range(1, len(parts) + 1)
        for kind in ((stat.S_IFDIR,) if end < len(parts) else (stat.S_IFDIR, stat.S_IFREG))
    )


def executed(parts: Sequence[str], *, folder: bool) -> bool:
    """Whether programs of the host execute what is there, by its name."""
    return parts[-1] in (_EXECUTED_FOLDERS if folder else _EXECUTED_FILES)


def executed_by_name(parts: Sequence[str]) -> bool:
    """Whether a path is of such a file, or leads into such a folder."""
    return executed(parts, folder=False) or any(
        executed(parts[:end], folder=True) for end in range(1, len(parts) + 1)
    )


def judged_by_content(parts: Sequence[str]) -> bool:
    """Whether what a file holds decides."""
    return parts[-1] in _BY_CONTENT and (parts[-1] != "config" or ".git" in parts[:-1])


def holds_credentials(root: int, parts: Sequence[str]) -> bool:
    """Whether such a file holds any; True for one that cannot be read."""
    try:
        fd = open_beneath(root, parts, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return _CREDENTIALS.search(os.read(fd, _MOST_READ)) is not None
    except OSError:
        return True
    finally:
        os.close(fd)


class Walk:
    """Looks through a mount whose folder is open as `root`; `visit` gets each folder and its fd.

    `own` are covers that the server wants besides, `inner` places of other mounts, by path.
    """

    def __init__(
        self,
        root: int,
        *,
        own: Mapping[tuple[str, ...], str] | None = None,
        inner: Sequence[tuple[str, ...]] = (),
        writable: bool = False,
        visit: Callable[[tuple[str, ...], int], None] = lambda _parts, _fd: None,
    ) -> None:
        self._root = root
        self._writable = writable
        self._own = own or {}
        self._inner = frozenset(inner)
        self._visit = visit
        self.found = Found()
        self._touched: dict[tuple[str, ...], None] = {}

    def all(self) -> Found:
        """Walk from the top. Raises OSError when that cannot be read, TooManySecrets."""
        self.below(())
        return self.found

    def below(self, start: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Walk a part of it; all that has to be covered there. Raises as `all`."""
        self._touched = {}
        links: list[tuple[str, ...]] = []
        pending = [start]
        while pending:
            parts = pending.pop()
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except FileNotFoundError:
                continue
            except OSError as reason:
                if not parts:
                    raise
                # a link by now, another file system, or closed to this user
                if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                    self._cover(parts, FOLDER, None)
                continue
            try:
                self.found.folders += 1
                self._visit(parts, fd)
                pending += self._entries(parts, fd, links)
            finally:
                os.close(fd)
        for parts in links:
            self._led_to(parts)
        if self.found.linked:
            self._hard_links()
        return list(self._touched)

    def one(self, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Look at one entry that is new or was changed; paths that have to be covered now."""
        try:
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        except OSError as reason:
            return [] if reason.errno in (errno.ELOOP, errno.ENOTDIR) else [parts]
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        kind = self._kind(parts, info.st_mode)
        if kind not in HIDING and (info.st_dev, info.st_ino) in self.found.inodes:
            kind = FOLDER if stat.S_ISDIR(info.st_mode) else FILE  # by another name
        if kind not in HIDING and self.found.covers.get(parts) in HIDING:
            kind = self.found.covers[parts]  # what a link of a secret's name leads to
        if kind == FIXED:
            self._fix(parts)
            return [*self._above(parts), *(self.below(parts) if stat.S_ISDIR(info.st_mode) else ())]
        if kind is not None:
            self._cover(parts, kind, info)
            if stat.S_ISLNK(info.st_mode):
                del self.found.covers[parts]
                return self._led_to(parts)
            return [parts]
        return self.below(parts) if stat.S_ISDIR(info.st_mode) else []

    def _entries(
        self, parts: tuple[str, ...], fd: int, links: list[tuple[str, ...]]
    ) -> Iterator[tuple[str, ...]]:
        """Cover what has to be; the folders to walk, and into `links` what leads elsewhere."""
        with os.scandir(fd) as entries:
            for entry in entries:
                path = (*parts, entry.name)
                if path in self._inner:
                    continue
                folder = entry.is_dir(follow_symlinks=False)
                plain = folder or entry.is_file(follow_symlinks=False) or entry.is_symlink()
                mode = stat.S_IFDIR if folder else stat.S_IFREG if plain else stat.S_IFSOCK
                if entry.name == _OF_AN_ENVIRONMENT and self._writable and parts:
                    self._fix(parts)
                kind = self._kind(path, mode)
                if kind == FIXED and not entry.is_symlink():
                    self._fix(path)
                if kind not in HIDING:
                    if folder:
                        yield path
                    continue
                if entry.is_symlink():
                    links.append(path)
                else:
                    self._cover(path, kind, _status(entry))

    def _kind(self, parts: tuple[str, ...], mode: int) -> str | None:
        kind = self._own.get(parts) or secret(parts, mode)
        if kind is None and stat.S_ISREG(mode) and judged_by_content(parts):
            kind = FILE if holds_credentials(self._root, parts) else None
        if kind is None and self._writable and executed(parts, folder=stat.S_ISDIR(mode)):
            return FIXED
        return kind

    def _fix(self, parts: tuple[str, ...]) -> None:
        """Keep it from being changed, and what it is in from being moved away."""
        for path in self._above(parts):
            known = self.found.covers.get(path, KEPT)
            self._cover(path, FIXED if path == parts else known, None)

    @staticmethod
    def _above(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [parts[:end] for end in range(1, len(parts) + 1)]

    def _cover(self, parts: tuple[str, ...], kind: str, info: os.stat_result | None) -> None:
        self.found.covers[parts] = kind
        self._touched[parts] = None
        if info is not None:
            self.found.inodes.add((info.st_dev, info.st_ino))
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                self.found.linked = True
        if len(self.found.covers) > MOST_COVERS:
            self._forget_the_gone()
        if len(self.found.covers) > MOST_COVERS:
            raise TooManySecrets

    def _forget_the_gone(self) -> None:
        top = f"/proc/self/fd/{self._root}"
        for parts in list(self.found.covers):
            if not os.path.lexists("/".join((top, *parts))):
                del self.found.covers[parts]

    def _led_to(self, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Cover what a symbolic link with a secret's name leads to, if that is below the mount."""
        top = os.path.realpath(f"/proc/self/fd/{self._root}")
        goal = os.path.realpath("/".join((top, *parts)))
        inside = tuple(os.path.relpath(goal, top).split("/"))
        if inside[0] in ("..", ".") or self.found.covers.get(inside) in HIDING:
            return []
        try:
            info = os.lstat(goal)
        except OSError:
            return []
        self._cover(inside, FOLDER if stat.S_ISDIR(info.st_mode) else FILE, info)
        return [inside]

    def _hard_links(self) -> None:
        """Cover other names of covered files: a walk that asks for every file's inode."""
        pending: list[tuple[str, ...]] = [()]
        while pending:
            parts = pending.pop()
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        path = (*parts, entry.name)
                        if path in self._inner or self.found.covers.get(path) == FOLDER:
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(path)
                            continue
                        info = _status(entry)
                        if info and (info.st_dev, info.st_ino) in self.found.inodes:
                            self._cover(path, FILE, info)
            finally:
                os.close(fd)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
