"""Recognise folders whose files the host executes: virtual environments and repositories."""

from __future__ import annotations

import os
from collections.abc import Collection

from kernel_mcp.host_folders import names
from kernel_mcp.host_folders.secrets import Parts

_OWN_OBJECTS = frozenset(("objects", "refs"))


def signs_in(root: int, folder: Parts) -> list[str]:
    """Return the marker files in a folder, such as `pyvenv.cfg` and `HEAD`.

    By these it may be a virtual environment or a Git repository. `root` is a descriptor of a folder
    above it, `folder` its path below that.
    """
    top = "/".join((f"/proc/self/fd/{root}", *folder))
    return [name for name in sorted(names.SIGNS) if os.path.lexists(f"{top}/{name}")]


def is_environment(folder: Parts, signs: Collection[str]) -> bool:
    """Return True for a virtual environment; the top of a mount never counts as one."""
    return names.ENVIRONMENT in signs and folder != ()


def is_repository(signs: Collection[str]) -> bool:
    """Return True for the folder of a Git repository."""
    return names.GIT_SIGN in signs and (_OWN_OBJECTS.issubset(signs) or "commondir" in signs)
