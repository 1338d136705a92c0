"""Files and folders on the host that containers mount although nobody has made them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox import rootfs

_OF_THE_IMAGE = ("usr", "opt", "var", "tmp", "run", "lib", "lib64", "bin", "sbin", "srv", "mnt")
"""Top folders that any user may pass in every image."""


class Furniture:
    """Kept in a folder of this user; what depends on a kernel has a name for each content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def account_files(self, user: Identity) -> list[Path]:
        """Files for /etc, the same for every kernel of one user."""
        folder = self._folder / f"{user.uid}-{user.gid}"
        _open_folder(folder)
        found = []
        for name, content in rootfs.account_files(user.uid, user.gid).items():
            path = folder / name
            if not path.exists() or path.read_text() != content:
                fresh = path.with_name(f".{name}-{secrets.token_hex(4)}")
                fresh.write_text(content)
                fresh.chmod(0o644)
                fresh.rename(path)
            found.append(path)
        return found

    def way_to(self, paths: Sequence[Path]) -> list[Path]:
        """Top folders that hold nothing but the way to `paths`, for mounts to be made in.

        An image may have closed its own to others, as it does /root.
        """
        key = hashlib.sha256("\0".join(map(str, paths)).encode()).hexdigest()[:16]
        root = self._folder / f"way-{key}"
        _open_folder(root)
        tops = set()
        for path in paths:
            if path.parts[1] in _OF_THE_IMAGE or len(path.parts) == 2:
                continue
            tops.add(root / path.parts[1])
            place = root
            for part in path.parts[1:-1]:
                place /= part
                _open_folder(place)
            if path.is_dir():
                _open_folder(place / path.name)
            else:
                (place / path.name).touch()
        return sorted(tops)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths and what their links lead to, without those inside others. Raises LaunchError."""
    wanted = set()
    for path in paths:
        if not path.is_absolute() or len(path.parts) < 2:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check the interpreter given with --python"
            )
        if not path.exists():
            raise LaunchError(f"{path} does not exist, but the kernel's interpreter needs it")
        wanted |= {Path(os.path.normpath(path)), Path(os.path.realpath(path))}
    return [path for path in sorted(wanted) if not any(other in wanted for other in path.parents)]


def _open_folder(path: Path) -> None:
    """Make a folder that everyone may pass, whatever the umask is."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)
