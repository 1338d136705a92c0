"""Detached mounts of the shown folders, with the ids of their owners mapped to a kernel's user."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence

from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.safe_tree import open_place
from kernel_mcp.sandbox.base import BY_RULES, BY_TREES
from kernel_specs import linux

logger = logging.getLogger(__name__)

_COMMON_READ = "only what every user may read"
_ALL_READ = "sessions read all in it that is not covered, whoever it belongs to"


class NotMapped(OSError):
    """The file system does not support id-mapped mounts."""


class MountTrees:
    """Makes mounts of the folders `shown`, for a sandbox that shows folders by `shows`."""

    def __init__(
        self,
        shown: Sequence[ExposedMount],
        method: str,
        user_namespace: Callable[[Sequence[tuple[int, int]]], Awaitable[int]],
    ) -> None:
        """`user_namespace` returns the descriptor of one that maps rows of ids.

        It raises LaunchError, ConfigError.
        """
        self._shown = shown
        self._method = method
        self._user_namespace = user_namespace
        self._maps: dict[tuple[int, ...], int] = {}

    async def make(self, identity: Identity | None) -> list[int]:
        """Return a detached mount of each folder, id-mapped for `identity`; the caller closes them.

        Empty without an identity, and for a sandbox that does not show folders by mount trees.
        Raises NotMapped, OSError, LaunchError, ConfigError.
        """
        trees: list[int] = []
        if identity is None or self._method != BY_TREES:
            return trees
        try:
            for each in self._shown:
                trees += [await self._mapped(each, identity)]
        except BaseException:
            linux.close_all(trees)
            raise
        return trees

    async def probe(self) -> None:
        """Find mounts that cannot be shown with their owners' rights. Raises ConfigError."""
        for each in self._shown:
            if self._method == BY_TREES:
                await self._probe(each)
            elif each.mount.writable and self._method != BY_RULES:
                raise ConfigError(
                    f"--mount {each.mount}: sessions run as users of their own, and docker cannot "
                    "give what they make to the folder's owner. Mount it read-only, start the "
                    "server as that user, or take podman or --sandbox bwrap"
                )
            else:
                each.id_mapped = False
                each.rights = _ALL_READ if self._method == BY_RULES else _COMMON_READ

    async def _probe(self, shown: ExposedMount) -> None:
        if shown.mount.writable and shown.mount.host.stat().st_uid == 0:
            logger.warning(
                "--mount %s: what sessions make there belongs to root, as the folder does. Give it "
                "to a user (chown) if that is not what you want.",
                shown.mount,
            )
            shown.owned_by_root = True
        try:
            os.close(await self._mapped(shown, Identity(1, 1)))
        except NotMapped as reason:
            shown.id_mapped, shown.rights = False, _COMMON_READ
            if shown.mount.writable:
                raise ConfigError(
                    f"--mount {shown.mount}: sessions run as users of their own, and on this "
                    f"file system Linux cannot give what they make to the folder's owner "
                    f"({reason}). Mount it read-only, or start the server as that user."
                ) from None
            logger.warning(
                "--mount %s: sessions read there only what every user may read, as this file "
                "system has no id-maps (%s)",
                shown.mount,
                reason,
            )

    async def _mapped(self, shown: ExposedMount, identity: Identity) -> int:
        handle = open_place(shown.mount.host)
        try:
            info = os.fstat(handle)
            tree = linux.open_tree(handle)
        finally:
            os.close(handle)
        attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        if not shown.mount.writable:
            attributes |= linux.MOUNT_ATTR_RDONLY
        try:
            userns = -1
            if shown.id_mapped:
                userns = await self._map(info.st_uid, info.st_gid, identity)
            try:
                linux.set_attributes(tree, attributes, userns=userns)
            except OSError as reason:
                raise NotMapped(reason.errno, reason.strerror) from reason
        except BaseException:
            os.close(tree)
            raise
        return tree

    async def _map(self, uid: int, gid: int, identity: Identity) -> int:
        key = (uid, identity.uid, gid, identity.gid)
        if key not in self._maps:
            rows = [(uid, identity.uid), (gid, identity.gid)]
            self._maps[key] = await self._user_namespace(rows)
        return self._maps[key]

    def close(self) -> None:
        """Close the user namespaces."""
        linux.close_all([*self._maps.values()])
        self._maps.clear()
