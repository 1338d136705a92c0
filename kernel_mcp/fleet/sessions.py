"""The sessions of one node: answers calls of fronts, and moves sessions between nodes."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import anyio
from mcp_types import CallToolResult, TextContent

from kernel_mcp.barriers import Barrier, explained, log_failure, reason_of
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import HibernationError, KernelMcpError, QuotaReached, SessionLimitReached
from kernel_mcp.fleet.handles import session_named
from kernel_mcp.fleet.members import LEASE_S, MARGIN_S
from kernel_mcp.fleet.messages import Moved, call_of, caller_of, error_row
from kernel_mcp.fleet.persistence import FleetPersistence, key_of
from kernel_mcp.fleet.placement import environment_of
from kernel_mcp.fleet.session_registry import FleetSessionRegistry, OpenElsewhere
from kernel_mcp.fleet.session_table import DEFAULT, NAMED, VersionedRow
from kernel_mcp.fleet.signed import NotOurs, Overtaken
from kernel_mcp.sessions.directory import HANDLE, Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.notifications import Notice, PendingReceipt, ResponseContext
from kernel_mcp.sessions.persistence import DEFAULT_NAME
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.calls import Call, SessionCalls
from kernel_mcp.tools.results import refusal

MOST_RECEIPTS = 10_000
"""Most answers whose delivery is pending; beyond it the oldest count as not delivered."""
MOST_ENVIRONMENTS = 50
ATTEMPTS = 5
AT_ONCE = 4
"""Sessions that are given away concurrently."""
NO_CHANGE = frozenset({"execute", "wait", "interrupt", "list_sessions"})
"""Tools after whose calls no save is needed, or is triggered anyway."""

logger = logging.getLogger(__name__)

UntilOver = Callable[[str, str, float], Awaitable[bool]]
"""Function that waits until a node's incarnation is certainly over; see `Registry.until_over`."""


