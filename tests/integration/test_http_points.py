"""Silent failures of MCP servers over HTTP: state, other people's state, output, the end.

Each is tried against the real server, in both eras of the protocol where they differ.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream

from tests.integration.agent import notices
from tests.integration.httpclient import (
    HELD,
    Said,
    Wire,
    bearer,
    begun,
    http_agent,
    let_go,
    until,
    wire,
)
from tests.integration.httpserver import READY_S, ROOT, HttpServer, command, http_server
from tests.integration.principals import revoke, two_principals
from tests.integration.processes import descendants, ends
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

HANDLE = re.compile(r'\[session (s-\S+): pass session="(s-\S+)" to keep using these variables\]')
MIB = 1024 * 1024
MOST_OF_ONE = 500
"""MCP sessions of one principal."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workspaces of `server` are."""
    return tmp_path_factory.mktemp("workspaces")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    """One for the tests that do not end it; each has sessions of its own."""
    with http_server("--max-sessions", "20", "--workspace", str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def of_nobody() -> Iterator[HttpServer]:
    """One that asks nobody who they are."""
    with http_server("--no-auth") as running:
        yield running


async def new_session(client: Wire, name: str) -> str:
    return str((await client.call("create_session", name=name)).data["session"])


async def heard(client: Wire, session: str, words: str = "") -> None:
    """Wait until a session is idle and has told this."""
    told = ""
    with anyio.fail_after(60):
        while True:
            listed = (await client.call("list_sessions")).data["sessions"]
            (state,) = [each for each in listed if each["session"] == session]
            told += "".join(state["notices"])
            if state["state"] == "idle" and words in told:
                return


# 1. State


@pytest.mark.ways
async def test_all_clients_of_a_principal_have_one_default_session_in_both_eras() -> None:
    with http_server() as server:
        async with http_agent(server, "auto") as first, http_agent(server, "legacy") as second:
            await first.run("x = 41")
            assert (await first.run("x + 1")).text == "42"
            told = await second.run("x + 1")
            assert "42" in told.text
            (notice,) = [each for each in notices(told) if "another client" in each]
            assert "default session" in notice
            assert "create_session" in notice
            assert (await second.run("x")).text == "41", "it is said once"
            assert len((await second.call("list_sessions")).data["sessions"]) == 1


async def test_who_is_nobody_gets_the_handle_first_and_goes_on_with_it(
    of_nobody: HttpServer,
) -> None:
    async with http_agent(of_nobody, "auto") as client:
        answer = await client.run("x = 41\nx")
        found = HANDLE.match(answer.text)
        assert found, answer.text
        assert found[1] == found[2]
        assert (await client.run("x + 1", session=found[1])).text == "42"
        other = await client.run("'x' in globals()")
        assert "False" in other.text
        listed = (await client.call("list_sessions")).data["sessions"]
        assert found[1] in {each["session"] for each in listed}


async def test_a_handshake_without_a_token_is_a_client_with_a_default_session(
    of_nobody: HttpServer,
) -> None:
    async with wire(of_nobody, handshake=True) as one, wire(of_nobody, handshake=True) as other:
        await one.call("execute", code="x = 1")
        assert (await one.call("execute", code="x")).text == "1"
        assert "NameError" in (await other.call("execute", code="x")).text


# 2. What others have


@pytest.mark.ways
async def test_no_call_of_one_principal_drops_the_session_of_another(tmp_path: Path) -> None:
    with two_principals(tmp_path, "--quota", "sessions=2,asleep=2") as (server, quiet, greedy):
        async with wire(server, quiet) as one, wire(server, greedy) as many:
            await one.call("execute", code="kept = 'kept'")
            for _ in range(6):
                made = await many.call("create_session")
                if not made.failed:
                    await many.call("execute", code="x = 1", session=made.data["session"])
            listed = (await many.call("list_sessions")).data["sessions"]
            assert len(listed) <= 4
            assert (await one.call("execute", code="kept")).text == "'kept'"
            (own,) = (await one.call("list_sessions")).data["sessions"]
            assert own["session"] not in {each["session"] for each in listed}


# 3. Output


async def dropped(client: Wire, server: HttpServer, name: str, folder: Path) -> str:
    """A session in which a cell is held, whose client has hung up."""
    session = await new_session(client, name)
    arguments = {"code": HELD, "session": session}
    body, headers = client.request("tools/call", name="execute", arguments=arguments)

    async def post() -> None:
        async with httpx2.AsyncClient(headers=bearer(server.token), timeout=None) as leaving:
            await leaving.post(server.mcp, json=body, headers=headers)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post)
        await until(lambda: name in [each.name for each in begun(folder)])
        before = server.descriptors
        tasks.cancel_scope.cancel()
    await until(lambda: server.descriptors < before)  # it knows that nobody is there
    return session


