"""Ended sessions whose end was not reported to their owners yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.losses import Loss

MOST = 500
"""Most ended sessions that are kept; the owner with the most of them loses the oldest."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended session: why it ended, and what was lost.

    `name` is empty once a later session of its owner has it.
    """

    owner: str
    handle: str
    name: str
    why: str
    loss: Loss


class Ends:
    """Ended sessions. Only the owner finds one: for others it looks like one that never existed."""

    def __init__(self) -> None:
        self._untold: dict[str, OrderedDict[str, Ended]] = {}
        self._told: OrderedDict[str, Ended] = OrderedDict()

    def add(self, ended: Ended) -> None:
        """Add the end of a session, unless it is known."""
        own = self._untold.setdefault(ended.owner, OrderedDict())
        if ended.handle not in own and ended.handle not in self._told:
            own[ended.handle] = ended
            if sum(map(len, self._untold.values())) > MOST:
                max(self._untold.values(), key=len).popitem(last=False)
        self._tidy(ended.owner)

    def find(self, owner: str, key: str) -> Ended | None:
        """Return the session of this handle or name whose end was not reported; None for none."""
        own = self._untold.get(owner, OrderedDict())
        return own.get(key) or next((e for e in reversed(own.values()) if e.name == key), None)

    def pop(self, owner: str, handle: str) -> Ended | None:
        """Remove and return the end of a session, which the caller reports; None for none."""
        found = self._untold.get(owner, OrderedDict()).pop(handle, None)
        self._tidy(owner)
        return found

    def give_name(self, owner: str, name: str) -> None:
        """Note that a later session of the owner has this name: no ended one is found by it."""
        own = self._untold.get(owner, OrderedDict())
        for former in [each for each in own.values() if each.name == name]:
            own[former.handle] = replace(former, name="")

    def told(self, handle: str) -> None:
        """Record a delivered answer about an end."""
        owner = next((owner for owner, own in self._untold.items() if handle in own), "")
        if (ended := self.pop(owner, handle)) is not None:
            self._told[handle] = ended
            if len(self._told) > MOST:
                self._told.popitem(last=False)

    def untold(self, handle: str) -> None:
        """Record that this answer was revoked."""
        if (ended := self._told.pop(handle, None)) is not None:
            self.add(ended)

    def _tidy(self, owner: str) -> None:
        if not self._untold.get(owner, True):
            del self._untold[owner]
