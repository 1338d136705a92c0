"""The calls of tools of a session, with a gateway that notes what it is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.launch.tool_gateway import ToolGateway
from kernel_mcp.sessions.tool_calls import MOST_SERVERS, CallingSession, SessionTools


class Gateway:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.servers = (ToolServer("crm", "crm-mcp"), ToolServer("git", url="https://git.test/mcp"))
        self.told: list[tuple[Any, ...]] = []

    def connect(self, path: str, principal: str, servers: Any, always: Any, caller: Any) -> int:
        self.told.append(("connect", path, principal, servers, always))
        return 7

    def connect_again(self, number: int) -> None:
        self.told.append(("again", number))

    def begin_cell(self, number: int) -> None:
        self.told.append(("cell", number))

    def cut(self, number: int) -> None:
        self.told.append(("cut", number))

    def decide(self, call: int, answer: str, why: str = "") -> None:
        self.told.append(("decide", call, answer, why))

    def disconnect(self, number: int) -> None:
        self.told.append(("gone", number))


class Kernel:
    """A kernel whose socket is at `path`."""

    exit = None

    def __init__(self, path: str = "/t/k") -> None:
        self.handle = self
        self.sockets = SimpleNamespace(connection=SimpleNamespace(tools=path))
        self.closes: list[Callable[[], Awaitable[None]]] = []

    def on_close(self, work: Callable[[], Awaitable[None]]) -> None:
        self.closes.append(work)


def tools_of(wanted: tuple[str, ...] | None = None) -> tuple[SessionTools, Gateway, list[Any]]:
    gateway, events = Gateway(), list[Any]()
    session = SimpleNamespace(
        events=SimpleNamespace(note=lambda event, **facts: events.append((event, facts))),
        queue=SimpleNamespace(current=None),
        request=SimpleNamespace(tools=wanted),
        needed=nullcontext,
    )
    made = SessionTools(cast(CallingSession, session), cast(ToolGateway, gateway), "alice")
    return made, gateway, events


def test_a_kernel_that_floods_the_server_is_connected_once() -> None:
    tools, gateway, _ = tools_of(("git",))
    kernel: Any = Kernel()
    for _ in range(1000):
        tools.connect(kernel)
    assert gateway.told == [("connect", "/t/k", "alice", ["git"], [])]
    tools.begin_cell(kernel)
    tools.interrupt(kernel)
    assert gateway.told[1:] == [("cell", 7), ("cut", 7)]
    assert tools.about == "reaches: git"


def test_a_kernel_without_a_socket_and_one_that_never_asked_are_left_alone() -> None:
    tools, gateway, _ = tools_of()
    kernel: Any = Kernel("")
    tools.connect(kernel)
    tools.begin_cell(kernel)
    tools.interrupt(kernel)
    assert gateway.told == []


def test_nobody_is_asked_without_a_cell() -> None:
    tools, gateway, events = tools_of()
    tools.asks(1, "crm.rename", "abc", "{}")
    [(_, call, answer, why)] = gateway.told
    assert (call, answer) == (1, "no")
    assert "no cell is running" in why
    assert "--allow-tool crm.rename" in why
    tools.ends(1, {"end": "refused", "seconds": 0.0, "bytes": 0})
    tools.ends(2, {"end": "ok", "seconds": 0.0, "bytes": 0})  # of no call
    facts = {"end": "refused", "seconds": 0.0, "bytes": 0}
    assert events == [("tool", {"tool": "crm.rename", "arguments": "abc", "cell": 0, **facts})]
    assert tools.words() == []


def test_calls_are_counted_by_server_once() -> None:
    tools, _, events = tools_of()
    for number in range(MOST_SERVERS + 2):
        tools.begins(number, f"s{number}.x", "abc")
    tools.begins(99, "s3.y", "abc")
    [words] = tools.words()
    assert words.startswith("The code called tools: s3 2 times, ")
    assert words.endswith(", 2 more")
    assert tools.words() == []
    tools.lost()
    assert {facts["end"] for _, facts in events} == {"unavailable"}
    assert len(events) == MOST_SERVERS + 3
