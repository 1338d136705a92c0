"""The nodes of a fleet as a front sees them: membership, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.cluster import HEAD_S, NAMESPACE, FleetUnavailable, awaited
from kernel_mcp.fleet.members import Member
from kernel_mcp.fleet.node import actor_name
from kernel_mcp.fleet.placement import choose
from kernel_mcp.fleet.registry import LONGEST_WAIT_S
from kernel_mcp.tools.calls import Call

logger = logging.getLogger(__name__)

FOLLOW_S = LONGEST_WAIT_S + 3.0
"""Timeout in seconds for the registry, which answers at the latest after its longest poll."""


class NodeLost(KernelMcpError):
    """A node was lost before it had answered a call."""


class RemoteNode:
    """A node as a front knows it; `lost` is set once it will not answer any more."""

    def __init__(self, member: Member, actor: Any) -> None:
        self.member = member
        self.actor = actor
        self.lost = anyio.Event()


class RemoteNodes:
    """All nodes of a fleet. `follow` has to be called repeatedly."""

    def __init__(self, ray: Any, registry: Any, draw: Random) -> None:
        """`draw` is the source of randomness for placing new sessions."""
        self._ray = ray
        self._registry = registry
        self._draw = draw
        self._known: dict[str, RemoteNode] = {}
        self._version = -1
        self._sent: Counter[str] = Counter()
        """Sessions recently sent to each node, which its reported load may not include."""
        self.members: list[Member] = []

    def find(self, name: str) -> RemoteNode | None:
        """Return a node by its name, or None if there is none now."""
        return self._known.get(name)

    @property
    def available(self) -> list[RemoteNode]:
        """Nodes that are not lost."""
        return [each for each in self._known.values() if not each.lost.is_set()]

    def knows(self, name: str) -> bool:
        """Return True if there is or was a node of this name."""
        return name in self._known or any(each.name == name for each in self.members)

    async def follow(self) -> None:
        """Wait for the next change of the membership, and apply it. Raises FleetUnavailable."""
        try:
            asked = awaited(self._registry.changes.remote(self._version))
            version, rows = await asyncio.wait_for(asked, FOLLOW_S)
        except (asyncio.TimeoutError, self._ray.exceptions.RayError) as error:
            raise FleetUnavailable(f"The head of the fleet does not answer: {error!r}") from error
        self._version = version
        self.members = [Member.of(row) for row in rows]
        for member in self.members:
            peer = self._known.get(member.name)
            if peer is not None and (member.lost or peer.member.life != member.life):
                peer.lost.set()
                del self._known[member.name]
                peer = None
            if peer is None and not member.lost:
                with Barrier(f"finding node {member.name}"):
                    await self.add_member(member)

    def lose_all(self) -> None:
        """Give up all nodes, as no lease can last any more; `follow` finds those that are there."""
        for peer in self._known.values():
            peer.lost.set()
        self._known.clear()
        self._version = -1

    async def add_member(self, member: Member) -> RemoteNode:
        """Look up a member's actor by its name and add the node. Raises FleetUnavailable."""
        find = self._ray.get_actor
        try:
            actor = await anyio.to_thread.run_sync(find, actor_name(member.name), NAMESPACE)
        except ValueError:
            raise FleetUnavailable(
                f"Node {member.name} has just ended. Call again in some seconds."
            ) from None
        peer = self._known[member.name] = RemoteNode(member, actor)
        return peer

    async def choose(self, environment: str, but: Sequence[str]) -> RemoteNode:
        """Return a node for a new session. Raises FleetUnavailable if none accepts one.

        `environment` is the key of the environment that it needs; `but` names excluded nodes.
        """
        members = await self._fetch_members()
        lost = {each.member.life for each in self._known.values() if each.lost.is_set()}
        members = [replace(each, lost=each.lost or each.life in lost) for each in members]
        found = choose(members, environment, self._draw, but=but, ahead=self._sent)
        if found is None:
            raise FleetUnavailable(
                "No node of the fleet takes sessions now: "
                + (_states(members) or "there is none")
                + ". Call again when one has been started, or when sessions have been closed."
            )
        self._sent[found.name] += 1
        if sum(self._sent.values()) > 10 * len(members):
            self._sent.clear()
        peer = self._known.get(found.name)
        if peer is None or peer.member.life != found.life:
            peer = await self.add_member(found)
        return peer

    async def _fetch_members(self) -> list[Member]:
        """Return the current members, from the registry. Raises FleetUnavailable."""
        try:
            asked = awaited(self._registry.rows.remote())
            return [Member.of(row) for row in await asyncio.wait_for(asked, HEAD_S)]
        except (asyncio.TimeoutError, self._ray.exceptions.RayError) as error:
            raise FleetUnavailable(
                "The head of the fleet does not answer, which knows the nodes. Sessions on nodes "
                "that are there can be called by their handles."
            ) from error

    async def has_left(self, node: RemoteNode) -> bool:
        """Return True if a lost node is known to have left in order, without beginning the call."""
        try:
            members = await self._fetch_members()
        except FleetUnavailable:
            return False
        return any(each.life == node.member.life and each.left for each in members)

    async def ask(
        self, node: RemoteNode, asked: dict[str, Any], call: Call | None
    ) -> dict[str, Any]:
        """Send a request and return the reply; without `call` it reads a resource.

        Raises NodeLost when no reply can come any more, and FleetUnavailable.
        """
        reply: dict[str, Any]
        if call is None:
            reply = await self.reply(node, node.actor.read.remote(asked))
            return reply
        try:
            if call.progress is None:
                reply = await self.reply(node, node.actor.call.remote(asked))
                return reply
            follow = node.actor.follow.options(num_returns="streaming")
            stream = follow.remote(asked)
            while True:
                reply = await self.reply(node, await self.reply(node, anext(stream)))
                if "progress" not in reply:
                    return reply
                await call.progress(str(reply["progress"]))
        except asyncio.CancelledError:
            with contextlib.suppress(self._ray.exceptions.RayError):
                node.actor.cancel.remote(asked["id"])
            raise

    async def reply(self, node: RemoteNode, reference: Any) -> Any:
        """Await a reference of a node. Raises NodeLost if it is lost first, FleetUnavailable."""
        lost = asyncio.ensure_future(node.lost.wait())
        reply = asyncio.ensure_future(awaited(reference))
        try:
            await asyncio.wait({lost, reply}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise self._node_lost(node)
            return reply.result()
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            logger.warning("node %s is lost: %s", node.member.name, _first_line(error))
            node.lost.set()
            raise self._node_lost(node) from error
        except self._ray.exceptions.RayError as error:
            if isinstance(error, KernelMcpError):  # raised by the node
                raise
            logger.exception("a call of node %s has failed", node.member.name)
            raise FleetUnavailable(
                f"Node {node.member.name} could not answer: {_first_line(error)}. What the call "
                "asked for may have been done in part, and is not done again by itself."
            ) from error
        finally:
            for task in (lost, reply):
                task.cancel()

    @staticmethod
    def _node_lost(node: RemoteNode) -> NodeLost:
        return NodeLost(
            f"Node {node.member.name} was lost while it answered this call. What the call asked "
            "for may have been done in part, and is not done again by itself. The session goes on "
            "on another node with the next call on it, as it was last saved: its answer says what "
            "is lost."
        )

    def notify(self, node: RemoteNode, what: str, number: str) -> None:
        """Call the method `what` of a node with the id of a call, without waiting for the result.

        Nothing happens if the node is lost.
        """
        with contextlib.suppress(self._ray.exceptions.RayError):
            getattr(node.actor, what).remote(number)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _states(members: Sequence[Member]) -> str:
    """Return a text that says for each node why it accepts no sessions."""
    return ", ".join(
        f"{each.name} is {'lost' if each.lost else 'being drained' if each.draining else 'full'}"
        for each in members
    )
