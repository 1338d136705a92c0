"""The gateway's process, with a real MCP server behind it and the socket of a kernel before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.launch.tool_gateway import ToolGateway
from kernel_mcp.linux.proc import WatchedProcess
from kernel_mcp.tool_servers import children
from kernel_mcp.tool_servers.frames import Frame, read_frame
from kernel_mcp.tool_servers.kernels import CONNECTIONS, IN_FLIGHT_BYTES, KernelLink, Send
from kernel_mcp.tool_servers.policy import CALLS, Rate
from tests import crm

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(lambda: "asyncio")

SECONDS = 60.0


class Session:
    """A session of which the gateway reports calls, and which answers all questions alike."""

    def __init__(self) -> None:
        self.gateway: ToolGateway | None = None
        self.answer, self.why = "no", "nobody is here"
        self.asked: list[tuple[str, str]] = []
        self.begun: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.end = asyncio.Event()

    def asks(self, call: int, tool: str, digest: str, shown: str) -> None:
        assert self.gateway is not None
        self.asked.append((tool, shown))
        self.gateway.decide(call, self.answer, self.why)

    def begins(self, call: int, tool: str, digest: str) -> None:
        self.begun.append((tool, digest))

    def ends(self, call: int, facts: Mapping[str, Any]) -> None:
        self.ended.append(facts["end"])
        self.end.set()

    def lost(self) -> None:
        self.ended.append("lost")
        self.end.set()

    async def has_ended(self, *ends: str) -> None:
        """Wait for the ends of so many calls, and compare them."""
        while len(self.ended) < len(ends):
            self.end.clear()
            await asyncio.wait_for(self.end.wait(), SECONDS)
        assert self.ended == [*ends]


class Kernel:
    """The kernel's side: it listens, and takes the connections that the gateway makes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = Session()
        self.number = 0
        self.waiting: asyncio.Queue[Connection] = asyncio.Queue()
        self.opened: list[Connection] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Take connections inside the block, and close all of them at its end."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            listener.setblocking(False)
            loop, taking = asyncio.get_running_loop(), set[asyncio.Task[None]]()

            def accept() -> None:  # at once: a cancelled `sock_accept` may lose a connection
                taken, _ = listener.accept()
                taking.add(loop.create_task(self._take(taken)))

            loop.add_reader(listener, accept)
            try:
                yield
            finally:
                loop.remove_reader(listener)
                await asyncio.gather(*taking)
                for each in self.opened:
                    each.writer.transport.abort()
                    with suppress(OSError):
                        await each.writer.wait_closed()

    async def _take(self, taken: socket.socket) -> None:
        self.opened.append(Connection(*await asyncio.open_unix_connection(sock=taken)))
        self.waiting.put_nowait(self.opened[-1])

    async def connection(self) -> Connection:
        return await asyncio.wait_for(self.waiting.get(), SECONDS)

    async def ask(self, **request: Any) -> Frame:
        """Send one request over a connection of its own, and return the last answer."""
        connection = await self.connection()
        answer = await connection.ask(**request)
        connection.writer.close()
        return answer

    async def call(self, tool: str, **arguments: Any) -> Any:
        answer = await self.ask(op="call", server="crm", tool=tool, arguments=arguments)
        return answer.header.get("result") or answer.header["error"]


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.progress: list[Mapping[str, Any]] = []

    def send(self, **request: Any) -> None:
        self.writer.writelines(Frame(request).encoded())

    async def ask(self, **request: Any) -> Frame:
        self.send(**request)
        while True:
            frame = await asyncio.wait_for(read_frame(self.reader), SECONDS)
            assert frame is not None
            if "progress" not in frame.header:
                return frame
            self.progress.append(frame.header["progress"])


