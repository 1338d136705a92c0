"""Paths that settings of version control, agents and similar tools name on the host.

Settings of Git are read by Git itself, in a sandbox; this module locates them and picks the values
that name a file or a program. In settings of other tools all words that may be paths are tried.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from kernel_mcp.host_folders import names
from kernel_mcp.host_folders.links import links_on
from kernel_mcp.host_folders.secrets import executed
from kernel_mcp.records import dataclass

MOST_READ = 1 << 20
"""Largest settings file that is read, in bytes."""
_MOST_FILES = 200
"""Maximum number of entries that are read in one folder of an agent or of hooks."""
_MOST_WORD = 1024
_ONLY_SHOWN = frozenset((".idea", ".fleet", "launch.json", "workspace.json"))
"""Editor settings that only name files which people open or start themselves."""
_OF_A_PATH = frozenset("/._-+@%~")
_WHOLE = frozenset(("core.hookspath", "core.attributesfile", "init.templatedir"))
"""Settings of Git whose whole value is one path, of a file or a folder."""
_DATA_SECTIONS = frozenset(
    (
        *("advice", "author", "blame", "branch", "color", "column", "committer", "gui", "log"),
        *("maintenance", "pack", "pull", "push", "rebase", "safe", "status", "url", "user"),
    )
)
_DATA_NAMES = frozenset(
    (
        *("core.worktree", "core.excludesfile", "commit.template", "extensions.partialclone"),
        *("remote.fetch", "remote.push", "remote.url", "remote.pushurl", "remote.mirror"),
        *("submodule.url", "submodule.branch", "submodule.path", "submodule.active"),
        *("init.defaultbranch", "lfs.url", "mailmap.file", "mailmap.blob"),
    )
)
"""Settings of Git, by section and last part, whose values it does not execute."""
_COMMAND = "ext::"
"""Prefix of an address that is a command: git-remote-ext(1)."""
Entries = Sequence[tuple[str, str]]
"""Names and values in a file of Git's settings."""


@dataclass(frozen=True)
class Repository:
    """Folders of a repository.

    top     its working tree
    folder  its own Git folder
    common  the Git folder that it shares with its worktrees
    """

    top: str
    folder: str
    common: str

    @property
    def settings(self) -> list[str]:
        """The files that Git reads its settings from."""
        found = (f"{each}/{name}" for each in (self.common, self.folder) for name in _SETTINGS)
        return list(dict.fromkeys(found))

    @property
    def folders(self) -> list[str]:
        """The folders from which Git reads hooks and objects."""
        objects = f"{self.common}/objects"
        others = os.fsdecode(small(f"{objects}/info/alternates")).splitlines()
        paths = [_joined(objects, line) for line in others if line and not line.startswith("#")]
        return [self.folder, self.common, *paths]


_SETTINGS = ("config", "config.worktree")


