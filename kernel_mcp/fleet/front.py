"""Calls of clients, answered by whichever node of the fleet has their sessions.

A front has no state that a call depends on: where a session is it learns from the handle, or from
a node that knows better. So there may be any number of fronts, and none is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import anyio
from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as Definition

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.cluster import NAMESPACE, FleetUnavailable
from kernel_mcp.fleet.handles import named, node_of
from kernel_mcp.fleet.members import LEASE_S, MARGIN_S, Member, alive
from kernel_mcp.fleet.node import actor_name
from kernel_mcp.fleet.placement import choose, environment_of
from kernel_mcp.fleet.wire import caller_row, error_of
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.resources import session_of
from kernel_mcp.tools.results import LOST_KEY, refusal, said

logger = logging.getLogger(__name__)

MOST_PLACES = 100_000
"""Sessions whose node a front remembers; others are asked for again."""
MOST_HOPS = 8
PATIENCE_S = LEASE_S + MARGIN_S + 1.0
"""How long a node is given to find that another is over for certain."""
RETRY_S = 0.5
HEAD_S = 10.0
"""How long the head of the fleet may take to answer."""
OPENS = "create_session"
"""May be called again: of a session that was opened on a lost node nobody has heard, but for its
name, by which it is found."""


class NodeLost(KernelMcpError):
    """A node was lost while it answered a call."""


class Peer:
    """A node as a front knows it: `lost` is set once nothing may be expected of it any more."""

    def __init__(self, member: Member, actor: Any) -> None:
        self.member = member
        self.actor = actor
        self.lost = anyio.Event()


class FleetCalls:
    """See `SessionCalls`. `run` has to run meanwhile."""

    def __init__(self, ray: Any, registry: Any, *, seed: int | None = None) -> None:
        self._ray = ray
        self._registry = registry
        self._draw = Random(seed)
        self._peers: dict[str, Peer] = {}
        self._members: list[Member] = []
        self._version = -1
        self._changed = anyio.Event()
        self._where: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._sent: Counter[str] = Counter()
        """Sessions that were sent to nodes since those have last spoken of their load."""
        self._definitions: list[Definition] = []
        self._reading: frozenset[str] = frozenset()
        """Tools that change nothing: their calls may be made again."""
        self.words = ""
        self.files = True

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Follow who is in the fleet. Raises FleetUnavailable where there is no node at first."""
        await self._follow()
        await self._learn()
        task_status.started()
        while True:
            with Barrier("following the members of the fleet") as barrier:
                await self._follow()
            if barrier.failure is not None:
                await anyio.sleep(RETRY_S)

    async def definitions(self) -> Sequence[Definition]:
        """See `SessionCalls`."""
        return self._definitions

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """See `SessionCalls`."""
        if tool == "list_sessions" and not arguments:
            return await self._list(call)
        asked: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "tool": tool,
            "arguments": dict(arguments),
            "caller": caller_row(call.caller),
            "request": call.request_id,
            "of_view": call.of_view,
        }
        name = named(tool, arguments)
        environment = environment_of(arguments) if name is None else ""
        again = tool in self._reading or tool == OPENS
        try:
            peer, reply = await self._routed(
                call.caller, name, asked, call, environment=environment, again=again
            )
        except NodeLost as error:
            return _lost(str(error), name or "")
        except KernelMcpError as error:
            return refusal(error)
        if "answer" not in reply:
            return refusal(
                FleetUnavailable(
                    f"Node {peer.member.name} gave this call up before its end. What it asked for "
                    "may have been done in part, and is not done again by itself."
                )
            )
        self._expect(peer, asked["id"], call.caller)
        if (handle := reply.get("session")) is not None:
            self._learn_place(call.caller, handle, peer.member.name)
            if name is not None and name != handle:
                self._learn_place(call.caller, self._name_of(call.caller, name), peer.member.name)
        return CallToolResult.model_validate(reply["answer"])

    async def read(self, uri: str, caller: Caller) -> tuple[str | bytes, str]:
        """See `SessionCalls`."""
        name = session_of(uri)
        asked = {"uri": uri, "session": name, "caller": caller_row(caller)}
        _, reply = await self._routed(caller, name or None, asked, None, again=True)
        if "error" in reply:
            raise error_of(reply)
        content: str | bytes = reply["content"]
        return content, str(reply["mime"])

    # Where a call goes.

    async def _routed(
        self,
        caller: Caller,
        name: str | None,
        asked: dict[str, Any],
        call: Call | None,
        *,
        environment: str = "",
        again: bool = False,
    ) -> tuple[Peer, dict[str, Any]]:
        """Ask the node that has the session, wherever it has moved; `again` after it was lost."""
        refused: list[str] = []
        node = "" if name is None else self._place_of(caller, name)
        asked["patience_s"] = 0.0
        for _ in range(MOST_HOPS):
            peer = self._peers.get(node)
            if peer is None or peer.lost.is_set():
                if node and node in self._known_names():
                    asked["patience_s"] = PATIENCE_S  # until others may go on with its sessions
                peer = await self._chosen(environment, refused)
            try:
                reply = await self._ask(peer, asked, call)
            except NodeLost:
                if not again and not await self._has_left(peer):
                    raise
                asked["patience_s"] = PATIENCE_S
                node = ""
                refused.append(peer.member.name)
                continue
            if "moved" not in reply:
                return peer, reply
            node = str(reply["moved"])
            found = self._peers.get(node)
            if found is not None and found.lost.is_set() and asked["patience_s"]:
                await self._met(found.member)  # its lease goes on: it only could not be reached
            if not node:
                refused.append(peer.member.name)
        raise FleetUnavailable(
            "The session could not be found on any node: it moves, or its node is being given up. "
            "Call again in some seconds."
        )

    async def _chosen(self, environment: str, but: Sequence[str]) -> Peer:
        """The node on which something new begins. Raises FleetUnavailable."""
        members = await self._asked_for_members()
        lost = {each.member.life for each in self._peers.values() if each.lost.is_set()}
        there = [each for each in members if each.life not in lost]
        found = choose(there, environment, self._draw, but=but, ahead=self._sent)
        if found is None:
            raise FleetUnavailable(
                "No node of the fleet takes sessions now: "
                + (_states(members) or "there is none")
                + ". Call again when one has been started, or when sessions have been closed."
            )
        self._sent[found.name] += 1
        if sum(self._sent.values()) > 10 * len(members):
            self._sent.clear()
        peer = self._peers.get(found.name)
        if peer is None or peer.member.life != found.life:
            peer = await self._met(found)
        return peer

    async def _asked_for_members(self) -> list[Member]:
        """The members as they are now. Raises FleetUnavailable."""
        try:
            asked = _awaited(self._registry.rows.remote())
            return [Member.of(row) for row in await asyncio.wait_for(asked, HEAD_S)]
        except (asyncio.TimeoutError, self._ray.exceptions.RayError) as error:
            raise FleetUnavailable(
                "The head of the fleet does not answer, which knows the nodes. Sessions on nodes "
                "that are there can be called by their handles."
            ) from error

    async def _has_left(self, peer: Peer) -> bool:
        """Whether a node that is lost had ended in order: it has begun nothing of a call then."""
        members = await self._asked_for_members()
        return any(each.life == peer.member.life and each.left for each in members)

    def _known_names(self) -> set[str]:
        return {each.name for each in self._members} | set(self._peers)

    def _place_of(self, caller: Caller, name: str) -> str:
        key = (caller.principal, self._name_of(caller, name))
        return self._where.get(key) or node_of(name)

    @staticmethod
    def _name_of(caller: Caller, name: str) -> str:
        return name or f"default session {caller.default}"

    def _learn_place(self, caller: Caller, name: str, node: str) -> None:
        self._where[caller.principal, name] = node
        self._where.move_to_end((caller.principal, name))
        if len(self._where) > MOST_PLACES:
            self._where.popitem(last=False)

    # What a node is asked.

    async def _ask(self, peer: Peer, asked: dict[str, Any], call: Call | None) -> dict[str, Any]:
        """A node's reply. Raises NodeLost once it cannot come any more."""
        reply: dict[str, Any]
        if call is None:
            reply = await self._reply(peer, peer.actor.read.remote(asked))
            return reply
        try:
            if call.progress is None:
                reply = await self._reply(peer, peer.actor.call.remote(asked))
                return reply
            follow = peer.actor.follow.options(num_returns="streaming")
            stream = follow.remote(asked)
            while True:
                reply = await self._reply(peer, await self._reply(peer, anext(stream)))
                if "progress" not in reply:
                    return reply
                await call.progress(str(reply["progress"]))
        except asyncio.CancelledError:
            with contextlib.suppress(self._ray.exceptions.RayError):
                peer.actor.cancel.remote(asked["id"])
            raise

    async def _reply(self, peer: Peer, awaited: Any) -> Any:
        """What is awaited of a node, unless that is lost first."""
        lost = asyncio.ensure_future(peer.lost.wait())
        reply = asyncio.ensure_future(_awaited(awaited))
        try:
            await asyncio.wait({lost, reply}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise self._gone(peer)
            return reply.result()
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            logger.warning("node %s is lost: %s", peer.member.name, _first_line(error))
            peer.lost.set()
            raise self._gone(peer) from error
        except self._ray.exceptions.RayError as error:
            if isinstance(error, KernelMcpError):  # one of the node's own
                raise
            logger.exception("a call of node %s has failed", peer.member.name)
            raise FleetUnavailable(
                f"Node {peer.member.name} could not answer: {_first_line(error)}. What the call "
                "asked for may have been done in part, and is not done again by itself."
            ) from error
        finally:
            for task in (lost, reply):
                task.cancel()

    @staticmethod
    def _gone(peer: Peer) -> NodeLost:
        return NodeLost(
            f"Node {peer.member.name} was lost while it answered this call. What the call asked "
            "for may have been done in part, and is not done again by itself. The session goes on "
            "on another node with the next call on it, as it was last saved: its answer says what "
            "is lost."
        )

    def _expect(self, peer: Peer, number: str, caller: Caller) -> None:
        """Have the node know whether its answer was delivered."""

        def tell(what: str) -> None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                getattr(peer.actor, what).remote(number)

        caller.reply.receipt.then(lambda: tell("delivered"), lambda: tell("revoked"))

    async def _list(self, call: Call) -> CallToolResult:
        """The sessions that a caller has on all nodes."""
        answers: list[CallToolResult] = []
        quotas: list[int] = []

        async def ask(peer: Peer) -> None:
            asked = {
                "id": secrets.token_hex(8),
                "tool": "list_sessions",
                "arguments": {},
                "caller": caller_row(call.caller),
                "request": call.request_id,
                "patience_s": 0.0,
            }
            with contextlib.suppress(NodeLost):
                reply = await self._ask(peer, asked, Call(call.caller, None, call.request_id))
                self._expect(peer, str(asked["id"]), call.caller)
                if "answer" in reply:
                    answers.append(CallToolResult.model_validate(reply["answer"]))
                    quotas.append(int(reply.get("quota", 0)))

        async with anyio.create_task_group() as tasks:
            for peer in list(self._peers.values()):
                if not peer.lost.is_set():
                    tasks.start_soon(ask, peer)
        lost = [each.name for each in self._members if each.lost]
        return _together(answers, max(quotas, default=0), lost)

    # Who is in the fleet.

    async def _follow(self) -> None:
        """Take in the next change of who is in the fleet."""
        version, rows = await self._registry.changes.remote(self._version)
        self._version = version
        self._members = [Member.of(row) for row in rows]
        for member in self._members:
            peer = self._peers.get(member.name)
            if peer is not None and (member.lost or peer.member.life != member.life):
                peer.lost.set()
                del self._peers[member.name]
                peer = None
            if peer is None and not member.lost:
                with Barrier(f"finding node {member.name}"):
                    await self._met(member)

    async def _met(self, member: Member) -> Peer:
        """A node, found by its name in the cluster. Raises FleetUnavailable."""
        find = self._ray.get_actor
        try:
            actor = await anyio.to_thread.run_sync(find, actor_name(member.name), NAMESPACE)
        except ValueError:
            raise FleetUnavailable(
                f"Node {member.name} has just ended. Call again in some seconds."
            ) from None
        peer = self._peers[member.name] = Peer(member, actor)
        return peer

    async def _learn(self) -> None:
        """What clients are told, as one of the nodes tells it. Raises FleetUnavailable."""
        for member in alive(self._members):
            if (peer := self._peers.get(member.name)) is None:
                continue
            with contextlib.suppress(NodeLost):
                about = await self._reply(peer, peer.actor.about.remote())
                self._definitions = [Definition.model_validate(each) for each in about["tools"]]
                self._reading = frozenset(
                    each.name
                    for each in self._definitions
                    if each.annotations is not None and each.annotations.read_only_hint
                )
                self.words, self.files = str(about["words"]), bool(about["files"])
                return
        raise FleetUnavailable(
            "the fleet has no node that answers: start one on each of its machines with "
            "kernel-mcp node --fleet ADDRESS --fleet-store PLACE"
        )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _states(members: Sequence[Member]) -> str:
    """What each node does instead of taking sessions, in words."""
    return ", ".join(
        f"{each.name} is {'lost' if each.lost else 'being drained' if each.draining else 'full'}"
        for each in members
    )


def _lost(text: str, name: str) -> CallToolResult:
    """The answer to a call whose node was lost."""
    cause = "the node of the session was lost"
    meta = {"session": name, "lost": [], "lost_omitted": 0, "state_kept": False, "cause": cause}
    return CallToolResult(content=[said(text)], is_error=True, _meta={LOST_KEY: meta})


def _together(answers: Sequence[CallToolResult], quota: int, lost: Sequence[str]) -> CallToolResult:
    """One list of sessions of those of all nodes, oldest first; `quota` of all, 0 for none."""
    found = [each.structured_content or {} for each in answers]
    sessions = [session for each in found for session in each.get("sessions", [])]
    sessions.sort(key=lambda each: -float(each["age_s"]))
    notices = [notice for each in found for notice in each.get("notices", [])]
    if lost:
        text = (
            f"Sessions of {', '.join(lost)}, which the fleet has lost, are listed again once they "
            "have been used: pass their handles as `session`"
        )
        notices.append(said(text).text)
    limit = sum(int(each.get("limit", 0)) for each in found)
    limit = min(limit, quota) if quota else limit
    structured = {"notices": notices, "sessions": sessions, "limit": limit}
    shown = {name: value for name, value in structured.items() if name != "notices"}
    content = [TextContent(text=json.dumps(shown, indent=2))]
    return CallToolResult(
        content=[*content, *(TextContent(text=text) for text in notices)],
        structured_content=structured,
    )
