"""The host users that kernels of one server run as."""

from __future__ import annotations

import os
from pathlib import Path

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity, runtime_folder
from kernel_mcp.sandbox.identity import IdentityPool, IdMap, find_block


class KernelUsers:
    """Host user ids for kernels of a root server; kernels of others are their server's user.

    What a sandbox is made of: `identity` and `release` are its part of the `Sandbox` protocol.
    """

    def __init__(self, identities: IdentityPool | None) -> None:
        self._identities = identities

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """Reserve a host user id of a root server: the same for all kernels of one workspace."""
        if self._identities is None:
            return None
        if workspace is None:
            return self._identities.acquire()
        folder = workspace.stat()  # known by its inode, as it may be renamed while it is used
        return self._identities.acquire(folder.st_uid, (folder.st_dev, folder.st_ino))

    def release(self, identity: Identity | None) -> None:
        """Give a host user id back."""
        if self._identities is not None and identity is not None:
            self._identities.release(identity)


def reservable_ids(*, unless_nested: bool = False) -> IdentityPool | None:
    """Ids for kernels when this server is root; None for other users.

    Raises SandboxUnavailable where there are no spare ids; with `unless_nested` not for the root of
    a user namespace, who is somebody else on the host: None then.
    """
    if os.geteuid() != 0:
        return None
    users, groups = (IdMap.read(Path(f"/proc/self/{name}_map")) for name in ("uid", "gid"))
    block = find_block(users, groups)
    if block is not None:
        return IdentityPool(block, runtime_folder("uids"))
    if unless_nested and not users.maps_root_to_root:
        return None
    raise SandboxUnavailable(
        "the server runs as root, but this user namespace has no spare user ids for kernels, "
        "which must not run as root. Start the server as an ordinary user, or map at least "
        "65536 ids into the container."
    )