class NodeSessions:
    """Answers calls of fronts, or names the node that has the session."""

    def __init__(
        self,
        local: SessionCalls,
        manager: SessionManager,
        persistence: FleetPersistence,
        registry: FleetSessionRegistry,
        until_over: UntilOver,
        admits: Callable[[tuple[str, ...]], bool] = lambda _grants: True,
    ) -> None:
        """`admits` returns True if principals with these grants may use sessions of this node."""
        self._admits = admits
        self._local = local
        self._manager = manager
        self._store = persistence.store
        self._store.pending_notices = self._pending_notices
        self._registry = registry
        self._until_over = until_over
        self._acks: OrderedDict[str, PendingReceipt] = OrderedDict()
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._running: Counter[str] = Counter()
        """Number of running calls by handle; calls without a session have an empty one."""
        self._changed = anyio.Event()
        self.leaving: dict[str, anyio.Event] = {}
        """Events of sessions that are being given away, by handle; set when that is over."""
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._environments: OrderedDict[str, None] = OrderedDict()
        self.draining = False

    @property
    def environments(self) -> tuple[str, ...]:
        """Keys of the environments that were used here last; see `placement`."""
        return tuple(self._environments)

    @property
    def calls(self) -> int:
        """Number of calls in progress."""
        return sum(self._running.values())

    async def call(
        self, asked: Mapping[str, Any], progress: ProgressCallback | None = None
    ) -> dict[str, Any]:
        """Answer a call of a front.

        Returns a dict with `answer`, or with `moved`, the node that has the session: empty for any
        other node. It has `cancelled` if the call was cancelled.
        """
        number, tool = str(asked["id"]), str(asked["tool"])
        arguments: Mapping[str, Any] = asked["arguments"]
        receipt = PendingReceipt()
        caller = caller_of(asked["caller"], ResponseContext(receipt))
        reply: dict[str, Any] = {"cancelled": True}
        with anyio.CancelScope() as scope:
            self._scopes[number] = scope
            try:
                name = session_named(tool, arguments)
                with _Counted(self, ""):
                    moved = await self._here(caller, name, float(asked["patience_s"]))
                if moved is not None:
                    return {"moved": moved.node}
                with self._counted(caller, name):
                    answer = await self._answer(tool, arguments, call_of(asked, caller, progress))
                self._note(caller, tool, name, arguments, answer)
                self._expect(number, receipt)
                reply = {"answer": answer.model_dump(mode="json", by_alias=True, exclude_none=True)}
                if tool == "list_sessions":
                    quotas = self._manager.principals.shared(caller.principal)
                    reply["quota"] = quotas.sessions or 0
                if (session := self._found(caller, name)) is not None:
                    reply["session"] = session.handle
            except Exception as error:  # noqa: BLE001  # logged, and told to the caller
                if not isinstance(error, KernelMcpError):
                    log_failure(error, f"answering {tool}")
                told = refusal(explained(error, f"answering {tool}"))
                reply = {"answer": told.model_dump(mode="json", by_alias=True)}
            finally:
                del self._scopes[number]
        return reply

    async def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Read a resource for a front.

        Returns a dict with `content` and `mime`, with `error`, or with `moved`; see `call`.
        """
        caller = caller_of(asked["caller"], ResponseContext())
        name = str(asked["session"])
        try:
            if name:
                with _Counted(self, ""):
                    moved = await self._here(caller, name, float(asked["patience_s"]))
                if moved is not None:
                    return {"moved": moved.node}
            with self._counted(caller, name):
                content, mime = await self._local.read(str(asked["uri"]), caller)
        except Exception as error:  # noqa: BLE001  # logged, and told to the caller
            if not isinstance(error, KernelMcpError):
                log_failure(error, "reading a resource", name)
            return error_row(explained(error, "reading a resource"))
        return {"content": content, "mime": mime}

    def cancel(self, number: str) -> None:
        """Cancel a call, as its client has given it up."""
        if (scope := self._scopes.get(number)) is not None:
            scope.cancel()

    def delivered(self, number: str) -> None:
        """Note that the answer to a call was delivered to the client."""
        if (receipt := self._acks.get(number)) is not None:
            receipt.confirm()
            if not receipt.revocable:
                del self._acks[number]

    def revoked(self, number: str) -> None:
        """Note that the answer to a call was not delivered, or that the client had cancelled."""
        if (receipt := self._acks.pop(number, None)) is not None:
            receipt.lose()

    async def drain(self, within_s: float) -> dict[str, str]:
        """Give all sessions to other nodes, and accept none from now on.

        Running cells are awaited for `within_s` seconds. Returns reasons by handle for sessions
        that stay here.
        """
        self.draining = True
        until = anyio.current_time() + within_s
        kept: dict[str, str] = {}
        seen: set[str] = set()
        while True:
            if await self._release_all(until, seen, kept):
                continue
            if not self._running or anyio.current_time() >= until:
                break
            # Calls that arrived earlier may still create sessions, or take some over.
            with anyio.move_on_at(until):
                await self._change()
        for session in self._manager.sessions:
            kept.setdefault(session.handle, "it is one that is not kept, or a branch of one")
        return kept

    def overtaken(self, handle: str) -> None:
        """End a session here, as another node has taken it over."""
        for session in self._manager.sessions:
            if session.handle == handle:
                logger.error("session %s was taken over by another node, and ends here", handle)
                session.close()

    def _pending_notices(self, handle: str) -> Sequence[Notice]:
        """Return the pending notices of a session; empty without such a session."""
        for session in list(self._manager.sessions):
            if session.handle == handle:
                return session.notifications.pending
        return ()

    def _found(self, caller: Caller, name: str | None) -> Session | None:
        return None if name is None else self._manager.directory.find(caller, name)

    async def _here(self, caller: Caller, name: str | None, patience_s: float) -> Moved | None:
        """Bring the session of a call to this node if it is open nowhere.

        Returns None if the call can be answered here, else the node to send it to. For a session on
        a lost node, wait up to `patience_s` seconds until its lease is over. Raises KernelMcpError.
        """
        if not self._admits(caller.who.grants):
            raise KernelMcpError(
                "Sessions of this fleet see mounts, network, devices, variables or secrets that "
                "your row of the tokens file does not name in `doors`, and nodes have one set of "
                "them for all. The operator can name them there, or start nodes without."
            )
        if name is None:
            return Moved() if self.draining else None
        for _ in range(ATTEMPTS):
            session = self._manager.directory.find(caller, name)
            if session is not None and (leaving := self.leaving.get(session.handle)) is not None:
                await leaving.wait()
                session = self._manager.directory.find(caller, name)
            if session is not None and session.handle not in self.leaving:
                return None
            try:
                known = await anyio.to_thread.run_sync(self._known, caller, name)
            except NotOurs:  # a default session has no other name that one could take instead
                if name and not self._is_default(name):
                    raise
                known = None
            if known is None or known.row.principal != caller.principal:
                return await self._create_default(caller, name)
            row = known.row
            if row.node and not self._store.table.is_mine(row):
                own = row.node == self._store.table.node  # an earlier incarnation of this node
                longest_s = max(patience_s, LEASE_S + MARGIN_S) if own else patience_s
                if not await self._until_over(row.node, row.life, longest_s):
                    return Moved(row.node)
            if self.draining:
                return Moved()
            try:
                await self._take_over(caller, known)
            except Overtaken:
                continue  # another node was first
            except QuotaReached:
                raise  # no other node would accept it, either
            except SessionLimitReached:
                return Moved()
        raise KernelMcpError(
            f"Session {name!r} moves between nodes too often to be called. Call again."
        )

    async def _create_default(self, caller: Caller, name: str) -> Moved | None:
        """Create a default session that does not exist yet; return its node if it is another one.

        Returns None for another name, which the call then refuses.
        """
        if name and not self._is_default(name):
            return None
        if self.draining:
            return Moved()
        if not caller.default:
            return None  # unidentified callers get a new session with each call
        try:
            await self._manager.resolve(caller, "")
        except OpenElsewhere as error:
            return Moved(error.node)
        return None

    def _known(self, caller: Caller, name: str) -> VersionedRow | None:
        rows = self._store.table
        if self._is_default(name) or not name:
            if not caller.default:
                return None
            return rows.find_by_name(caller.principal, DEFAULT, caller.default)
        if HANDLE.fullmatch(name):
            return rows.find(name)
        return rows.find_by_name(caller.principal, NAMED, name)

    @staticmethod
    def _is_default(name: str) -> bool:
        return name == DEFAULT_NAME

    async def _take_over(self, caller: Caller, known: VersionedRow) -> None:
        """Take over a session that is not open on any node.

        Raises Overtaken, SessionLimitReached.
        """
        row = known.row
        lock = self._locks.setdefault(row.handle, anyio.Lock())
        async with lock:
            if self._manager.directory.find(caller, row.handle) is not None:
                return
            if self._store.table.is_mine(row):
                await anyio.to_thread.run_sync(self._store.forget_ended, row.handle)
                raise Overtaken("it is closed")  # a moment ago: its row is about to be removed
            await self._registry.take(known)
            owner = Caller(
                caller.principal, row.default or caller.default, caller.who, known=caller.known
            )
            try:
                await self._manager.create(
                    owner, name=row.name, default=bool(row.default), handle=row.handle
                )
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._registry.unregister(row.handle)
                raise
            logger.info("session %s has come from node %s", row.handle, row.node or "(none)")

    async def _answer(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        try:
            return await self._local.call(tool, arguments, call)
        except Exception as error:  # noqa: BLE001  # logged, and told to the caller
            log_failure(error, f"answering {tool}")
            text = str(explained(error, f"answering {tool}"))
            return CallToolResult(content=[TextContent(text=text)], is_error=True)

    def _counted(self, caller: Caller, name: str | None) -> _Counted:
        session = self._found(caller, name)
        return _Counted(self, session.handle if session is not None else "")

    def count(self, handle: str, more: int) -> None:
        """Add `more`, which may be negative, to the running calls of a session."""
        self._running[handle] += more
        if not self._running[handle]:
            del self._running[handle]
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _change(self) -> None:
        await self._changed.wait()

    def _note(
        self,
        caller: Caller,
        tool: str,
        name: str | None,
        arguments: Mapping[str, Any],
        answer: CallToolResult,
    ) -> None:
        """Schedule a save after a call that may have changed the session.

        Also remember the environment that a new session needed.
        """
        session = self._found(caller, name)
        if session is not None and tool not in NO_CHANGE:
            session.persistence.touch()
        if name is None and not answer.is_error and (key := environment_of(arguments)):
            self._environments[key] = None
            self._environments.move_to_end(key)
            if len(self._environments) > MOST_ENVIRONMENTS:
                self._environments.popitem(last=False)

    def _expect(self, number: str, receipt: PendingReceipt) -> None:
        self._acks[number] = receipt
        if len(self._acks) > MOST_RECEIPTS:
            self._acks.popitem(last=False)[1].lose()

    async def _release_all(self, until: float, seen: set[str], kept: dict[str, str]) -> bool:
        """Give away all sessions not in `seen`; add the reasons of failures to `kept`.

        Returns False if there was no such session.
        """
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def give(session: Session) -> None:
            async with limiter:
                with Barrier("giving a session away", session.handle) as barrier:
                    if reason := await self._release(session, until):
                        kept[session.handle] = reason
                if barrier.failure is not None:
                    kept[session.handle] = reason_of(barrier.failure)

        found = [
            each
            for each in self._manager.sessions
            if each.origin is None and each.persistence.entry and each.handle not in seen
        ]
        seen.update(each.handle for each in found)
        async with anyio.create_task_group() as tasks:
            for session in found:
                tasks.start_soon(give, session)
        return bool(found)

    async def _release(self, session: Session, until: float) -> str:
        """Release one session for other nodes. Return an empty text, or why that failed."""
        handle = session.handle
        leaving = self.leaving[handle] = anyio.Event()
        try:
            with anyio.move_on_at(until) as patience:
                await self._wait_idle(session)
                if await self._saved(session):
                    await self._close_branches(session)
                    await anyio.to_thread.run_sync(self._store.let_go, handle)
            if patience.cancelled_caught:
                return "its cells or calls have not ended within the time that they were given"
            session.close()
            with anyio.CancelScope(shield=True):
                await session.ended.wait()
                key = key_of(session.owner, handle)
                await anyio.to_thread.run_sync(self._store.clear, key)
            return ""
        except HibernationError as error:
            return f"it could not be saved: {error}"
        finally:
            del self.leaving[handle]
            leaving.set()

    async def _wait_idle(self, session: Session) -> None:
        """Wait until no call, cell or installation runs in a session or its branches."""
        while True:
            members = session.family.members
            if any(self._running[each.handle] for each in members):
                await self._change()
                continue
            cells = [
                cell
                for each in members
                for cell in (each.queue.current, each.queue.first)
                if cell is not None
            ]
            if cells:
                await cells[0].finished.wait()
            elif not await session.family.wait_until_free():
                for each in members:
                    async with each.installing:
                        pass
                if session.can_hibernate or session.state == "hibernated":
                    return
                await anyio.lowlevel.checkpoint()

    async def _saved(self, session: Session) -> bool:
        """Save an idle session completely; retry while it becomes busy again. Returns True."""
        if session.state == "hibernated" and session.persistence.entry is not None:
            await session.persistence.save_cells()
            return True
        while await session.persistence.save() is None:
            await self._wait_idle(session)
        return True

    async def _close_branches(self, session: Session) -> None:
        for each in [*session.family.members]:
            if each is not session:
                await self._manager.close(each, "was closed, as its node was drained")


class _Counted:
    """Context manager that counts a call on a session."""

    def __init__(self, sessions: NodeSessions, handle: str) -> None:
        self._sessions = sessions
        self._handle = handle

    def __enter__(self) -> None:
        self._sessions.count(self._handle, 1)

    def __exit__(self, *_: object) -> None:
        self._sessions.count(self._handle, -1)