@pytest.mark.ways
async def test_a_handshake_call_whose_client_hangs_up_goes_on_and_is_told_to_who_asks(
    server: HttpServer, folder: Path
) -> None:
    async with wire(server, handshake=True) as client:
        session = await dropped(client, server, "goes-on", folder)
        let_go(folder)
        await heard(client, session)
        for _ in range(2):  # it is repeated as long as it is asked for
            told = await client.call("wait", session=session)
            assert "begun" in told.text
            assert "the last word" in told.text


async def test_the_end_of_a_call_that_nobody_received_is_told_with_the_next_answer(
    server: HttpServer, folder: Path
) -> None:
    async with wire(server, handshake=True) as client:
        session = await dropped(client, server, "untold", folder)
        let_go(folder)
        await heard(client, session, "cell 1, which was running, has ended: ok")
        later = await client.call("execute", code="'later'", session=session)
        assert later.text == "'later'"


async def test_a_call_of_the_newest_era_whose_client_hangs_up_is_stopped(
    server: HttpServer, folder: Path
) -> None:
    async with wire(server) as client:
        session = await dropped(client, server, "stopped", folder)
        await heard(client, session, "cell 1, whose call was cancelled, has ended: interrupted")
        assert (await client.call("execute", code="'later'", session=session)).text == "'later'"


# 4. The end


@asynccontextmanager
async def calls_held(server: HttpServer, folder: Path) -> AsyncIterator[list[Said]]:
    """Calls of both eras whose cells run; the answers are there at the end of this block."""
    answers: list[Said] = []

    async def hold(client: Wire, name: str) -> None:
        session = await new_session(client, name)
        answers.append(await client.call("execute", code=HELD, session=session, wait=100))

    async with wire(server) as newest, wire(server, handshake=True) as older:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold, newest, "newest")
            tasks.start_soon(hold, older, "older")
            await until(lambda: len(begun(folder)) == 2)
            yield answers
        older.session = ""  # the server is gone, and its session with it
    assert len(answers) == 2


@asynccontextmanager
async def listened(server: HttpServer) -> AsyncIterator[None]:
    """Keep the streams open that clients of each era listen to."""
    async with wire(server) as newest, wire(server, handshake=True) as older:
        wanted = {"toolsListChanged": True}
        body, headers = newest.request("subscriptions/listen", notifications=wanted)
        modern = newest.http.stream("POST", server.mcp, json=body, headers=headers)
        shaken = older.http.stream("GET", server.mcp, headers=older.headers())
        async with modern as one, shaken as other:
            assert (one.status_code, other.status_code) == (200, 200)
            yield
        older.session = ""


async def first_refused(client: Wire) -> Said:
    """The answer to the first call that is not taken any more."""
    with anyio.fail_after(60):
        while (said := await client.ask("tools/list")).status == 200:
            pass
    return said


@pytest.mark.parametrize("name", sampled(["SIGTERM", "SIGINT", "SIGQUIT"], "SIGTERM"))
async def test_a_signal_lets_calls_end_refuses_new_ones_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    with http_server("--drain", "60s", "--workspace", str(tmp_path)) as server:
        async with listened(server), wire(server) as new, calls_held(server, tmp_path) as answers:
            known = server.processes
            server.signal(signal.Signals[name])
            refused = await first_refused(new)
            assert refused.status == 503
            assert refused.headers["connection"] == "close"
            let_go(tmp_path)
        await anyio.to_thread.run_sync(lambda: server.stopped(known=known))
    for answer in answers:
        assert not answer.failed, answer.text
        assert "the last word" in answer.text