class Log:
    """A named pipe into which the program writes, so that a line can be awaited."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._news = asyncio.Event()
        self.lines: list[str] = []
        self._text = ""
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        self._text += os.read(self._fd, 65536).decode()
        *whole, self._text = self._text.split("\n")
        self.lines += whole
        self._news.set()

    async def seen(self, line: str, count: int = 1) -> None:
        """Wait until the program has written a line so often."""
        while self.lines.count(line) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), SECONDS)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


class Served(ToolGateway):
    """A gateway, and the log of the program behind it."""

    log: Log


def program(log: Path, **facts: Any) -> ToolServer:
    return ToolServer(
        "crm", sys.executable, ("-m", "tests.crm", str(log)), cwd=str(Path.cwd()), **facts
    )


@asynccontextmanager
async def gateway(
    folder: Path, *allowed: str, server: ToolServer | None = None
) -> AsyncIterator[Served]:
    made = Served([server or program(folder / "log")], allowed)
    made.log = Log(folder / "log")
    try:
        yield made
    finally:
        await made.aclose()
        made.log.close()


@asynccontextmanager
async def kernel(
    made: Served, folder: Path, name: str = "k", principal: str = "", **facts: Any
) -> AsyncIterator[Kernel]:
    one = Kernel(folder / name)
    one.session.gateway = made
    servers = facts.get("servers", ["crm"])
    always = facts.get("always", [])
    async with one.listening():
        one.number = made.connect(str(one.path), principal, servers, always, one.session)
        try:
            yield one
        finally:
            made.disconnect(one.number)


async def test_customers_and_their_orders_are_joined(tmp_path: Path) -> None:
    async with gateway(tmp_path, "crm.list_*") as made, kernel(made, tmp_path) as one:
        customers = (await one.call("list_customers"))["structured"]["result"]
        assert len(customers) == crm.CUSTOMERS
        orders = await one.call("list_orders", customer=7, most=2)
        assert [each["amount"] for each in orders["structured"]["result"]] == [70, 71]
        assert [tool for tool, _ in one.session.begun] == ["crm.list_customers", "crm.list_orders"]
        await one.session.has_ended("ok", "ok")
        assert made.log.lines == ["started"]


async def test_tools_are_listed_with_what_becomes_of_a_call(tmp_path: Path) -> None:
    async with gateway(tmp_path, "crm.rename") as made, kernel(made, tmp_path) as one:
        (row,) = (await one.ask(op="list")).header["servers"]
        tools = {each["name"]: each for each in row["tools"]}
        assert (row["name"], tools["rename"]["policy"], tools["fail"]["policy"]) == (
            "crm",
            "runs",
            "asks",
        )
        assert tools["list_orders"]["policy"] == "asks"  # its hint is a claim
        assert tools["list_orders"]["inputSchema"]["required"] == ["customer"]


async def test_a_trusted_server_says_what_is_read_only_and_may_lie(tmp_path: Path) -> None:
    trusted = program(tmp_path / "log", trust="read-only")
    async with gateway(tmp_path, server=trusted) as made, kernel(made, tmp_path) as one:
        assert (await one.call("delete_all"))["content"][0]["text"] == "deleted"
        refused = await one.call("rename", customer=1, name="B")
        assert refused == {"kind": "refused", "text": "nobody is here"}
        assert made.log.lines == ["started", "deleted"]
        await one.session.has_ended("ok", "refused")


async def test_a_person_permits_one_call_or_all_of_a_session(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made, kernel(made, tmp_path) as one:
        one.session.answer = "once"
        await one.call("rename", customer=1, name="line\nbreak \u202e")
        assert one.session.asked == [
            ("crm.rename", '{"customer": 1, "name": "line\\nbreak \\u202e"}')
        ]
        one.session.answer = "always"
        await one.call("rename", customer=2, name="x" * 5000)
        assert one.session.asked[1][1].endswith("more characters)")
        one.session.answer = "no"
        await one.call("rename", customer=3, name="C")
        assert len(one.session.asked) == 2
        assert (await one.call("long_text", characters=1))["kind"] == "refused"
        async with kernel(made, tmp_path, "next", always=["crm.rename"]) as later:
            await later.call("rename", customer=1, name="D")
            assert later.session.asked == []


async def test_closing_a_connection_cancels_its_call(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        connection = await one.connection()
        connection.send(op="call", server="crm", tool="wait_long", arguments={})
        await made.log.seen("waits")
        connection.writer.close()
        await made.log.seen("cancelled")
        assert (await one.call("list_orders", customer=1))["structured"]
        await one.session.has_ended("cancelled", "ok")


async def test_the_end_of_a_kernel_cancels_its_calls(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, "*") as made,
        kernel(made, tmp_path) as one,
        kernel(made, tmp_path, "other") as other,
    ):
        connection = await one.connection()
        connection.send(op="call", server="crm", tool="wait_long", arguments={})
        await made.log.seen("waits")
        made.disconnect(one.number)
        await made.log.seen("cancelled")
        assert (await other.call("list_orders", customer=1))["structured"]


async def test_a_program_that_dies_is_started_again(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        died = await one.call("die")
        assert died["kind"] == "unavailable"
        assert "has ended" in died["text"]
        assert (await one.call("list_orders", customer=1))["structured"]
        assert made.log.lines == ["started", "started"]


async def test_what_a_program_wrote_is_for_the_operator_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import os, sys; sys.exit('cannot log in with ' + os.environ['KEY'] + ' at the desk')"
    secret = {"KEY": "sk-secret-12345"}
    wrong = ToolServer("crm", sys.executable, ("-c", code), env=secret)
    async with gateway(tmp_path, server=wrong) as made, kernel(made, tmp_path) as one:
        failed = await one.call("list_customers")
        assert failed["kind"] == "unavailable"
        assert "in the log of kernel-mcp" in failed["text"]
        (row,) = (await one.ask(op="list")).header["servers"]
        assert "crm is not available" in row["error"]
        assert "cannot log in" not in failed["text"] + row["error"]
    assert "cannot log in with [KEY masked] at the desk" in caplog.text


async def test_errors_of_a_tool_and_unknown_names_are_told_apart(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        assert (await one.call("fail"))["kind"] == "tool"
        assert "no tool 'nothing'" in (await one.call("nothing"))["text"]
        other = await one.ask(op="call", server="git", tool="x", arguments={})
        assert other.header["error"] == {
            "kind": "unavailable",
            "text": "this session has no tool server 'git'; it has crm",
        }


async def test_a_session_with_fewer_servers_finds_no_others(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path, servers=[]) as one:
        assert (await one.ask(op="list")).header["servers"] == []
        assert (await one.call("list_customers"))["kind"] == "unavailable"


async def test_binary_data_and_resources_come_as_blobs(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        picture = await one.ask(op="call", server="crm", tool="picture", arguments={})
        item = picture.header["result"]["content"][0]
        assert (item["type"], item["mimeType"], item["data"]) == ("image", "image/png", {"blob": 0})
        assert bytes(picture.blobs[0]).startswith(b"\x89PNG")
        read = await one.ask(op="read", server="crm", uri="crm://terms")
        assert read.header["result"]["content"][0]["text"] == "pay within 30 days"


async def test_a_long_structured_result_is_a_blob(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        call = {"op": "call", "server": "crm", "tool": "long_text"}
        long = await one.ask(**call, arguments={"characters": 2_000_000})
        assert long.header["result"] == {"content": []}
        found = json.loads(long.blobs[long.header["structured_blob"]])
        assert len(found["result"]) == 2_000_000


async def test_results_that_are_not_read_are_bounded(tmp_path: Path) -> None:
    large = b"x" * (IN_FLIGHT_BYTES // 4)

    async def answer(_link: KernelLink, _request: Mapping[str, Any], send: Send) -> None:
        await send(Frame({}, [large]))

    one = Kernel(tmp_path / "k")
    async with one.listening():
        link = KernelLink(1, str(one.path), "", frozenset(), set(), answer)
        link.dial()
        waiting = []
        for _ in range(4):  # the fourth is beyond the bound, with its header and with what is sent
            waiting.append(await one.connection())
            waiting[-1].send()
        ends = [asyncio.ensure_future(read_frame(each.reader)) for each in waiting[3:]]
        assert await asyncio.wait_for(ends[0], SECONDS) is None
        first = await asyncio.wait_for(read_frame(waiting[0].reader), SECONDS)
        assert first is not None
        assert first.blobs == [large]
        await link.aclose()


async def test_a_kernel_has_few_connections_and_one_ahead(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        opened = []
        for _ in range(CONNECTIONS):
            opened.append(await one.connection())
            opened[-1].send(op="call", server="crm", tool="wait_long", arguments={})
        await made.log.seen("waits", CONNECTIONS)
        assert len(one.opened) == CONNECTIONS
        opened[0].writer.close()
        assert (await one.call("list_orders", customer=1))["structured"]


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\4nope", b'\0\0\0\x10{"blobs": [900]}', b"\0\0"],
)
async def test_what_is_no_frame_ends_its_connection_alone(tmp_path: Path, sent: bytes) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        connection = await one.connection()
        connection.writer.write(sent)
        if len(sent) < 4:
            connection.writer.write_eof()
        with suppress(ConnectionResetError):  # what was not read
            assert await asyncio.wait_for(connection.reader.read(), SECONDS) == b""
        assert (await one.call("list_orders", customer=1))["structured"]


async def test_a_link_in_the_place_of_the_socket_is_not_followed(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        held = await one.connection()
        trap = Kernel(tmp_path / "trap")
        trap.path.symlink_to(one.path)
        trap.number = made.connect(str(trap.path), "", ["crm"], [], trap.session)
        await held.ask(op="list")
        await one.connection()
        assert len(one.opened) == 2


async def test_principals_share_no_program(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, "*") as made,
        kernel(made, tmp_path, "a", "alice") as alice,
        kernel(made, tmp_path, "b", "bob") as bob,
        kernel(made, tmp_path, "c", "bob") as more,
    ):
        for one in (alice, bob, more):
            assert (await one.call("list_orders", customer=1))["structured"]
        assert made.log.lines == ["started", "started"]


async def test_a_killed_gateway_is_replaced_and_the_kernel_is_connected_again(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        connection = await one.connection()
        connection.send(op="call", server="crm", tool="wait_long", arguments={})
        await made.log.seen("waits")
        watched = made._process._watched
        assert watched is not None
        os.kill(watched.pid, signal.SIGKILL)
        assert await asyncio.wait_for(connection.reader.read(), SECONDS) == b""
        await one.session.has_ended("lost")
        while (fresh := await one.connection()).reader.at_eof():
            pass  # that which was ahead
        answer = await fresh.ask(op="call", server="crm", tool="list_customers", arguments={})
        assert answer.header["result"]["structured"]


async def test_the_program_has_no_variables_of_the_server_but_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_SERVER", "1")
    named = program(tmp_path / "log", env={"KEY_OF_CRM": "2"})
    async with gateway(tmp_path, "*", server=named) as made, kernel(made, tmp_path) as one:
        found = (await one.call("environment"))["structured"]
        assert found["KEY_OF_CRM"] == "2"
        assert "KEY_OF_THE_SERVER" not in found


@contextmanager
def http_server() -> Iterator[tuple[str, list[str]]]:
    """The customers on streamable HTTP, in a thread: its address, and the keys of its requests."""
    keys: list[str] = []
    app = crm.crm.streamable_http_app()

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        keys.append(headers.get(b"x-key", b"").decode())
        await app(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(noting, log_level="error"))
    serving = threading.Thread(target=server.run, args=([listening],))
    serving.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", keys
    finally:
        server.should_exit = True
        serving.join()


async def test_a_server_on_http_is_sent_its_headers_and_long_results_are_taken(
    tmp_path: Path,
) -> None:
    with http_server() as (url, keys):
        address = ToolServer("crm", url=url, headers={"X-Key": "secret"})
        async with (
            gateway(tmp_path, "*", server=address) as made,
            kernel(made, tmp_path) as one,
        ):
            orders = await one.call("list_orders", customer=7, most=1)
            assert orders["structured"]["result"][0]["amount"] == 70
            call = {"op": "call", "server": "crm", "tool": "long_text"}
            long = await one.ask(**call, arguments={"characters": 3_000_000})
            assert len(json.loads(long.blobs[0])["result"]) == 3_000_000
            assert {each for each in keys if each} == {"secret"}
        nobody = ToolServer("crm", url="http://127.0.0.1:1/mcp")
        (tmp_path / "other").mkdir()
        async with (
            gateway(tmp_path / "other", server=nobody) as made,
            kernel(made, tmp_path / "other") as one,
        ):
            assert (await one.call("list_orders"))["kind"] == "unavailable"


async def test_a_program_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        pid = (await one.call("process"))["structured"]["result"]
        watched = WatchedProcess(pid, asyncio.get_running_loop(), lambda: None)
        assert made._process._watched is not None
        os.kill(made._process._watched.pid, signal.SIGKILL)
        await asyncio.wait_for(watched.gone.wait(), SECONDS)
        watched.close()


async def test_a_line_without_an_end_ends_its_program_alone(tmp_path: Path) -> None:
    endless = "import sys\nwhile True: sys.stdout.write('x' * 1_000_000)"
    wrong = ToolServer("crm", sys.executable, ("-c", endless))
    async with gateway(tmp_path, server=wrong) as made, kernel(made, tmp_path) as one:
        assert (await one.call("list_customers"))["kind"] == "unavailable"
        assert made._process.running


async def test_a_cell_has_a_budget_of_calls(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path, servers=[]) as one:
        connection = await one.connection()
        for _ in range(CALLS):
            assert "servers" in (await connection.ask(op="list")).header
        spent = await connection.ask(op="list")
        assert spent.header["error"]["kind"] == "refused"
        assert "2,000 times" in spent.header["error"]["text"]
        made.begin_cell(one.number)
        made.connect_again(one.number)  # behind it
        while "error" in (await connection.ask(op="list")).header:
            pass


async def test_calls_beyond_the_rate_of_a_server_wait() -> None:
    rate, begun = Rate(2, 3600.0), []

    async def call() -> None:
        await rate.wait()
        begun.append(1)

    calls = [asyncio.ensure_future(call()) for _ in range(3)]
    await asyncio.wait(calls[:2], timeout=SECONDS)
    assert len(begun) == 2
    assert not calls[2].done()
    calls[2].cancel()


RAW = """
import json, os, subprocess, sys
def say(line):
    sys.stdout.write(line + chr(10)); sys.stdout.flush()
