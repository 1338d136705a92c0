"""As much of Ray as a front uses: actors whose methods run here, and can be lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from mcp_types import Tool as Definition

from kernel_mcp.fleet.members import Load, Member, Members
from kernel_mcp.fleet.node import actor_name
from tests.unit.fake_kernels import FakeClock


class RayError(Exception):
    """See Ray."""


class RayActorError(RayError):
    """See Ray."""


class ObjectLostError(RayError):
    """See Ray."""


class Method:
    """A method of an actor, called as those of Ray are."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def options(self, **_: object) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._work(*arguments)


async def value(found: Any) -> Any:
    return found


class Actor:
    """Has the coroutine methods of an object as methods of an actor."""

    def __init__(self, behind: object) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._behind, name))


@dataclass
class FakeNode:
    """Answers by what it was told to; `lost` has calls end as those of a lost node do."""

    name: str
    replies: list[Mapping[str, Any]] = field(default_factory=list)
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)
    progress: tuple[str, ...] = ()
    lost: bool = False
    silent: bool = False

    async def about(self) -> dict[str, Any]:
        tools = [
            Definition(name="execute", input_schema={}),
            Definition(
                name="wait", input_schema={}, annotations=ToolAnnotations(read_only_hint=True)
            ),
        ]
        return {
            "version": "1",
            "tools": [each.model_dump(mode="json", by_alias=True) for each in tools],
            "words": "the words",
            "files": True,
        }

    async def call(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(dict(asked))
        if self.lost:
            raise RayActorError("the actor died")
        if self.silent:
            await anyio.sleep_forever()
        if self.replies:
            return self.replies.pop(0)
        return answered(f"from {self.name}")

    async def follow(self, asked: Mapping[str, Any]) -> AsyncIterator[Awaitable[Any]]:
        for each in self.progress:
            yield value({"progress": each})
        yield self.call(asked)

    read = call

    def cancel(self, number: str) -> None:
        self.said.append(("cancel", number))

    def delivered(self, number: str) -> None:
        self.said.append(("delivered", number))

    def revoked(self, number: str) -> None:
        self.said.append(("revoked", number))


def answered(text: str, **more: Any) -> dict[str, Any]:
    """The reply of a node that has answered."""
    answer = CallToolResult(content=[TextContent(text=text)])
    return {"answer": answer.model_dump(mode="json", by_alias=True), **more}


class FakeRegistry:
    """The list of members, and who waits for a change of it."""

    def __init__(self, *names: str) -> None:
        self.members = Members(FakeClock())
        self._changed = anyio.Event()
        for name in names:
            self.members.join(Member(name, f"life of {name}", load=Load(2**34, 0, 0, 16)))

    def lose(self, name: str) -> None:
        self.members.end(name, f"life of {name}")
        self._changed.set()

    async def rows(self) -> list[dict[str, Any]]:
        return self.members.rows()

    async def changes(self, seen: int) -> tuple[int, list[dict[str, Any]]]:
        while seen == self.members.version:
            await self._changed.wait()
            self._changed = anyio.Event()
        return self.members.version, self.members.rows()


class FakeRay:
    """A cluster with these nodes."""

    exceptions = type(
        "exceptions",
        (),
        {
            "RayError": RayError,
            "RayActorError": RayActorError,
            "ObjectLostError": ObjectLostError,
        },
    )

    def __init__(self, *names: str) -> None:
        self.nodes = {name: FakeNode(name) for name in names}

    def get_actor(self, name: str, _namespace: str) -> Actor:
        for each in self.nodes.values():
            if actor_name(each.name) == name:
                return Actor(each)
        raise ValueError(name)
