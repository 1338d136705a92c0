"""Folders of this user alone, in places where others may write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make `path` a folder of mode 0700 that belongs to this user, parents included.

    Raises PermissionError when somebody else prepared it (a symlink, another owner).
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(
                f"{path} exists and is not a folder of this user; remove it or set XDG_RUNTIME_DIR"
            ) from None
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    return path


def runtime_folder() -> Path:
    """Where this user's servers meet: /run for root, else XDG_RUNTIME_DIR, else below /tmp."""
    user = os.geteuid()
    given = "/run" if user == 0 else os.environ.get("XDG_RUNTIME_DIR", "")
    if given.startswith("/") and os.access(given, os.W_OK | os.X_OK):
        return private_folder(Path(given) / "kernel-mcp")
    return private_folder(Path(f"/tmp/kernel-mcp-{user}"))
