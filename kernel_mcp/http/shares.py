"""What uploads of a principal may take of its quota `disk`, all of them together."""

from __future__ import annotations

import errno
from collections import defaultdict
from functools import partial
from threading import Lock

from kernel_mcp.config.values import format_bytes
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.streams import Room
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.sessions.manager import Caller, SessionManager


class _Share:
    """The uploads of one principal."""

    def __init__(self) -> None:
        self.promised = 0
        self.lock = Lock()


class Shares:
    """Sets room aside for uploads."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._own: defaultdict[str, _Share] = defaultdict(_Share)

    def room(self, caller: Caller) -> Room | None:
        """What sets room aside for an upload of this caller; None where there is no bound."""
        most = self._manager.principals.quotas(caller.principal).disk
        if not most:
            return None
        own = {each.workspace.root: each.workspace for each in self._manager.owned_by(caller)}
        return partial(_set_aside, self._own[caller.principal], list(own.values()), most)


def _set_aside(share: _Share, own: list[Workspace], most: int, more: int, some: int) -> int:
    with share.lock:
        granted = more
        if more > 0:
            held = sum(each.usage().bytes for each in own)
            left = most - held - share.promised
            if more > left:
                raise WorkspaceError(
                    f"Your sessions together hold {format_bytes(held)}, and at most "
                    f"{format_bytes(most)} are yours (your quota `disk`): {more:,} bytes more do "
                    "not fit. Remove files first, or close a session that is not needed.",
                    errno.EFBIG if more > most else errno.EDQUOT,
                )
            granted = max(more, min(some, left))
        share.promised += granted
        return granted
