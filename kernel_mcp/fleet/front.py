"""Routing of clients' calls to the nodes of a fleet that have their sessions.

A front has no state that calls depend on: it learns the node of a session from the handle, or from
another node. So there may be any number of fronts, and any of them may fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import anyio
from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as Definition

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.cluster import FleetUnavailable
from kernel_mcp.fleet.handles import node_of, session_named
from kernel_mcp.fleet.members import LEASE_S, MARGIN_S, Member, alive
from kernel_mcp.fleet.messages import call_row, caller_row, error_of
from kernel_mcp.fleet.placement import environment_of
from kernel_mcp.fleet.remote_nodes import NodeLost, RemoteNode, RemoteNodes
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.telemetry import Readiness
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.resources import session_of
from kernel_mcp.tools.results import LOST_KEY, notice_block, refusal

logger = logging.getLogger(__name__)

MOST_PLACES = 100_000
"""Sessions whose node a front caches; others are looked up again."""
MOST_HOPS = 8
PATIENCE_S = LEASE_S + MARGIN_S + 1.0
"""Seconds that a node may wait until the lease of a lost node is certainly over."""
RETRY_S = 0.5
METRICS_S = 5.0
"""Timeout in seconds for the metrics of a node."""
OPENS = "create_session"
"""Tool whose call may be repeated after a node was lost.

No client knows the handle of a session opened there; one with a name is found by it.
"""


class FleetCalls:
    """`SessionCalls` that a fleet answers. `run` must run as a task while calls are made."""

    def __init__(
        self,
        ray: Any,
        registry: Any,
        *,
        seed: int | None = None,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`restart` is called when the head has been silent for longer than any lease."""
        self.readiness = Readiness()
        self._restart = restart
        self._nodes = RemoteNodes(ray, registry, Random(seed))
        self._node_of: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._definitions: list[Definition] = []
        self._reading: frozenset[str] = frozenset()
        """Read-only tools, whose calls may be repeated."""
        self.instructions = ""
        self.files = True

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Follow the membership of the fleet. Raises FleetUnavailable if it has no node yet."""
        await self._nodes.follow()
        await self._load_definitions()
        self.readiness.ready = True
        task_status.started()
        heard = anyio.current_time()
        while True:
            with Barrier("following the members of the fleet"):
                try:
                    await self._nodes.follow()
                    heard = anyio.current_time()
                    self._set_readiness("" if self._nodes.available else "no node answers")
                    continue
                except FleetUnavailable:
                    self._set_readiness("the head of the fleet does not answer")
            if anyio.current_time() - heard > PATIENCE_S:
                self._nodes.lose_all()
                self._restart()
            await anyio.sleep(RETRY_S)

    def _set_readiness(self, reason: str) -> None:
        if reason != self.readiness.reason and reason:
            logger.error("this front is not ready: %s", reason)
        self.readiness.ready, self.readiness.reason = not reason, reason

    async def definitions(self) -> Sequence[Definition]:
        """See `SessionCalls`."""
        return self._definitions

    @property
    def members(self) -> Sequence[Member]:
        """All nodes as the head knew them last."""
        return self._nodes.members

    async def metrics(self) -> dict[str, str]:
        """Return the metrics of the nodes that answer, by name, in the format of Prometheus."""
        found: dict[str, str] = {}

        async def ask(peer: RemoteNode) -> None:
            with anyio.move_on_after(METRICS_S), Barrier("asking a node for its metrics"):
                found[peer.member.name] = await self._nodes.reply(peer, peer.actor.metrics.remote())

        async with anyio.create_task_group() as tasks:
            for peer in self._nodes.available:
                tasks.start_soon(ask, peer)
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """See `SessionCalls`."""
        if tool == "list_sessions" and not arguments:
            return await self._list(call)
        asked: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "tool": tool,
            "arguments": dict(arguments),
            "caller": caller_row(call.caller),
            **call_row(call),
        }
        name = session_named(tool, arguments)
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
        self._report_delivery(peer, asked["id"], call.caller)
        if (handle := reply.get("session")) is not None:
            self._remember_node(call.caller, handle, peer.member.name)
            if name is not None and name != handle:
                self._remember_node(call.caller, self._name_of(call.caller, name), peer.member.name)
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

    # Routing of calls.

    async def _routed(
        self,
        caller: Caller,
        name: str | None,
        asked: dict[str, Any],
        call: Call | None,
        *,
        environment: str = "",
        again: bool = False,
    ) -> tuple[RemoteNode, dict[str, Any]]:
        """Send a request to the session's node, and after it if it moves; return node and reply.

        With `again` it is repeated on another node if a node is lost. Raises NodeLost,
        FleetUnavailable.
        """
        refused: list[str] = []
        node = "" if name is None else self._node_for(caller, name)
        asked["patience_s"] = 0.0
        for _ in range(MOST_HOPS):
            peer = self._nodes.find(node)
            if peer is None or peer.lost.is_set():
                if node and self._nodes.knows(node):
                    asked["patience_s"] = PATIENCE_S  # until others may take its sessions
                peer = await self._nodes.choose(environment, refused)
            try:
                reply = await self._nodes.ask(peer, asked, call)
            except NodeLost:
                if not again and not await self._nodes.has_left(peer):
                    raise
                asked["patience_s"] = PATIENCE_S
                node = ""
                refused.append(peer.member.name)
                continue
            if "moved" not in reply:
                return peer, reply
            node = str(reply["moved"])
            found = self._nodes.find(node)
            if found is not None and found.lost.is_set() and asked["patience_s"]:
                await self._nodes.add_member(
                    found.member
                )  # its lease is valid: it was only unreachable
            if not node:
                refused.append(peer.member.name)
        raise FleetUnavailable(
            "The session could not be found on any node: it moves, or its node is being given up. "
            "Call again in some seconds."
        )

    def _node_for(self, caller: Caller, name: str) -> str:
        key = (caller.principal, self._name_of(caller, name))
        return self._node_of.get(key) or node_of(name)

    @staticmethod
    def _name_of(caller: Caller, name: str) -> str:
        return name or f"default session {caller.default}"

    def _remember_node(self, caller: Caller, name: str, node: str) -> None:
        self._node_of[caller.principal, name] = node
        self._node_of.move_to_end((caller.principal, name))
        if len(self._node_of) > MOST_PLACES:
            self._node_of.popitem(last=False)

    def _report_delivery(self, node: RemoteNode, number: str, caller: Caller) -> None:
        """Report to the node, later, if its answer was delivered to the client."""
        tell = self._nodes.notify
        caller.response.receipt.then(
            lambda: tell(node, "delivered", number), lambda: tell(node, "revoked", number)
        )

    async def _list(self, call: Call) -> CallToolResult:
        """Return the caller's sessions on all nodes."""
        answers: list[CallToolResult] = []
        quotas: list[int] = []

        async def ask(peer: RemoteNode) -> None:
            asked = {
                "id": secrets.token_hex(8),
                "tool": "list_sessions",
                "arguments": {},
                "caller": caller_row(call.caller),
                "request": call.request_id,
                "patience_s": 0.0,
            }
            with contextlib.suppress(NodeLost):
                reply = await self._nodes.ask(peer, asked, Call(call.caller, None, call.request_id))
                self._report_delivery(peer, str(asked["id"]), call.caller)
                if "answer" in reply:
                    answers.append(CallToolResult.model_validate(reply["answer"]))
                    quotas.append(int(reply.get("quota", 0)))

        async with anyio.create_task_group() as tasks:
            for peer in self._nodes.available:
                tasks.start_soon(ask, peer)
        lost = [each.name for each in self._nodes.members if each.lost]
        return _merged_lists(answers, max(quotas, default=0), lost)

    async def _load_definitions(self) -> None:
        """Get tool definitions and instructions from one of the nodes. Raises FleetUnavailable."""
        for member in alive(self._nodes.members):
            if (peer := self._nodes.find(member.name)) is None:
                continue
            with contextlib.suppress(NodeLost):
                about = await self._nodes.reply(peer, peer.actor.about.remote())
                self._definitions = [Definition.model_validate(each) for each in about["tools"]]
                self._reading = frozenset(
                    each.name
                    for each in self._definitions
                    if each.annotations is not None and each.annotations.read_only_hint
                )
                self.instructions, self.files = str(about["words"]), bool(about["files"])
                return
        raise FleetUnavailable(
            "the fleet has no node that answers: start one on each of its machines with "
            "kernel-mcp node --fleet ADDRESS --fleet-store PLACE"
        )


