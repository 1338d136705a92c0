"""Failed file operations in words for a model."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Iterator
from difflib import get_close_matches

from kernel_mcp.barriers import reason_of
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.folders import Listing

_SHORT = "the server is short of descriptors or memory just now. Try again"
_SHOWN = 20
"""Names that a message about a missing file lists."""


def not_found(path: str, folder: str, missing: str, listing: Listing) -> WorkspaceError:
    """There is no `missing` in `folder`, which is the nearest one that exists."""
    names = [entry.path for entry in listing.entries]
    text = f"There is no file {path!r} in the workspace. "
    if close := get_close_matches(missing, names[:200], n=3):
        text += f"Did you mean {' or '.join(map(repr, close))}? "
    more = len(names) + listing.omitted - _SHOWN
    shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {more:,} more" if more > 0 else "")
    where = f"The folder {folder!r}" if folder else "The workspace"
    return WorkspaceError(text + (f"{where} holds {shown}." if names else f"{where} is empty."))


def not_utf8(path: str, encoding: str) -> WorkspaceError:
    """The file is no UTF-8 text; `encoding` is what it looks like, or empty."""
    how = f"; its encoding looks like {encoding}" if encoding else ""
    return WorkspaceError(
        f"{path!r} is not UTF-8 text{how}. Read it with code, for example "
        f"open({path!r}, encoding={encoding or 'latin-1'!r}), or as base64."
    )


def not_regular(path: str, mode: int) -> WorkspaceError:
    """The file is a folder, a pipe or the like."""
    if stat.S_ISDIR(mode):
        return WorkspaceError(f"{path!r} is a folder. Use list_files to see what it holds.")
    kind = "named pipe" if stat.S_ISFIFO(mode) else "device or socket"
    return WorkspaceError(f"{path!r} is a {kind}, not a regular file.")


def unmeasured(error: OSError | MemoryError) -> WorkspaceError:
    """The server could not see how full the workspace is."""
    return WorkspaceError(
        "The server could not measure the workspace, so nothing was written: "
        f"{reason_of(error)}. Try again."
    )


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turns OSError into WorkspaceError."""
    try:
        yield
    except OSError as error:
        raise explanation(error, path) from None


def explanation(error: OSError, path: str) -> WorkspaceError:
    """Why something failed; `path` is empty for the workspace as a whole."""
    reasons = {
        errno.ELOOP: "it is a symbolic link, or leads through one, and the file tools follow none",
        errno.EXDEV: "it leads out of the workspace",
        errno.ENOTDIR: "a part of the path is no folder (files and symbolic links are not)",
        errno.EISDIR: "it is a folder",
        errno.ENXIO: "it is a socket or a device, not a regular file",
        errno.ENAMETOOLONG: "a name in it is too long (at most 255 bytes)",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "its permissions forbid it",
        errno.EPERM: "its permissions forbid it",
        errno.EMFILE: _SHORT,
        errno.ENFILE: _SHORT,
        errno.ENOMEM: _SHORT,
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    what = f"{path!r} cannot be used" if path else "The workspace cannot be changed"
    return WorkspaceError(f"{what}: {reason}.")
