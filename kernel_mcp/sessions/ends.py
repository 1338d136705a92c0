"""Sessions that have ended, of which their owners have not heard yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.losses import Loss

MOST = 500
"""Ended sessions that are kept for their owners' next call; whose are most loses the oldest."""


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
    """Ended sessions, each found by its owner alone, in as many steps as one that never was."""

    def __init__(self) -> None:
        self._untold: dict[str, OrderedDict[str, Ended]] = {}
        self._told: OrderedDict[str, Ended] = OrderedDict()

    def add(self, ended: Ended) -> None:
        """Keep the end of a session, unless it is there."""
        own = self._untold.setdefault(ended.owner, OrderedDict())
        if ended.handle not in own and ended.handle not in self._told:
            own[ended.handle] = ended
            if sum(map(len, self._untold.values())) > MOST:
                max(self._untold.values(), key=len).popitem(last=False)
        self._tidy(ended.owner)

    def find(self, owner: str, key: str) -> Ended | None:
        """The session of this handle or name whose end its owner does not know of."""
        own = self._untold.get(owner, OrderedDict())
        return own.get(key) or next((e for e in reversed(own.values()) if e.name == key), None)

    def pop(self, owner: str, handle: str) -> Ended | None:
        """The end of a session, which is told with what its owner hears next."""
        found = self._untold.get(owner, OrderedDict()).pop(handle, None)
        self._tidy(owner)
        return found

    def give_name(self, owner: str, name: str) -> None:
        """A later session has this name of its owner's."""
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
