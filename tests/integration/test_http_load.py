"""Many clients, rude clients and foreign clients of one server, and its end under load.

How many there are is small here, and as large as a team is with `--full`.
"""

from __future__ import annotations

import json
import resource
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream

from tests.integration.httpclient import Said, Wire, bearer, until, wire
from tests.integration.httpserver import ROOT, HttpServer, http_server
from tests.integration.principals import many, two_principals

pytestmark = [pytest.mark.anyio]

KIB = 1024
MIB = 1024 * KIB
FORKED = ("--warm", "0")
"""Sessions come from the template, which is how many of them start."""
SPARE_DESCRIPTORS = 12
MOST_CONNECTIONS = 4096
NOTED = "open('n', 'a').write('x')"
"""A cell that leaves something behind each time it has run."""
PLACE = "kernel://{session}/{path}"


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Return True for the full load, False for a small one."""
    return bool(request.config.getoption("--full"))


def large(count: int) -> Any:
    return pytest.param(count, marks=pytest.mark.full)


# Many


@pytest.mark.parametrize("count", [4, large(64), large(256)])
async def test_clients_with_a_session_each_leave_nothing_behind(count: int) -> None:
    async def use(number: int, *, handshake: bool) -> None:
        async with wire(server, handshake=handshake) as client:
            session = (await client.call("create_session")).data["session"]
            await client.call("execute", code=f"x = {number}", session=session, wait=300)
            for _ in range(3):
                said = await client.call("execute", code="x", session=session, wait=300)
                assert said.text == str(number)
            await client.call("close_session", session=session)

    async def use_all() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(partial(use, number, handshake=bool(number % 2)))

    with http_server("--max-sessions", str(count), *FORKED) as server:
        await use(-1, handshake=True)
        descriptors = server.descriptors
        await use_all()
        await until(lambda: server.descriptors <= descriptors + SPARE_DESCRIPTORS)
        memory = server.memory_bytes
        await use_all()
        await until(lambda: server.descriptors <= descriptors + SPARE_DESCRIPTORS)
        assert server.memory_bytes - memory < 16 * MIB + count * 64 * KIB


@pytest.mark.parametrize("count", [large(20), large(200)])
async def test_principals_keep_their_pace_beside_a_greedy_one(count: int, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    taker, *tokens = many(file, count)
    flags = ("--quota", "sessions=2,cells=4,cpu=0.5,rate=50", "--max-sessions", str(count + 20))
    with http_server("--tokens", str(file), *flags, *FORKED, token=taker) as server:
        async with AsyncExitStack() as stack:
            others = [await stack.enter_async_context(wire(server, token)) for token in tokens]

            async def pace() -> float:
                times = []
                for other in others * (200 // count):
                    began = perf_counter()
                    said = await other.call("execute", code="1", wait=300)
                    times.append(perf_counter() - began)
                    assert said.text.splitlines()[0] == "1"
                return statistics.median(times)

            await pace()
            usual = await pace()
            argv = [sys.executable, "-m", "tests.integration.greedy", server.mcp, taker]
            async with await anyio.open_process(argv, cwd=ROOT, stderr=None) as greedy:
                assert greedy.stdout is not None
                await greedy.stdout.receive()
                beside = await pace()
                assert greedy.returncode is None
                greedy.kill()
            usual = max(usual, await pace())
            assert beside < 2 * usual, (usual, beside)


# The end


@pytest.mark.ways
@pytest.mark.parametrize("count", [6, large(100)])
async def test_a_signal_saves_what_every_principal_has_changed(count: int, tmp_path: Path) -> None:
    file, state = tmp_path / "tokens", tmp_path / "state"
    tokens = many(file, count)
    flags = ("--tokens", str(file), "--state-dir", str(state), "--max-sessions", str(count))

    async def each(code: str) -> list[str]:
        """Return the last cell's text of each, in a server that a signal ends at once."""
        said = []
        kept = {"KERNEL_MCP_PERSIST": "1G,1h"}
        with http_server(*flags, *FORKED, token=tokens[0], environ=kept) as server:
            for number, token in enumerate(tokens):
                async with wire(server, token) as client:
                    found = await client.call("execute", code=code.format(number), wait=300)
                    said.append(found.text)
        return said

    await each("kept = {}")
    found = await each("kept")
    assert [str(number) in text for number, text in enumerate(found)] == [True] * count, found


