"""Ended sessions whose end was not reported to their owners yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.notifications import Loss

MOST = 500
"""Maximum number of records; beyond it the owner with the most records loses the oldest."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An ended session: the reason of its end, and the loss.

    `name` is empty once a later session of the owner has that name. `saved` is True if it comes
    back with its name.
    """

    owner: str
    handle: str
    name: str
    why: str
    loss: Loss
    saved: bool = False


class Tombstones:
    """Records of ended sessions, each visible only to its owner."""

    def __init__(self) -> None:
        self._undelivered: dict[str, OrderedDict[str, Tombstone]] = {}
        self._delivered: OrderedDict[str, Tombstone] = OrderedDict()

    def add(self, ended: Tombstone) -> None:
        """Add the end of a session, unless it is recorded already."""
        own = self._undelivered.setdefault(ended.owner, OrderedDict())
        if ended.handle not in own and ended.handle not in self._delivered:
            own[ended.handle] = ended
            if sum(map(len, self._undelivered.values())) > MOST:
                max(self._undelivered.values(), key=len).popitem(last=False)
        self._tidy(ended.owner)

    def find(self, owner: str, key: str) -> Tombstone | None:
        """Return an unreported end by the session's handle or name; None without one."""
        own = self._undelivered.get(owner, OrderedDict())
        return own.get(key) or next((e for e in reversed(own.values()) if e.name == key), None)

    def pop(self, owner: str, handle: str) -> Tombstone | None:
        """Remove and return the end of a session, for the caller to report; None without one."""
        found = self._undelivered.get(owner, OrderedDict()).pop(handle, None)
        self._tidy(owner)
        return found

    def reassign_name(self, owner: str, name: str) -> None:
        """Note that a later session of the owner has this name: `find` ignores it from now on."""
        own = self._undelivered.get(owner, OrderedDict())
        for former in [each for each in own.values() if each.name == name]:
            own[former.handle] = replace(former, name="")

    def mark_delivered(self, handle: str) -> None:
        """Record that an answer which reports this end was delivered."""
        owner = next((owner for owner, own in self._undelivered.items() if handle in own), "")
        if (ended := self.pop(owner, handle)) is not None:
            self._delivered[handle] = ended
            if len(self._delivered) > MOST:
                self._delivered.popitem(last=False)

    def mark_undelivered(self, handle: str) -> None:
        """Record that this answer was revoked: the end is reported again."""
        if (ended := self._delivered.pop(handle, None)) is not None:
            self.add(ended)

    def _tidy(self, owner: str) -> None:
        if not self._undelivered.get(owner, True):
            del self._undelivered[owner]
