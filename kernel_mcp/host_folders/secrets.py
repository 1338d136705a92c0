"""Classify entries below a mounted folder: secrets, sockets of processes, files hosts execute.

The rules go by names (`names`), as best effort: a secret with another name is shown. Hard links to
what is found, and the targets of symlinks with such a name, count as well.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence

from kernel_mcp.host_folders import names
from kernel_mcp.linux.safe_tree import open_beneath

FILE, FOLDER = "file", "folder"
"""Kinds of covers that hide: an empty file or an empty folder."""
FIXED, KEPT = "fixed", "kept"
"""Kinds of covers below a writable mount: read-only; and a folder that cannot be moved away, as it
contains something read-only."""
HIDING = frozenset((FILE, FOLDER))

_CREDENTIALS = re.compile(
    rb"https?://[^/\s@]+@|://[^/\s:@]*:[^/\s@]+@"
    rb"|(?:extraheader|authorization|password|passwd|token|secret|api_?key)[\"']?\s*[=:]",
    re.IGNORECASE,
)
_OF_A_KEY = (b"PRIVATE KEY-----", b"PRIVATE KEY BLOCK-----", b"PuTTY-User-Key-File-")
_MOST_READ = 1 << 20
_NUMBERED = re.compile(rf"[._-](?:(?:{'|'.join(names.COPIES)})[._-]?\d*|\d+)$")
"""Suffix of a numbered copy of a file."""
_PLAIN = re.compile(r"[\w./@+-]{1,200}", re.ASCII)
_MOST_SAID = 200
"""Maximum characters of a path in a notice."""
_MOST_COPIES = 3
"""Maximum number of backup suffixes that are removed from one name."""
Parts = tuple[str, ...]
"""A path below a mount."""


def remarkable(name: str) -> bool:
    """Return False if no rule can match an entry of this name: a quick test for most files."""
    name = name.lower()
    if name in names.LAST or name.startswith(names.BEGINNINGS):
        return True
    if name[-1:].isdecimal():
        name = name.rstrip("0123456789")
    return name.endswith(names.ENDS) or name[-4:-1] == names.SWAP


def secret(parts: Sequence[str], mode: int) -> str | None:
    """Return the cover for a path by its name and file mode; None when it is shown.

    For a link the name of a folder counts as well as that of a file. Case is ignored.
    """
    if stat.S_ISLNK(mode):
        return secret(parts, stat.S_IFDIR) or secret(parts, stat.S_IFREG)
    *above, name = (part.lower() for part in parts[-names.MOST_PARTS :])
    if stat.S_ISDIR(mode):
        return FOLDER if any(_secret_folder(above, each) for each in _originals(name)) else None
    if not stat.S_ISREG(mode):
        return FILE  # a socket, a FIFO or a device: a process may listen behind it
    return FILE if any(_secret_file(above, each) for each in _originals(name)) else None


def _secret_folder(above: Sequence[str], name: str) -> bool:
    ends = _ends((*above, name))
    return name in names.SECRET_FOLDERS or not ends.isdisjoint(names.SECRET_FOLDERS_BELOW)


def _secret_file(above: Sequence[str], name: str) -> bool:
    if name in names.SECRET_FILES or (name.startswith(".") and name.endswith(names.HISTORY)):
        return True
    if name.startswith(names.VARIABLES):
        return True
    if name.startswith(names.KEY_KINDS) and not name.endswith(names.PUBLIC):
        return True
    return not _ends((*above, name)).isdisjoint(names.SECRET_FILES_BELOW)


def _ends(parts: Parts) -> set[Parts]:
    return {parts[-count:] for count in range(2, len(parts) + 1)}


def _originals(name: str) -> Iterator[str]:
    """Yield a name, and the names of the files that it may be a backup or swap file of."""
    yield name
    for _ in range(_MOST_COPIES):
        before = name
        if name[:1] == name[-1:] == "#" or name.startswith(".#"):
            name = name[2:] if name.startswith(".#") else name[1:-1]
        elif name[-4:-1] == names.SWAP:
            name = name[:-4]
        elif end := next((end for end in names.BACKUPS if name.endswith(end)), ""):
            name = name[: -len(end)]
            stem, dot, number = name.rpartition(".~")
            name = stem if dot and number.isdigit() else name
        elif found := _NUMBERED.search(name):
            name = name[: found.start()]
        if name in (before, ""):
            return
        yield name
        if name.startswith("."):
            yield name[1:]


def secret_folder(parts: Parts) -> Parts:
    """Return the path of the first folder of secrets that a folder is or lies in, or ()."""
    ends = (parts[:end] for end in range(1, len(parts) + 1))
    return next((path for path in ends if secret(path, stat.S_IFDIR)), ())


def readable(parts: Sequence[str]) -> str:
    """Return a path in readable form: on one line, with unprintable characters escaped."""
    text = os.fsencode("/".join(parts)).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def quoted(text: str) -> str:
    """Return a readable path as it stands in a notice: in quotes unless it is a plain name."""
    if _PLAIN.fullmatch(text):
        return text
    text = text.replace('"', "'")
    return f'"{text if len(text) <= _MOST_SAID else text[: _MOST_SAID - 1] + "…"}"'


def secret_by_name(parts: Sequence[str], above: Parts = ()) -> bool:
    """Return True if any component of a path has a secret's name, whatever its kind of file.

    `above` are the components before the path, which are not judged themselves.
    """
    return any(
        secret((*above, *parts[:end]), kind) is not None
        for end in range(1, len(parts) + 1)
        for kind in ((stat.S_IFDIR,) if end < len(parts) else (stat.S_IFDIR, stat.S_IFREG))
    )


def executed(parts: Sequence[str]) -> bool:
    """Return True if programs of the host execute a file of this name."""
    path = tuple(part.lower() for part in parts[-names.MOST_PARTS :])
    name = path[-1]
    return (
        name in names.EXECUTED
        or not _ends(path).isdisjoint(names.EXECUTED_BELOW)
        or any(name.startswith(first) and name.endswith(last) for first, last in names.FRAMES)
    )


def obeyed(parts: Sequence[str]) -> bool:
    """Return True if agents or build servers of the host obey a file of this name."""
    path = [part.lower() for part in parts]
    return path[-1] in names.OBEYED or not names.OBEYED_FOLDERS.isdisjoint(path)


def settings_by_name(parts: Sequence[str]) -> bool:
    """Return True for names of settings files: they are secrets while they hold credentials."""
    *above, last = (part.lower() for part in parts)
    for name in _originals(last):
        if name in names.SETTINGS:
            return True
        if name == names.SETTINGS_OF_GIT and any(part.endswith(".git") for part in above):
            return True
        if name in names.SETTINGS_OF_AGENTS and above and above[-1] in names.AGENTS:
            return True
    return False


def judged_by_content(parts: Sequence[str]) -> bool:
    """Return True if the content of a file decides whether it is a secret."""
    of_a_key = any(
        name.startswith(names.KEYS) or name.endswith(names.KEY_ENDS)
        for name in _originals(parts[-1].lower())
    )
    return of_a_key or settings_by_name(parts)


def holds_credentials(root: int, parts: Sequence[str], named: Sequence[str]) -> bool:
    """Return True if a file holds credentials, by the rules for the path `named`.

    Also True for a file that cannot be read.
    """
    try:
        fd = open_beneath(root, parts, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        content = os.read(fd, _MOST_READ)
    except OSError:
        return True
    finally:
        os.close(fd)
    if any(header in content for header in _OF_A_KEY):
        return True
    if settings_by_name(named):
        return _CREDENTIALS.search(content) is not None
    return named[-1].lower().startswith(names.KEYS) and _has_public_half(root, parts)


def _has_public_half(root: int, parts: Sequence[str]) -> bool:
    if parts[-1].lower().endswith(names.PUBLIC):
        return False
    try:
        os.close(open_beneath(root, (*parts[:-1], f"{parts[-1]}{names.PUBLIC}"), os.O_PATH))
    except OSError:
        return False
    return True


def around(covers: Mapping[Parts, str]) -> set[Parts]:
    """Return the folders above the paths that these covers hide or make read-only."""
    inside = [path for path, kind in covers.items() if kind != KEPT]
    return {path[:end] for path in inside for end in range(len(path))}