@pytest.mark.ways
async def test_a_signal_under_load_loses_no_answer_and_leaves_nobody(
    tmp_path: Path, *, full: bool
) -> None:
    for number in range(20 if full else 2):
        folder = tmp_path / str(number)
        await ended_under_load(folder)


async def ended_under_load(folder: Path) -> None:
    """End a server whose clients call as fast as they can; what ran has been answered."""
    names = [f"c{number}" for number in range(6)]
    answers = dict.fromkeys(names, 0)
    with http_server("--workspace", str(folder), "--drain", "60s", *FORKED) as server:
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for number, name in enumerate(names):
                client = await stack.enter_async_context(wire(server, handshake=number % 2 == 0))
                session = (await client.call("create_session", name=name)).data["session"]
                tasks.start_soon(_until_refused, client, session, answers, name)
            await until(lambda: min(answers.values()) > 3)
            known = server.processes
            server.signal()
        await anyio.to_thread.run_sync(lambda: server.stopped(known=known))
    ran = {name: len((file).read_text()) for name in names for file in folder.rglob(f"{name}/n")}
    assert ran == answers


async def _until_refused(client: Wire, session: str, answers: dict[str, int], name: str) -> None:
    with suppress(httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError):
        while True:
            said = await client.call("execute", code=NOTED, session=session, wait=300)
            if said.status == 503:
                break
            assert (said.status, said.failed) == (200, False), said.body
            answers[name] += 1
    client.session = ""


# Rude ones