def answer(number, result):
    say(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}))
lists = 0
for line in sys.stdin:
    row = json.loads(line)
    number, name = row.get("id"), row.get("params", {}).get("name")
    begin = '{"jsonrpc": "2.0", "id": %s, "result": ' % json.dumps(number)
    if row["method"] == "initialize":
        about = {"name": "raw", "version": "1"}
        version = row["params"]["protocolVersion"]
        found = {"protocolVersion": version, "capabilities": {"tools": {}}}
        answer(number, {**found, "serverInfo": about})
    elif row["method"] == "tools/list":
        lists += 1
        if lists == 1:
            tools = "good hang code long long_error orphan surrogate deep list".split()
            schema = {"type": "object"}
            answer(number, {"tools": [{"name": each, "inputSchema": schema} for each in tools]})
    elif name == "code":
        error = {"code": -32000, "message": "no such row"}
        say(json.dumps({"jsonrpc": "2.0", "id": number, "error": error}))
    elif name in ("long", "long_error"):
        text = {"type": "text", "text": "x" * 9_000_000}
        answer(number, {"content": [text], "isError": name == "long_error"})
    elif name == "orphan":
        subprocess.Popen(["sleep", "7777"]); os._exit(1)
    elif name == "surrogate":
        say(begin + '{"content": [{"type": "text", "text": "%sud800"}]}}' % chr(92))
    elif name == "deep":
        say(begin + "[" * 200_000 + "]" * 200_000 + "}")
    elif name == "list":
        say("a line of a log"); answer(number, [])
    elif name == "good":
        answer(number, {"content": [{"type": "text", "text": "good"}]})
    elif number is not None and name != "hang":
        error = {"code": -32601, "message": "no " + row["method"]}
        say(json.dumps({"jsonrpc": "2.0", "id": number, "error": error}))
