"""Session registry of a node: a name leads to one session in the whole fleet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import anyio

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.errors import InputError, KernelMcpError
from kernel_mcp.fleet.handles import new_handle
from kernel_mcp.fleet.persistence import FleetPersistence, key_of
from kernel_mcp.fleet.session_table import DEFAULT, NAMED, SessionRow, VersionedRow
from kernel_mcp.fleet.shared_store import SharedStore
from kernel_mcp.fleet.signed import NotOurs, Overtaken
from kernel_mcp.sessions.persistence import SessionRequest
from kernel_mcp.sessions.storage import SCRIPT

logger = logging.getLogger(__name__)

_FOREIGN = (
    "An earlier session of this name was saved with a key that the fleet does not have any more. "
    "It cannot be used, and this one is new: run again what is still wanted"
)
ATTEMPTS = 20
"""Attempts to open a session under a name that other nodes open at the same time."""

IsOver = Callable[[str, str], Awaitable[bool]]
"""Function that returns True if an incarnation (`life`) of a node is certainly over."""


class OpenElsewhere(KernelMcpError):
    """A session is open on another node, `node`."""

    def __init__(self, node: str, handle: str) -> None:
        super().__init__(f"Session {handle} is on node {node}.")
        self.node = node


class FleetSessionRegistry:
    """See `SessionRegistry`, for one node.

    `persistence` returns its persistence, once the node has that.
    """

    def __init__(
        self, node: str, is_over: IsOver, persistence: Callable[[], FleetPersistence]
    ) -> None:
        self._node = node
        self._is_over = is_over
        self._persistence = persistence
        self._reserved: set[str] = set()

    def new_handle(self) -> str:
        """See `SessionRegistry`."""
        return new_handle(self._node)

    async def register(self, principal: str, request: SessionRequest, default: str) -> str:
        """See `SessionRegistry`.

        For an open session, raises OpenElsewhere (default one) or InputError.
        """
        if request.name == SCRIPT:
            return self.new_handle()
        store = self._persistence().store
        kind, name = (DEFAULT, default) if default else (NAMED, request.name)
        unheard: tuple[str, ...] = ()
        for _ in range(ATTEMPTS):
            if name:
                find = partial(store.table.find_by_name, principal, kind, name)
                try:
                    known = await anyio.to_thread.run_sync(find)
                except NotOurs as error:
                    logger.error("a new session takes the name of another one: %s", error)
                    known, unheard = None, (_FOREIGN,)
                if known is not None and not request.fresh:
                    if await self._is_open(known):
                        raise self._elsewhere(known.row)
                    return await self.take(known)
                if known is not None:
                    await self._forget(store, known)
            row = SessionRow(self.new_handle(), principal, request.name, default)
            try:
                await anyio.to_thread.run_sync(store.open_row, row)
            except Overtaken:
                continue
            if unheard:
                self._persistence().taken_over[row.handle] = replace(
                    row, ended=True, unheard=unheard
                )
            return row.handle
        raise KernelMcpError(
            f"Sessions named {name!r} are being opened on many nodes at once. Call again."
        )

    async def take(self, known: VersionedRow) -> str:
        """Take over a session that is not open on any node; return its handle.

        Raises Overtaken, NotOurs.
        """
        keeping, row = self._persistence(), known.row
        key = key_of(row.principal, row.handle)
        keeping.taken_over[row.handle] = await anyio.to_thread.run_sync(
            keeping.store.take, known, key
        )
        self._reserved.add(row.handle)
        return row.handle

    async def unregister(self, handle: str) -> None:
        """See `SessionRegistry`.

        The saved data of a session that was taken over stays for other nodes.
        """
        keeping = self._persistence()
        with Barrier("taking the handle of a session back", handle):
            row = keeping.taken_over.pop(handle, None)
            if handle in self._reserved:
                self._reserved.discard(handle)
                whole = row is not None and row.ended
                await run_in_thread(partial(keeping.store.let_go, handle, whole=whole))
            else:
                await run_in_thread(keeping.store.forget_row, handle)

    async def _is_open(self, known: VersionedRow) -> bool:
        row = known.row
        if not row.node:
            return False
        if self._persistence().store.table.is_mine(row):
            return True
        return not await self._is_over(row.node, row.life)

    async def _forget(self, store: SharedStore, known: VersionedRow) -> None:
        """Remove the session of a name. Raises OpenElsewhere or InputError if it is open."""
        if await self._is_open(known):
            raise self._elsewhere(known.row)
        await anyio.to_thread.run_sync(store.table.forget, known)

    def _elsewhere(self, row: SessionRow) -> KernelMcpError:
        if row.default:
            return OpenElsewhere(row.node, row.handle)
        return InputError(
            f"You have a session named {row.name!r} already. Use it by session={row.name!r}, end "
            f"it with close_session(session={row.name!r}), or choose another name."
        )