@contextmanager
def descriptors_for(count: int) -> Iterator[None]:
    """As many descriptors for this process, if it may have them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < count + 1000:
        pytest.skip(f"takes {count} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count + 1000), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def streams(server: HttpServer, count: int) -> AsyncIterator[list[SocketStream]]:
    """So many connections on which nothing was sent yet."""
    async with AsyncExitStack() as stack:
        found: list[SocketStream] = []
        for _ in range(count):
            stream = await anyio.connect_tcp(*server.address)
            found.append(await stack.enter_async_context(stream))
        yield found


@pytest.mark.ways
async def test_idle_connections_take_no_more_than_their_number(*, full: bool) -> None:
    count = 10_000 if full else 300
    with http_server() as server, descriptors_for(count):
        async with wire(server) as client:
            assert (await client.call("execute", code="'served'")).text == "'served'"
            descriptors, memory = server.descriptors, server.memory_bytes
            async with streams(server, count):
                assert (await client.call("execute", code="'served'")).text == "'served'"
                most = min(count, MOST_CONNECTIONS)
                assert server.descriptors <= descriptors + most + SPARE_DESCRIPTORS
                assert server.memory_bytes - memory < 24 * MIB + most * 24 * KIB
            await until(lambda: server.descriptors <= descriptors + SPARE_DESCRIPTORS)
            assert (await client.call("execute", code="'served'")).text == "'served'"


async def answer_to(stream: SocketStream, pieces: AsyncIterator[bytes]) -> bytes:
    """Return the response while pieces are sent, until the server hangs up or has answered."""
    heard: list[bytes] = []

    async def listen(scope: anyio.CancelScope) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            heard.append(await stream.receive())
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen, tasks.cancel_scope)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for piece in pieces:
                await stream.send(piece)
    return b"".join(heard)


def head(server: HttpServer, token: str, *lines: str) -> bytes:
    about = [f"{name}: {value}" for name, value in bearer(token).items()]
    host = f"host: {server.url.removeprefix('http://')}"
    return "\r\n".join(["POST /mcp HTTP/1.1", host, *about, *lines, "", ""]).encode()


async def endless(first: bytes, piece: bytes) -> AsyncIterator[bytes]:
    yield first
    while True:
        yield piece


async def test_what_comes_to_no_end_is_answered_and_costs_next_to_nothing() -> None:
    chunk = b"%x\r\n%s\r\n" % (64 * KIB, b" " * 64 * KIB)
    with http_server() as server:
        chunked = "transfer-encoding: chunked"
        begun = head(server, server.token)[:-2]
        cases = {
            "a body": (head(server, server.token, chunked), chunk, b" 413 "),
            "nobody's body": (head(server, "", chunked), chunk, b" 401 "),
            "a header": (begun + b"x-long: ", b"x" * 1000, b" 400 "),
            "headers": (begun, b"x-more: x\r\n" * 100, b" 400 "),
            "a line": (b"POST /", b"x" * 1000, b" 400 "),
            "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"x", b" 400 "),
        }
        async with wire(server) as client:
            await client.call("execute", code="1")
            memory = server.peak_bytes
            for name, (first, piece, wanted) in cases.items():
                with anyio.fail_after(60):
                    stream = await anyio.connect_tcp(*server.address)
                    async with stream:
                        said = await answer_to(stream, endless(first, piece))
                # one that sends on may find its connection reset before it has read the answer
                assert wanted in said or not said, (name, said[:200])
                assert (await client.call("execute", code="'served'")).text == "'served'"
            assert server.peak_bytes - memory < 24 * MIB


@pytest.mark.ways
async def test_half_open_calls_and_slow_readers_keep_nobody_waiting() -> None:
    with http_server() as server:
        async with wire(server) as client, streams(server, 40) as rude:
            session = (await client.call("create_session")).data["session"]
            printed = await client.call(
                "execute", code="print(('x' * 99 + '\\n') * 50_000)", session=session
            )
            place = PLACE.format(session=session, path="cells/1")
            body, headers = client.request("resources/read", uri=place)
            text = json.dumps(body).encode()
            lines = [f"{name}: {value}" for name, value in headers.items()]
            asking = head(server, server.token, *lines, f"content-length: {len(text)}") + text
            memory = server.memory_bytes
            for number, stream in enumerate(rude):
                await stream.send(asking if number % 2 else asking[:-1])
            for _ in range(5):
                assert (await client.call("execute", code="'served'")).text == "'served'"
            assert not printed.failed
            assert server.memory_bytes - memory < 400 * MIB


# Strangers


async def test_tokens_that_are_wrong_are_answered_alike_and_audited(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with http_server("--audit-log", str(audit)) as server:
        good = server.token
        wrong = [
            "",
            "Bearer",
            f"Basic {good}",
            good,
            f"Bearer {good}x",
            f"Bearer {good[:-1]}",
            f"Bearer {good.upper()}",
            f"Bearer x {good}",
            f"Bearer {good} x",
            "Bearer " + "x" * 10_000,
            "Bearer kmcp_" + "\u00e9" * 20,
            "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJsb2NhbCJ9.",
            "Bearer null",
            "Bearer " + secrets.token_hex(),
        ]
        async with httpx2.AsyncClient() as http:
            client = Wire(http, server.mcp)
            body, headers = client.request("tools/list")
            for each in wrong:
                given = [(name.encode(), value.encode()) for name, value in headers.items()]
                given.append((b"authorization", each.encode("latin-1")))
                said = await http.post(server.mcp, json=body, headers=given)
                assert said.status_code == 401, each[:40]
                assert said.headers["www-authenticate"].startswith("Bearer")
                assert good not in said.text
            query = await http.post(f"{server.mcp}?access_token={good}", json=body, headers=headers)
            assert query.status_code == 401
            twice = [*headers.items(), *[("authorization", f"Bearer {good}")] * 2]
            assert (await http.post(server.mcp, json=body, headers=twice)).status_code == 400
    noted = audit.read_text()
    refused = [each for each in map(json.loads, noted.splitlines()) if each["event"] == "refused"]
    assert sum(each["count"] for each in refused) == len(wrong) + 2
    assert good not in noted


UNKNOWN = "s-AAAAAAAAAAAA"


async def test_a_stranger_reaches_nothing_and_learns_nothing(tmp_path: Path, *, full: bool) -> None:
    with two_principals(tmp_path, *FORKED) as (server, owner, stranger):
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(wire(server, owner, handshake=True))
            session = str((await own.call("create_session", name="theirs")).data["session"])
            await own.call("execute", code="secret = 'treasure'\nsecret", session=session)
            await own.call("write_file", path="f.txt", content="treasure", session=session)
            made = await own.call("branch", session=session, n=1)
            branch = str(made.data["branches"][0]["session"])
            script = await own.call("run_script", script="print('treasure')")
            recorded = str(script.message["result"]["_meta"]["kernel-mcp/cell"]["session"])
            ended = str((await own.call("create_session", name="gone")).data["session"])
            await own.call("execute", code="secret = 'treasure'\nsecret", session=ended)
            await own.call("close_session", session=ended)
            eras = [
                await stack.enter_async_context(wire(server, stranger, handshake=handshake))
                for handshake in (True, False)
            ]
            tries = 0
            for _ in range(8 if full else 1):
                for client in eras:
                    for each in (session, branch, recorded, ended):
                        tries += await tried(server, client, each)
            assert tries >= (500 if full else 60)
            borrowed, eras[0].session = eras[0].session, own.session
            lost = await eras[0].ask("tools/list")
            eras[0].session = "0" * len(own.session)
            unknown = await eras[0].ask("tools/list")
            assert (lost.status, lost.body) == (unknown.status, unknown.body)
            assert lost.status == 404
            eras[0].session = borrowed
            said = await own.call("execute", code="secret", session=session)
            assert said.text == "'treasure'"
            kept = await own.call("read_file", path="f.txt", session=session)
            assert kept.text == "treasure"
            if full:
                await equally_long(eras[1], session)


async def tried(server: HttpServer, client: Wire, session: str) -> int:
    """Reach for a session in every way; how often nothing came of it."""
    count = 0
    calls: dict[str, dict[str, Any]] = {
        "execute": {"code": "secret"},
        "wait": {},
        "interrupt": {},
        "reset": {},
        "close_session": {},
        "list_variables": {},
        "list_files": {},
        "read_file": {"path": "f.txt"},
        "write_file": {"path": "f.txt", "content": "taken"},
        "export_notebook": {"path": "n.ipynb"},
        "install": {"packages": ["cowsay"]},
        "list_packages": {},
        "undo": {},
        "branch": {},
        "check_syntax": {"code": "secret"},
        "info": {},
    }
    for tool, arguments in calls.items():
        foreign = await client.call(tool, **{**arguments, "session": session})
        unknown = await client.call(tool, **{**arguments, "session": UNKNOWN})
        assert "treasure" not in foreign.body.decode()
        assert alike(foreign, session) == alike(unknown, UNKNOWN), tool
        named = await client.call(tool, **{**arguments, "session": "theirs"})
        assert "treasure" not in named.body.decode()
        count += 2
    for path in ("files/f.txt", "cells/1", "cells/1.json", "cells/1/outputs/1", "notebook"):
        foreign = await client.ask("resources/read", uri=PLACE.format(session=session, path=path))
        unknown = await client.ask("resources/read", uri=PLACE.format(session=UNKNOWN, path=path))
        assert "treasure" not in foreign.body.decode()
        assert alike(foreign, session) == alike(unknown, UNKNOWN), path
        count += 1
    for path in ("files/f.txt", "files/%2e%2e/f.txt", "cells/1/outputs/1", "notebook"):
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            answers = [
                await client.http.request(method, f"{server.url}/sessions/{each}/{path}")
                for each in (session, UNKNOWN)
            ]
            foreign_text, unknown_text = [each.text for each in answers]
            assert answers[0].status_code == answers[1].status_code >= 400, (method, path)
            assert foreign_text.replace(session, UNKNOWN) == unknown_text
            count += 1
    return count


def alike(said: Said, session: str) -> tuple[int, str]:
    """An answer without what tells one request from another."""
    message = said.message
    found = message.get("result", message.get("error"))
    return said.status, json.dumps(found, sort_keys=True).replace(session, UNKNOWN)


async def equally_long(client: Wire, session: str) -> None:
    """An answer about a foreign session takes as long as one about an unknown."""
    times: dict[str, list[float]] = {session: [], UNKNOWN: []}
    for number in range(400):
        for each in sorted(times, reverse=bool(number % 2)):
            began = perf_counter()
            await client.call("execute", code="secret", session=each)
            times[each].append(perf_counter() - began)
    foreign, unknown = [statistics.median(each) for each in times.values()]
    assert 0.8 < foreign / unknown < 1.25
