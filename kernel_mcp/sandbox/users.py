"""The host user ids that kernels of a root server run as, and the locks that reserve them."""

from __future__ import annotations

import fcntl
import os
from itertools import chain
from pathlib import Path

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity, private_folder, runtime_folder
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Builder
from kernel_mcp.sandbox.remedies import cannot_start

PREFERRED_BLOCKS = (range(1_900_000_000, 1_900_065_536), range(60_600, 61_184))
"""Ids that no distribution assigns, from UIDS-GIDS.md of systemd.

The first block is above systemd's container range, which ends at 1,879,048,191. The second is the
unassigned part below its dynamic users.
"""
SMALLEST_BLOCK = 16
"""Minimum number of ids in a block."""
RESERVED_IDS = (65_534, 65_535, 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class IdMap:
    """The ids that exist in this user namespace: `/proc/self/uid_map` or `gid_map`."""

    spans: tuple[range, ...]
    maps_root_to_root: bool

    @classmethod
    def read(cls, path: Path) -> IdMap:
        """Parse a map file: lines of first id inside, first id outside, count."""
        rows = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        return cls(
            spans=tuple(range(inside, inside + count) for inside, _, count in rows),
            maps_root_to_root=any(inside == outside == 0 for inside, outside, _ in rows),
        )

    def holds(self, block: range) -> bool:
        """Return True if one span of the map contains the whole block."""
        return any(block[0] in span and block[-1] in span for span in self.spans)


def find_block(users: IdMap, groups: IdMap) -> range | None:
    """Return a block of ids for kernels that both maps contain, or None."""
    for block in PREFERRED_BLOCKS:
        if users.holds(block) and groups.holds(block):
            return block
    ends = sorted((span.stop for span in users.spans), reverse=True)
    for end in ends:
        stop = min(end, RESERVED_IDS[0]) if end <= RESERVED_IDS[1] + 1 else end
        block = range(stop - SMALLEST_BLOCK, stop)
        if block.start >= 1000 and users.holds(block) and groups.holds(block):
            return block
    return None


@dataclass(slots=True)
class _Reserved:
    """A reserved id: its locked file, its holder, and the number of kernels that use it."""

    lock: int
    holder: object
    users: int = 1


class IdentityPool:
    """Reserves ids of a block by flock(2); all servers of one machine share the block."""

    def __init__(self, block: range, folder: Path) -> None:
        self._block = block
        self._folder = private_folder(folder)
        self._reserved: dict[int, _Reserved] = {}

    def acquire(self, preferred: int | None = None, holder: object = None) -> Identity:
        """Reserve `preferred` if it is free or has the same `holder`, else any id of the block.

        Raises SandboxUnavailable if all are in use.
        """
        if preferred is not None and preferred in self._block:
            reserved = self._reserved.get(preferred)
            if reserved is not None and holder is not None and reserved.holder == holder:
                reserved.users += 1
                return Identity(uid=preferred, gid=preferred)
            if self._reserve(preferred, holder):
                return Identity(uid=preferred, gid=preferred)
        above = max(self._reserved, default=self._block.start - 1) + 1  # others use lower ids
        for number in chain(range(above, self._block.stop), range(self._block.start, above)):
            if self._reserve(number, holder):
                return Identity(uid=number, gid=number)
        raise SandboxUnavailable(
            f"all {len(self._block)} user ids for kernels are in use on this machine; "
            "close sessions that are no longer needed"
        )

    def release(self, identity: Identity) -> None:
        """Release an id once; it becomes free with its last kernel."""
        reserved = self._reserved.get(identity.uid)
        if reserved is None:
            return
        reserved.users -= 1
        if not reserved.users:
            del self._reserved[identity.uid]
            os.close(reserved.lock)

    def _reserve(self, number: int, holder: object) -> bool:
        if number in self._reserved:
            return False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._folder / str(number), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._reserved[number] = _Reserved(lock, holder)
        return True


class KernelUsers:
    """Part of a `Sandbox`: host user ids for kernels of a root server, else the server's own."""

    name: str

    def __init__(self, identities: IdentityPool | None) -> None:
        self._identities = identities

    def builder(self) -> Builder | None:
        """Return None: bubblewrap confines installers."""
        return None

    def refusal(self, said: str) -> str:
        """Return why no process could be started; `said` is the start's output."""
        return cannot_start(self.name, said)

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """Reserve a host user id under a root server: the same for all kernels of one workspace.

        Return None under other servers. Raises SandboxUnavailable.
        """
        if self._identities is None:
            return None
        if workspace is None:
            return self._identities.acquire()
        folder = workspace.stat()  # identified by its inode, as it may be renamed while in use
        return self._identities.acquire(folder.st_uid, (folder.st_dev, folder.st_ino))

    def release(self, identity: Identity | None) -> None:
        """Release a host user id."""
        if self._identities is not None and identity is not None:
            self._identities.release(identity)


def reservable_ids(*, unless_nested: bool = False) -> IdentityPool | None:
    """Return the pool of user ids for kernels if this server is root; None for other users.

    Raises SandboxUnavailable without spare ids. With `unless_nested`, return None instead if this
    is the root of a user namespace, which is another user on the host.
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