"""


def raw() -> ToolServer:
    return ToolServer("crm", sys.executable, ("-c", RAW))


@pytest.mark.parametrize(
    ("tool", "kind", "words"),
    [
        ("code", "tool", "no such row"),
        ("long", "tool", "bytes, of at most"),
        ("long_error", "tool", "xxx"),
        ("surrogate", "tool", "not valid"),
        ("list", "tool", "not valid"),
        ("deep", "unavailable", "it has ended"),
        ("orphan", "unavailable", "it has ended"),
    ],
)
async def test_an_odd_answer_ends_its_call_alone(
    tmp_path: Path, tool: str, kind: str, words: str
) -> None:
    async with gateway(tmp_path, "*", server=raw()) as made, kernel(made, tmp_path) as one:
        await one.call("good")
        open_call = await one.connection()
        open_call.send(op="call", server="crm", tool="hang", arguments={})
        failed = await one.call(tool)
        assert failed["kind"] == kind
        assert words in failed["text"]
        assert len(failed["text"]) <= 4000
        if kind == "tool":
            names = [name for name, _ in one.session.begun]
            assert names == ["crm.good", "crm.hang", f"crm.{tool}"]
            assert {"cancelled", "unavailable"}.isdisjoint(one.session.ended)
        assert (await one.call("good"))["content"][0]["text"] == "good"


@pytest.mark.parametrize("odd", ["deep", "surrogate"])
async def test_arguments_that_cannot_be_sent_end_no_program(tmp_path: Path, odd: str) -> None:
    value: Any = "\ud800"
    if odd == "deep":
        value = {}
        for _ in range(400):
            value = {"a": value}
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        waits = await one.connection()
        waits.send(op="call", server="crm", tool="wait_long", arguments={})
        await made.log.seen("waits")
        failed = await one.call("rename", customer=1, name=value)
        assert failed["kind"] == "tool"
        assert "cannot be sent" in failed["text"]
        assert made.log.lines == ["started", "waits"]
        assert one.session.ended == ["tool"]


async def test_a_request_of_millions_of_values_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, "*") as made, kernel(made, tmp_path) as one:
        failed = await one.call("rename", customer=[{}] * 300_000, name="x")
        assert "more than 200,000 values" in failed["text"]
        assert (await one.call("list_orders", customer=1))["structured"]


async def test_reading_a_resource_takes_the_same_permission_as_a_call(tmp_path: Path) -> None:
    uri = "crm://notes/secret-of-the-session"
    for trust, allowed, kind in (
        ("", (), "refused"),
        ("", ("crm.list_*",), "refused"),
        ("read-only", (), "tool"),
        ("", ("crm.*",), "tool"),
    ):
        folder = tmp_path / f"{trust}{len(allowed)}{kind}{'*' in allowed}{allowed}".replace(
            "/", "_"
        )
        folder.mkdir()
        server = program(folder / "log", trust=trust)
        async with gateway(folder, *allowed, server=server) as made, kernel(made, folder) as one:
            answer = await one.ask(op="read", server="crm", uri=uri)
            assert answer.header["error"]["kind"] == kind, answer.header
            if kind == "refused":
                assert one.session.asked == [("crm.resources/read", json.dumps({"uri": uri}))]
            else:
                assert one.session.begun[0][0] == "crm.resources/read"


async def test_a_known_list_is_used_while_a_server_does_not_list_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LIST_S", 0.0)
    monkeypatch.setattr(children, "REFRESH_S", 0.1)
    child = children.Child(raw(), lambda _text: None)
    try:
        first = await child.tools()
        assert len(first) == 9
        assert await child.tools() == first
    finally:
        await child.aclose()
