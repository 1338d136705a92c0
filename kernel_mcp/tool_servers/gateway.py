"""`gateway FD`: the process that calls tools of MCP servers for sessions.

It is started by `bare_program("kernel_mcp.tool_servers.gateway", FD, packages=True)`, and is the
client of all servers of `--tool-servers`. FD is a SOCK_SEQPACKET socket to the server; the process
exits when it is closed. Messages of the server:

    {"servers": [ToolServer.to_json(), …], "allow": [pattern, …], "environ": {…}}    once, first
    {"kernel": n, "path": text, "principal": text, "servers": [name, …], "always": [tool, …]}
        connect to the socket of a kernel, which has asked for it
    {"gone": n}                          a kernel has ended
    {"cut": n}                           a kernel was interrupted: its calls are cancelled
    {"cell": n}                          a cell begins in a kernel: its budget of calls is full
    {"verdict": call, "answer": "once" | "always" | "no", "why": text}

Messages to the server:

    {"asks": call, "kernel": n, "tool": text, "hash": text, "shown": text}
        may this call run? `hash` is the SHA-256 of its arguments
    {"begins": call, "kernel": n, "tool": text, "hash": text}
    {"left": n, "kernel": n}             the calls of a kernel that has gone have ended
    {"said": server, "text": text}       for the log: a server has ended, and what it wrote
    {"ends": call, "kernel": n, "end": text, "seconds": s, "bytes": n}
        for each call that has begun or asked; `end` is ok, cancelled or a kind of error
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.linux.proc import tree
from kernel_mcp.linux.process import keep_small
from kernel_mcp.tool_servers.children import CallError, Child
from kernel_mcp.tool_servers.frames import Frame, FrameError
from kernel_mcp.tool_servers.kernels import KernelLink, Send
from kernel_mcp.tool_servers.policy import CALLS, verdict
from kernel_mcp.units import GIB, MIB
from kernel_specs import linux
from kernel_specs.template import packets

MEMORY_BYTES = 2 * GIB
"""Soft limit of this process's address space; its programs have none."""
DESCRIPTORS = 8192
LIST_BYTES = 6 * MIB
"""Bytes of all tools in one answer, which has to fit into a header."""
SHOWN_CHARS = 300
"""Characters of a call's arguments that a person is shown."""
NAME_CHARS = 200
LIST_WAIT_S = 2.0
"""Seconds for which a list waits for servers that are still starting."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of <linux/prctl.h>: orphans of the programs become children of this."""
PROGRESS_S = 0.1
"""Least time between two reports of progress of one call."""

READ: Mapping[str, Any] = {"name": "resources/read", "annotations": {"readOnlyHint": True}}
"""The reading of a resource, as a tool that the policy decides on."""

logger = logging.getLogger(__name__)