def small(path: str) -> bytes:
    """Return the content of a regular file; empty for others and for more than `MOST_READ`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MOST_READ:
            return b""
        return os.read(fd, MOST_READ)
    except OSError:
        return b""
    finally:
        os.close(fd)


def repository_at(entry: str) -> Repository:
    """Return the repository of a `.git`, which may be a folder, a link or a file with a path."""
    top = os.path.dirname(entry)  # noqa: PTH120  # names may be of any bytes
    pointer = _line(entry).removeprefix("gitdir:").strip()
    return _with_common(top, _joined(top, pointer) if pointer else entry)


def repository_in(folder: str) -> Repository:
    """Return the repository whose Git folder this is, whatever its name."""
    worktree = _line(f"{folder}/gitdir")
    top = os.path.dirname(_joined(folder, worktree) if worktree else folder)  # noqa: PTH120
    bare = not worktree and os.path.basename(folder) != ".git"  # noqa: PTH119
    return _with_common(folder if bare else top, folder)


def repository_around(folder: str) -> Repository | None:
    """Return the repository that contains a folder, by a `.git` above it; None for none."""
    top = folder
    while top != "/":
        top = os.path.dirname(top)  # noqa: PTH120
        if os.path.lexists(f"{top.rstrip('/')}/.git"):
            return repository_at(f"{top.rstrip('/')}/.git")
    return None


def _with_common(top: str, folder: str) -> Repository:
    folder = links_on(folder)[1] or folder
    shared = _line(f"{folder}/commondir")
    return Repository(top, folder, _joined(folder, shared) if shared else folder)


def _line(path: str) -> str:
    return os.fsdecode(small(path)[:4096].partition(b"\n")[0]).strip()


def _joined(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))  # noqa: PTH118


def of_the_user(owner: int) -> list[str]:
    """Return Git's files of settings for this machine, this server's user and the user `owner`."""
    environ = os.environ
    found = ["/etc/gitconfig", "/usr/local/etc/gitconfig"]
    found += [
        environ[name] for name in ("GIT_CONFIG_SYSTEM", "GIT_CONFIG_GLOBAL") if name in environ
    ]
    if "XDG_CONFIG_HOME" in environ:
        found.append(f"{environ['XDG_CONFIG_HOME']}/git/config")
    for home in homes(owner):
        found += [f"{home}/.gitconfig", f"{home}/.config/git/config"]
    return [path for path in dict.fromkeys(found) if path.startswith("/")]


def homes(owner: int) -> list[str]:
    """Return the home folders of this server's user and of the user `owner`."""
    found = [os.environ.get("HOME", "")]
    for user in (os.geteuid(), owner):
        with suppress(KeyError):
            found.append(pwd.getpwuid(user).pw_dir)
    return [home for home in dict.fromkeys(found) if home.startswith("/")]


def included(file: str, entries: Entries, home: Sequence[str]) -> Iterator[str]:
    """Yield the files that a settings file includes, under any condition."""
    folder = os.path.dirname(file)  # noqa: PTH120
    for name, value in entries:
        section, last = name.partition(".")[0], name.rpartition(".")[2]
        if section in ("include", "includeif") and last == "path":
            yield from _places(value, [folder], home)


def worktrees(file: str, entries: Entries) -> Iterator[str]:
    """Yield the working trees that a repository's settings name."""
    folder = os.path.dirname(file)  # noqa: PTH120
    for name, value in entries:
        if name == "core.worktree":
            yield _joined(folder, value)


def named_by(
    entries: Entries, bases: Sequence[str], home: Sequence[str], mixed: Sequence[str]
) -> Iterator[str]:
    """Yield the absolute paths that settings of Git name for programs, hooks and attributes.

    Relative ones are resolved below each of `bases`. For folders in `mixed`, which do not only
    hold hooks, the hooks are yielded one by one.
    """
    for name, value in entries:
        section, last = name.partition(".")[0], name.rpartition(".")[2]
        if name in _WHOLE:
            for place in _places(value, bases, home):
                yield from _hooks(place) if place in mixed else (place,)
            continue
        data = section in _DATA_SECTIONS or f"{section}.{last}" in _DATA_NAMES
        runs = not data and (section != "alias" or value.startswith("!"))
        for text in (value, name):  # an `ext::` command may be in the value or in the name
            if _COMMAND in text or (runs and text is value):
                yield from _programs(text, bases, home)


def _hooks(folder: str) -> Iterator[str]:
    """Return an iterator over the paths in a folder that Git may run as hooks."""
    return (f"{folder}/{name}" for name in names.HOOKS)


def _programs(value: str, bases: Sequence[str], home: Sequence[str]) -> Iterator[str]:
    found = dict.fromkeys([value, *words(value)])
    with suppress(ValueError):
        found.update(dict.fromkeys(shlex.split(value[:_MOST_WORD])))
    for number, word in enumerate(found):
        whole = number == 0 and " " in word
        for place in _places(word, bases, home):
            known = os.path.isfile(place)  # noqa: PTH113
            new = "/" in word and not whole and not os.path.isdir(place)  # noqa: PTH112
            script = number > 1 and word.lower().endswith(names.SCRIPTS)
            if known or new or script:
                yield place