@pytest.mark.ways
async def test_a_call_that_outlasts_the_drain_is_told_that_the_server_stops(
    tmp_path: Path,
) -> None:
    with http_server("--drain", "0.2s", "--workspace", str(tmp_path)) as server:
        async with listened(server), calls_held(server, tmp_path) as answers:
            known = server.processes
            server.signal()
        await anyio.to_thread.run_sync(lambda: server.stopped(known=known))
    for answer in answers:
        assert (answer.status, answer.failed) == (200, True)
        assert "The server is stopping" in answer.text


async def test_a_client_of_the_server_before_is_told_to_greet_again(server: HttpServer) -> None:
    async with wire(server, handshake=True) as client:
        known, client.session = client.session, "f" * 32
        lost = await client.ask("tools/list")
        assert lost.status == 404
        assert "initialize" in lost.body.decode()
        await client.greet()
        assert client.session != known
        assert (await client.ask("tools/list")).status == 200


async def test_a_stream_that_is_to_be_resumed_begins_anew(server: HttpServer) -> None:
    async with wire(server, handshake=True) as client:
        headers = {**client.headers(), "Last-Event-ID": "7"}
        async with client.http.stream("GET", client.url, headers=headers) as said:
            assert said.status_code == 200
            assert said.headers["content-type"].startswith("text/event-stream")
            assert (await client.ask("tools/list")).status == 200


# 5. Large files


async def test_what_is_too_large_for_a_message_goes_by_its_own_route(server: HttpServer) -> None:
    async with wire(server) as client:
        session = await new_session(client, "large")
        place = f"{server.url}/sessions/{session}/files/deep/er/large.bin"
        data = bytes(range(256)) * 4096 * 3
        put = await client.http.put(place, content=data)
        assert put.status_code in (200, 201, 204), put.text
        code = "import pathlib\nlen(pathlib.Path('deep/er/large.bin').read_bytes())"
        size = await client.call("execute", code=code, session=session)
        assert size.text == str(3 * MIB)
        got = await client.http.get(place)
        assert got.content == data
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["content-disposition"].startswith("attachment")
        part = await client.http.get(place, headers={"range": "bytes=256-259"})
        assert (part.status_code, part.content) == (206, b"\x00\x01\x02\x03")
        async with httpx2.AsyncClient() as nobody:
            assert (await nobody.get(place)).status_code == 401
            assert (await nobody.put(place, content=b"")).status_code == 401


# 6. Bodies


async def test_a_body_that_is_too_long_costs_next_to_nothing(server: HttpServer) -> None:
    async with wire(server) as client:
        await client.ask("tools/list")
        before = server.peak_bytes

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * MIB

        with suppress(httpx2.WriteError, httpx2.ReadError):  # it is not read to its end
            said = await client.http.post(
                server.mcp, content=endless(), headers=client.headers("tools/list")
            )
            assert said.status_code == 413
            assert "/files/" in said.text
        declared = await client.http.post(
            server.mcp, content=b" " * (5 * MIB), headers=client.headers("tools/list")
        )
        assert declared.status_code == 413
        assert (await client.ask("tools/list")).status == 200
        assert server.peak_bytes - before < 24 * MIB


@pytest.mark.ways
async def test_bodies_are_bounded_for_each_principal(tmp_path: Path) -> None:
    """Bodies being read count: three endless calls hold no more than the quota."""
    with two_principals(tmp_path, "--quota", "body=1M") as (server, quiet, greedy):
        async with wire(server, quiet) as one, wire(server, greedy) as many, slow_calls() as calls:
            async with anyio.create_task_group() as tasks:
                answers: list[bytes] = []
                for _ in range(3):
                    stream = await calls.open(server, many.headers("tools/list"), greedy)
                    tasks.start_soon(calls.first_bytes, stream, answers)
                await until(lambda: bool(answers))
                tasks.cancel_scope.cancel()
            assert b" 429 " in answers[0]
            assert b"retry-after" in answers[0].lower()
            assert (await one.call("execute", code="'served'")).text == "'served'"
            await calls.end()
            with anyio.fail_after(60):
                while (await many.call("execute", code=f"1{' ' * 700_000}")).status != 200:
                    pass