class Gateway:
    """The clients of all tool servers, and the kernels that call them."""

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._servers: dict[str, ToolServer] = {}
        self._allowed: Sequence[str] = ()
        self._children: dict[tuple[str, str], Child] = {}
        """By principal and name: principals share none."""
        self._lists: WeakKeyDictionary[Child, asyncio.Task[list[dict[str, Any]]]]
        self._lists = WeakKeyDictionary()
        self._kernels: dict[int, KernelLink] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[tuple[str, str]]] = {}
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._background: set[asyncio.Future[Any]] = set()

    async def run(self) -> None:
        """Serve until the server closes the control socket."""
        self._loop.add_reader(self._control, self._on_control)
        await self._stopped
        self._loop.remove_reader(self._control)
        ended = [each.aclose() for each in self._kernels.values()]
        ended += [each.aclose() for each in self._children.values()]
        await asyncio.gather(*ended, return_exceptions=True)

    def _on_control(self) -> None:
        while not self._stopped.done():
            try:
                received = packets.receive(self._control, wait=False)
            except BlockingIOError:
                return
            except (OSError, ValueError) as reason:
                logger.error("a message of the server could not be read: %s", reason)
                continue
            if received is None:
                self._stopped.set_result(None)
                return
            message, fds = received
            linux.close_all(fds)
            with Barrier("doing what the server wants of tools"):
                self._on_message(message)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "ping" in message:
            self._send({"pong": message["ping"]})
        elif "verdict" in message:
            answer = self._asked.pop(message["verdict"], None)
            if answer is not None and not answer.done():
                answer.set_result((message["answer"], message["why"]))
        elif "kernel" in message:
            self._take_kernel(message)
        elif "cell" in message and message["cell"] in self._kernels:
            self._kernels[message["cell"]].calls_left = CALLS
        elif "cut" in message and message["cut"] in self._kernels:
            self._kernels[message["cut"]].cut()
        elif "gone" in message:
            self._drop_kernel(message["gone"])
        elif "servers" in message:
            os.environ.update(message["environ"])
            self._allowed = message["allow"]
            found = map(ToolServer.from_json, message["servers"])
            self._servers = {each.name: each for each in found}

    def _take_kernel(self, message: Mapping[str, Any]) -> None:
        number = message["kernel"]
        if number in self._kernels:
            self._kernels[number].dial_again()
            return
        link = self._kernels[number] = KernelLink(
            number,
            message["path"],
            message["principal"],
            frozenset(message["servers"]) & self._servers.keys(),
            set(message["always"]),
            self._handle,
        )
        link.dial()

    def _drop_kernel(self, number: int) -> None:
        """Close a kernel's connections, and the servers of a principal without another kernel."""
        link = self._kernels.pop(number, None)
        if link is None:
            self._send({"left": number, "kernel": number})
            return
        self._spawn(self._leave(link))
        if link.principal and all(
            each.principal != link.principal for each in self._kernels.values()
        ):
            for key in [key for key in self._children if key[0] == link.principal]:
                self._spawn(self._children.pop(key).aclose())

    async def _leave(self, link: KernelLink) -> None:
        """Cancel the calls of a kernel that has ended; then report that it has none any more."""
        await link.aclose()
        self._send({"left": link.number, "kernel": link.number})

    def _spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _handle(self, link: KernelLink, request: Mapping[str, Any], send: Send) -> None:
        """Answer a request of a kernel; see the protocol in `frames`."""
        try:
            operation = request.get("op")
            if operation == "list":
                self._spend(link)
                await send(Frame(await self._list(link, request.get("server"))))
                return
            child = self._child(link, request.get("server"))
            if operation == "call":
                await self._call(link, child, request, send)
            elif operation == "read" and isinstance(request.get("uri"), str):
                await self._read(link, child, request["uri"], send)
            else:
                raise FrameError("no request that is known")
        except CallError as error:
            await send(Frame({"error": {"kind": error.kind, "text": error.text}}))

    def _child(self, link: KernelLink, name: object) -> Child:
        if not isinstance(name, str) or name not in link.servers:
            known = ", ".join(sorted(link.servers)) or "none"
            shown = name[:80] if isinstance(name, str) else ""
            raise CallError(
                "unavailable", f"this session has no tool server {shown!r}; it has {known}"
            )
        key = link.principal, name
        if key not in self._children:
            tell = partial(self._tell, name)
            self._children[key] = Child(self._servers[name], tell)
        return self._children[key]

    async def _list(self, link: KernelLink, wanted: object) -> dict[str, Any]:
        """List all servers; only for the one called `wanted` wait as long as it may take."""
        names = sorted(link.servers)
        lists = {name: self._tools_of(self._child(link, name)) for name in names}
        if wanted in link.servers:
            await asyncio.wait([lists[str(wanted)]])
        elif lists:
            await asyncio.wait(lists.values(), timeout=LIST_WAIT_S)

        def of_one(name: str) -> dict[str, Any]:
            child = self._child(link, name)
            row: dict[str, Any] = {"name": name, "description": "", "tools": []}
            if not lists[name].done():
                return {**row, "error": f"the tool server {name} is still starting"}
            try:
                tools = lists[name].result()
            except CallError as error:
                return {**row, "error": error.text}
            left = LIST_BYTES // len(link.servers)
            for tool in tools:
                left -= len(json.dumps(tool)) + 32
                if left < 0:
                    row["error"] = f"{len(tools) - len(row['tools'])} tools are too long to list"
                    break
                decided = self._verdict(link, child.server, tool)
                row["tools"].append({**tool, "policy": decided})
            return row

        return {"servers": [*map(of_one, names)], "budget": {"calls": CALLS}}

    def _tools_of(self, child: Child) -> asyncio.Task[list[dict[str, Any]]]:
        """Return the work that lists the tools of a server; it goes on if nobody waits."""
        work = self._lists.get(child)
        if work is None or work.done():
            work = self._lists[child] = asyncio.ensure_future(child.tools())
            work.add_done_callback(_look_at)
        return work

    def _verdict(self, link: KernelLink, server: ToolServer, tool: Mapping[str, Any]) -> str:
        if f"{server.name}.{tool['name']}" in link.always:
            return "runs"
        return verdict(server, tool, self._allowed)

    async def _call(
        self, link: KernelLink, child: Child, request: Mapping[str, Any], send: Send
    ) -> None:
        name, arguments = request.get("tool"), request.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise FrameError("a call names a tool, and has arguments")
        tools = {each["name"]: each for each in await child.tools()}
        if name not in tools:
            raise CallError("tool", f"{child.server.name} has no tool {name[:80]!r}")
        if self._verdict(link, child.server, tools[name]) != "runs":
            await self._ask(link, f"{child.server.name}.{name}", arguments)
        call = self._begin(link, child, name, arguments)
        reported = -PROGRESS_S

        async def progress(done: float, total: float | None, text: str | None) -> None:
            nonlocal reported
            if time.monotonic() - reported >= PROGRESS_S:
                reported = time.monotonic()
                row = {"progress": done, "total": total, "message": (text or "")[:SHOWN_CHARS]}
                await send(Frame({"progress": row}))

        await self._counted(link, call, self._rated(child, name, arguments, progress), send)

    async def _read(self, link: KernelLink, child: Child, uri: str, send: Send) -> None:
        """Read a resource, which is decided like a call: an address can carry data to a server."""
        arguments = {"uri": uri}
        if self._verdict(link, child.server, READ) != "runs":
            await self._ask(link, f"{child.server.name}.{READ['name']}", arguments)
        call = self._begin(link, child, READ["name"], arguments)
        await self._counted(link, call, child.read(uri), send)

    async def _rated(self, child: Child, *call: Any) -> Frame:
        await child.rate.wait()
        return await child.call(*call)

    async def _ask(self, link: KernelLink, tool: str, arguments: Mapping[str, Any]) -> None:
        """Wait until a person permits a call. Raises CallError if none does."""
        number = next(self._numbers)
        answer = self._asked[number] = self._loop.create_future()
        shown = json.dumps(arguments)
        if (more := len(shown) - SHOWN_CHARS) > 0:
            shown = f"{shown[:SHOWN_CHARS]}… ({more:,} more characters)"
        about = {"kernel": link.number, "tool": _plain(tool), "hash": _digest(arguments)}
        self._send({"asks": number, **about, "shown": shown})
        decided, why = "no", ""
        try:
            decided, why = await answer
        finally:
            self._asked.pop(number, None)
            if decided == "no":
                end = "refused" if answer.done() and not answer.cancelled() else "cancelled"
                self._send_end(link, number, end)
        if decided == "no":
            raise CallError("refused", why)
        if decided == "always":
            link.always.add(tool)

    def _begin(
        self, link: KernelLink, child: Child, tool: str, arguments: Mapping[str, Any]
    ) -> int:
        """Count a call, and report that it begins. Raises CallError beyond the budget."""
        self._spend(link)
        number = next(self._numbers)
        name = _plain(f"{child.server.name}.{tool}")
        about = {"kernel": link.number, "tool": name, "hash": _digest(arguments)}
        self._send({"begins": number, **about})
        return number

    def _spend(self, link: KernelLink) -> None:
        """Count a request against the budget of a cell. Raises CallError beyond it."""
        link.calls_left -= 1
        if link.calls_left < 0:
            raise CallError(
                "refused", f"one cell may call tools {CALLS:,} times; go on in another cell"
            )

    async def _counted(
        self, link: KernelLink, number: int, work: Awaitable[Frame], send: Send
    ) -> None:
        """Send the result of a call, and report its end."""
        began, end, size = time.monotonic(), "cancelled", 0
        try:
            frame = await work
            end, size = "ok", sum(map(len, frame.encoded()))
            await send(frame)
        except CallError as error:
            end = error.kind
            raise
        finally:
            self._send_end(link, number, end, time.monotonic() - began, size)

    def _tell(self, name: str, text: str) -> None:
        """Report to the operator what a tool server wrote."""
        self._send({"said": name, "text": text})

    def _send_end(
        self, link: KernelLink, number: int, end: str, seconds: float = 0.0, size: int = 0
    ) -> None:
        about = {"kernel": link.number, "end": end, "seconds": round(seconds, 4), "bytes": size}
        self._send({"ends": number, **about})

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message; waits if the server is behind. It has ended if it takes none."""
        try:
            packets.send(self._control, message)
        except OSError:
            if not self._stopped.done():
                self._stopped.set_result(None)


def _digest(arguments: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def _look_at(work: asyncio.Task[Any]) -> None:
    """Take notice of a failure that nobody waits for: the next list shows it."""
    if not work.cancelled():
        work.exception()


def _plain(tool: str) -> str:
    """Return the name of a tool as ASCII, as a foreign server gives it."""
    return json.dumps(tool)[1:-1][:NAME_CHARS]


def _confine() -> None:
    """Set resource limits. The programs of tool servers lift the one of memory again."""
    for kind, value in {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
    }.items():
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if most < 0 else min(value, most), most))
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


async def _serve(control: socket.socket) -> None:
    await Gateway(control).run()


def main(argv: Sequence[str]) -> NoReturn:
    """Run the gateway for the server at descriptor `argv[0]`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("kernel-tools")
    keep_small()
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    _confine()
    linux.prctl(_SUBREAPER, 1)
    asyncio.run(_serve(control))
    for pid in [*tree(os.getpid())][1:]:  # what the programs have started, and left behind
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)
