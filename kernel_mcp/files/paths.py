"""Paths of tools: components below the workspace or below a mounted folder, and who may write."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kernel_mcp.barriers import shortage
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.folders import FOLDER, listing_of
from kernel_mcp.host_folders.exposed import ExposedMount, acting_as_owner
from kernel_mcp.linux.safe_tree import Opener, open_beneath
from kernel_mcp.output.text import escaped, one_line
from kernel_mcp.records import dataclass

GUEST_ROOT = "/workspace"
"""Path of the folder inside the sandbox."""


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A caller's `path` resolved to `parts` below the open folder `root`, of a mount if `mount`.

    `prefix` is that of paths below `root` in answers.
    """

    path: str
    root: int
    parts: tuple[str, ...]
    mount: ExposedMount | None = None
    prefix: str = ""

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The parts below `root`, which for a single mounted file is the folder it is in."""
        single = self.mount is not None and self.mount.single
        return (self.mount.mount.host.name,) if self.mount and single else self.parts

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a root server acts with the rights of the mount's owner.

        Outside of mounts the context does nothing.
        """
        if self.mount is None:
            return contextlib.nullcontext()
        return acting_as_owner(self.mount.mount.host)

    @property
    def name(self) -> str:
        """Name of the file or folder in answers."""
        return (self.prefix + "/".join(self.parts)).rstrip("/")


@contextlib.contextmanager
def opened_root(workspace: Path) -> Iterator[int]:
    """Yield a descriptor of a session's folder, closed at the end. Raises WorkspaceError."""
    try:
        fd = os.open(workspace, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WorkspaceError(
            "The workspace folder of this session has been removed from outside: its files are "
            "gone. Call reset for a new one.",
            errno.ENOENT,
        ) from None
    except OSError as error:
        why = shortage(error) or f"{error.strerror}."
        raise WorkspaceError(f"The workspace cannot be opened: {why}") from None
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def entered(shown: ExposedMount, path: str) -> Iterator[int]:
    """Yield a descriptor of a mount's folder, for a caller's path. Raises WorkspaceError."""
    with contextlib.ExitStack() as stack:
        with folders.explained(path):
            root = stack.enter_context(shown.open_folder())
        yield root


def hidden_error(place: ResolvedPath) -> WorkspaceError:
    """Return the error for a path that is hidden."""
    host = place.name if place.mount is None else place.mount.mount.host.joinpath(*place.parts)
    return WorkspaceError(
        f"{place.path!r} is covered: it is, or has the name of, a secret or of something that no "
        "regular file or folder is. Code finds it empty, or may not open it. If it is a regular "
        f"file, the operator can show that one with --mount {host}.",
        errno.EACCES,
    )


def check_writable(shown: ExposedMount, place: ResolvedPath) -> None:
    """Raise WorkspaceError unless tools may write a file of a mount there."""
    if not shown.mount.writable:
        raise WorkspaceError(
            f"{place.path!r} is in {shown.mount.guest}, which the operator mounted read-only. "
            "Use a relative path instead.",
            errno.EROFS,
        )
    if shown.single:
        text = f"{place.path!r} is a mounted file: change it with code."
        raise WorkspaceError(text, errno.EACCES)
    if shown.covers_path(place.root, place.parts):
        raise hidden_error(place)
    if shown.is_read_only(place.parts):
        raise WorkspaceError(
            f"{place.path!r} stays read-only, as programs of the host execute what is there, or "
            "take commands from it. The operator can mount it by its own name with :rw.",
            errno.EACCES,
        )


def check_path(path: str) -> None:
    """Raise WorkspaceError for a text that is no path."""
    if "\0" in path or len(path) > 4096:
        raise WorkspaceError("The path is too long or contains a NUL character.")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise WorkspaceError(f"{one_line(path)} is no usable path: use plain Unicode.") from None


def parts_of(path: str, workspace: Path) -> tuple[str, ...]:
    """Return the components of a caller's path, relative to the folder `workspace`.

    Raises WorkspaceError for a path outside of it.
    """
    check_path(path)
    inner = path
    for prefix in (GUEST_ROOT, str(workspace)):
        if path == prefix or path.startswith(f"{prefix}/"):
            inner = path[len(prefix) :].lstrip("/")
            break
    parts: list[str] = []
    outside = inner.startswith("/") or inner.split("/")[0] == "~"
    for part in inner.split("/"):
        if part == "..":
            outside = outside or not parts
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    if outside:
        raise WorkspaceError(
            f"{path!r} is outside the workspace. Use a path relative to it, such as "
            "'data/input.csv'; absolute paths may only begin with /workspace/.",
            errno.EACCES,
        )
    return tuple(parts)


def exact(place: ResolvedPath, opener: Opener | None) -> ResolvedPath:
    """Return a path in which names that were copied from a listing are those on disk.

    A listing shows characters that hide text, and bytes that are not UTF-8, as escapes.
    """
    if not any("\\" in part for part in place.parts):
        return place
    parts: list[str] = []
    for part in place.parts:
        parts.append(_on_disk(place, parts, part, opener) if "\\" in part else part)
    return replace(place, parts=tuple(parts))


def _on_disk(place: ResolvedPath, above: Sequence[str], shown: str, opener: Opener | None) -> str:
    """Return the only name in the folder `above` that is `shown` so; `shown` without one."""
    try:
        with place.acting():
            fd = open_beneath(place.root, tuple(above), FOLDER, opener=opener)
    except OSError:
        return shown
    try:
        with place.acting(), os.scandir(fd) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return shown
    finally:
        os.close(fd)
    if shown in names:
        return shown
    found = [each for each in names if shown in (one_line(each), escaped(one_line(each)))]
    return found[0] if len(found) == 1 else shown


def not_found(place: ResolvedPath, opener: Opener | None) -> WorkspaceError:
    """Return the error for a path at which nothing is, with similar names beside it."""
    parts = place.on_disk
    for depth in range(len(parts) - 1, -1, -1):
        with contextlib.suppress(OSError), place.acting():
            fd = open_beneath(place.root, parts[:depth], FOLDER, opener=opener)
            try:
                listing = listing_of("", fd)
            finally:
                os.close(fd)
            folder = place.prefix + "/".join(parts[:depth])
            return folders.not_found(place.path, folder, parts[depth], listing)
    return WorkspaceError(f"There is no file {place.path!r}.", errno.ENOENT)