class SlowCalls:
    """Calls whose bodies come to no end."""

    def __init__(self) -> None:
        self._open: list[SocketStream] = []

    async def open(
        self, server: HttpServer, headers: Mapping[str, str], token: str
    ) -> SocketStream:
        """Send the head of a call, and most of its body."""
        stream = await anyio.connect_tcp(*server.address)
        self._open.append(stream)
        about = {**headers, **bearer(token), "host": server.url[7:], "content-length": "500000"}
        lines = [f"{name}: {value}" for name, value in about.items()]
        head = "\r\n".join(["POST /mcp HTTP/1.1", *lines, "", ""])
        await stream.send(head.encode() + b" " * 450_000)
        return stream

    async def first_bytes(self, stream: SocketStream, into: list[bytes]) -> None:
        """Read the first bytes of the response."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            into.append(await stream.receive())

    async def end(self) -> None:
        """Hang up."""
        while self._open:
            await self._open.pop().aclose()


@asynccontextmanager
async def slow_calls() -> AsyncIterator[SlowCalls]:
    calls = SlowCalls()
    try:
        yield calls
    finally:
        await calls.end()


# 7. MCP sessions


@pytest.mark.ways
async def test_mcp_sessions_are_bounded_and_one_that_ends_makes_room(server: HttpServer) -> None:
    async with wire(server) as client:
        sessions = []
        for _ in range(MOST_OF_ONE + 1):
            said = await client.greet()
            if said.status != 200:
                break
            sessions.append(client.session)
            client.session = ""
        assert MOST_OF_ONE - 20 <= len(sessions) <= MOST_OF_ONE
        assert said.status in (429, 503)
        client.session = ""
        assert (await client.ask("tools/list")).status == 200, "the newest era needs none"
        for client.session in sessions:
            ended = await client.http.delete(server.mcp, headers=client.headers())
            assert ended.status_code == 200
        client.session = ""
        assert (await client.greet()).status == 200


@pytest.mark.ways
@pytest.mark.parametrize("while_", ["it imports", "it prepares", "it begins to serve"])
def test_a_server_that_is_stopped_while_it_starts_ends_in_order(while_: str) -> None:
    process = subprocess.Popen(
        command("--log-level", "info"), stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stderr is not None
        if while_ == "it imports":
            status = Path(f"/proc/{process.pid}/status")
            caught = 1 << (signal.SIGTERM - 1)
            while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) & caught:
                assert process.poll() is None
        else:
            word = "Building" if while_ == "it prepares" else "serving http"
            for line in process.stderr:
                if word in line or "serving http" in line:
                    break
        known = set(descendants(process.pid))
        process.terminate()
        log = process.stderr.read()
        assert process.wait(timeout=READY_S) == 0, log[-2000:]
        assert "Traceback" not in log, log[-4000:]
        assert ends(known) == []
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def test_no_answer_is_lost_whose_client_hangs_up_behind_it(server: HttpServer) -> None:
    async with http_agent(server, "legacy") as agent:
        await agent.run("here = 1")
        told = [notices(await agent.run("here")) for _ in range(60)]
    assert told == [[]] * 60


async def test_an_open_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    async def listen(token: str, begun: anyio.Event, ended: anyio.Event) -> None:
        async with wire(running, token, handshake=True) as client:
            with suppress(httpx2.HTTPError):
                async with client.http.stream("GET", client.url, headers=client.headers()) as said:
                    assert said.status_code == 200
                    begun.set()
                    await said.aread()
            ended.set()
            client.session = ""

    with two_principals(tmp_path) as (running, *tokens):
        events = [(anyio.Event(), anyio.Event()) for _ in tokens]
        async with anyio.create_task_group() as tasks:
            for token, pair in zip(tokens, events, strict=True):
                tasks.start_soon(listen, token, *pair)
                await pair[0].wait()
            revoke(tmp_path / "tokens", "one")
            with anyio.fail_after(READY_S):
                await events[0][1].wait()
            assert not events[1][1].is_set(), "the other principal's goes on"
            tasks.cancel_scope.cancel()