def _lost(text: str, name: str) -> CallToolResult:
    """Return the error result of a call whose node was lost."""
    cause = "the node of the session was lost"
    meta = {"session": name, "lost": [], "lost_omitted": 0, "state_kept": False, "cause": cause}
    return CallToolResult(content=[notice_block(text)], is_error=True, _meta={LOST_KEY: meta})


def _merged_lists(
    answers: Sequence[CallToolResult], quota: int, lost: Sequence[str]
) -> CallToolResult:
    """Merge the session lists of all nodes, oldest first.

    `quota` is the limit over all nodes, 0 for none; `lost` are names of lost nodes.
    """
    found = [each.structured_content or {} for each in answers]
    sessions = [session for each in found for session in each.get("sessions", [])]
    sessions.sort(key=lambda each: -float(each["age_s"]))
    notices = [notice for each in found for notice in each.get("notices", [])]
    if lost:
        text = (
            f"Sessions of {', '.join(lost)}, which the fleet has lost, are listed again once they "
            "have been used: pass their handles as `session`"
        )
        notices.append(notice_block(text).text)
    limit = sum(int(each.get("limit", 0)) for each in found)
    limit = min(limit, quota) if quota else limit
    structured = {"notices": notices, "sessions": sessions, "limit": limit}
    shown = {name: value for name, value in structured.items() if name != "notices"}
    content = [TextContent(text=json.dumps(shown, indent=2))]
    return CallToolResult(
        content=[*content, *(TextContent(text=text) for text in notices)],
        structured_content=structured,
    )