def _places(word: str, bases: Sequence[str], home: Sequence[str]) -> Iterator[str]:
    if not word or "\0" in word or len(word) > _MOST_WORD:
        return
    if word.startswith("~"):
        user, slash, rest = word[1:].partition("/")
        folders = list(home)
        if user:
            with suppress(KeyError):
                folders = [pwd.getpwnam(user).pw_dir]
        yield from (_joined(folder, rest) for folder in folders if slash)
        return
    if word.startswith("/"):
        yield os.path.normpath(word)
        word = word.lstrip("/")  # the rest of $(command)/path
        within = (_joined(base, word) for base in bases)
        yield from (place for place in within if word and os.path.isfile(place))  # noqa: PTH113
        return
    yield from (_joined(base, word) for base in bases)


def words(text: str) -> Iterator[str]:
    """Yield the words of a text that may be paths, in linear time."""
    start = 0
    for end, char in enumerate(f"{text} "):
        if char.isalnum() or char in _OF_A_PATH:
            continue
        if start < end <= start + _MOST_WORD:
            yield text[start:end]
        start = end + 1


def referred(entry: str, bases: Sequence[str]) -> Iterator[str]:
    """Yield the programs named in a file or folder that hosts execute, existing or not.

    Relative paths are resolved below each of `bases`.
    """
    for path in islice(_texts(entry), _MOST_FILES):
        text = small(path).decode("utf-8", "replace")
        for word in dict.fromkeys(words(text)):
            yield from (place for place in _places(word, bases, ()) if _runs(place, word))
            if "." in word and "/" not in word:  # the name of a Python module
                modules = _places(f"{word.strip('.').replace('.', '/')}.py", bases, ())
                yield from filter(os.path.isfile, modules)


def _texts(entry: str) -> Iterator[str]:
    name = os.path.basename(entry).lower()  # noqa: PTH119
    if not os.path.isdir(entry):  # noqa: PTH112
        yield entry
    elif name == ".git":
        yield from _files(f"{entry}/hooks", 1)
    elif name in (".hg", ".sl"):
        yield from (f"{entry}/{each}" for each in ("hgrc", "hgrc-not-shared", "config"))
    elif name == ".jj":
        yield from (f"{entry}/{each}" for each in ("repo/config.toml", "workspace-config.toml"))
    elif name not in _ONLY_SHOWN:
        yield from filter(_starts_programs, _files(entry, 2))


def _starts_programs(path: str) -> bool:
    name = os.path.basename(path).lower()  # noqa: PTH119
    end = os.path.splitext(name)[1]  # noqa: PTH122
    return name not in _ONLY_SHOWN and end in ("", *names.OF_SETTINGS, *names.SCRIPTS)


def links_of(entry: str) -> Iterator[str]:
    """Yield an entry that hosts execute if it is a symlink, and the symlinks in it."""
    if os.path.islink(entry):  # noqa: PTH114
        yield entry
    for folder in (entry, f"{entry}/hooks"):
        with suppress(OSError), os.scandir(folder) as entries:
            yield from (each.path for each in islice(entries, _MOST_FILES) if each.is_symlink())


def _files(folder: str, depth: int) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MOST_FILES):
            if entry.is_file() and not entry.name.endswith(".sample"):
                yield entry.path
            elif depth > 1 and entry.is_dir():
                yield from _files(entry.path, depth - 1)


def _runs(path: str, word: str) -> bool:
    script = path.lower().endswith(names.SCRIPTS)
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError:
        return script and "/" in word
    return stat.S_ISREG(info.st_mode) and (script or info.st_mode & 0o111 != 0)


def is_script(path: str) -> bool:
    """Return True if a path is a folder, such as one of hooks, or a file that begins with `#!`."""
    return os.path.isdir(path) or small(path).startswith(b"#!")  # noqa: PTH112


def executed_in(folder: str) -> list[str]:
    """Return the entries of a folder that hosts execute by their names."""
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        found += (entry.path for entry in entries if executed((entry.name,)))
    return found


def stamps(paths: Iterable[str]) -> tuple[object, ...]:
    """Return a value that changes when one of these files does."""
    return tuple(map(_stamp, paths))


def _stamp(path: str) -> object:
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
