"""The proxy of the network door as a process: what it connects to, refuses and bears."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.connection import HEAD_S
from kernel_mcp.network.proxy import DESCRIPTORS, MEMORY_BYTES, MOST_OF_ONE
from tests.integration.two_networks import (
    METADATA,
    OTHER,
    OWN,
    PRIVATE,
    PROXY_USER,
    PUBLIC,
    SIX,
    Networks,
    two_networks,
)
from tests.tls_hosts import trust_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
INNER = ((PRIVATE, 80), (PRIVATE, 443), (METADATA, 80), ("127.0.0.1", 80), (OWN, 80))


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    with two_networks() as found:
        yield found


@asynccontextmanager
async def serving(
    networks: Networks, place: tuple[str, int], handler: Handler, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """A host at one of the places."""
    running: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            running.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(served, sock=networks.sockets[place].dup(), ssl=tls)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request with its head and body, or as its path says."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        line = head.split(b"\r\n")[0].decode()
        path = line.split()[1]
        body = b""
        if b"content-length: " in head.lower():
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        elif b"chunked" in head.lower():
            body = await reader.readuntil(b"0\r\n\r\n")
        if path.startswith("/to/"):
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {path[4:]}\r\n".encode())
            writer.write(b"Content-Length: 0\r\n\r\n")
        elif path == "/two-lengths":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n")
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        elif path == "/chunks":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
        elif path == "/until-the-end":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"y" * 100_000)
            return
        elif path == "/socket":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n")
            writer.write(b"Connection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\nfirst")
            while data := await reader.read(100):
                writer.write(data.upper())
            return
        else:
            said = head + body
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
        await writer.drain()


async def answered(port: int, data: bytes) -> bytes:
    """All that a session gets for these bytes; it says no more than them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


def request(url: str, *more: str, method: str = "GET") -> bytes:
    host = url.split("/")[2]
    lines = [f"{method} {url} HTTP/1.1", f"Host: {host}", "Connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def got(port: int, url: str, *more: str) -> tuple[int, str]:
    """Status and the rest of what comes for a GET."""
    said = (await answered(port, request(url, *more))).decode()
    return int(said.split()[1]), said


async def tunnelled(
    port: int, place: str
) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """A CONNECT, and its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    return status, reader, writer


async def over_tls(port: int, place: str, name: str | None, authority: Authority) -> str:
    """Return a host's answer through a tunnel over TLS to `name`, or why there is none."""
    status, _, writer = await tunnelled(port, place)
    assert status == 200
    context = trust_of(authority)
    context.check_hostname = False
    sock = writer.get_extra_info("socket").dup()
    sock.setblocking(True)
    sock.settimeout(60)
    writer.transport.pause_reading()  # type: ignore[attr-defined]

    def talk() -> str:
        try:
            with context.wrap_socket(sock, server_hostname=name) as tls:
                tls.sendall(b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n")
                return tls.recv(1000).decode()
        except OSError as reason:
            return f"no: {reason}"

    try:
        return await anyio.to_thread.run_sync(talk)
    finally:
        writer.close()


async def test_requests_reach_public_names_that_are_permitted(networks: Networks) -> None:
    number, port = networks.listen("web.test,*.web.test,six.test")
    async with serving(networks, (PUBLIC, 80), web), serving(networks, (SIX, 80), web):
        status, said = await got(port, "http://web.test/a?b", "X-A: b", "Proxy-Connection: close")
        assert status == 200
        assert "GET /a?b HTTP/1.1\r\n" in said
        assert "x-a: b" in said
        assert "roxy" not in said
        assert (await got(port, "http://www.web.test/"))[0] == 200
        assert (await got(port, "http://six.test/"))[0] == 200
        told = await networks.told(number)
        assert (told["host"], told["port"], told["verdict"]) == ("web.test", 80, "ok")
        assert told["up"] > 0 < told["down"]


async def test_requests_follow_each_other_on_one_connection(networks: Networks) -> None:
    _, port = networks.listen("web.test,other.test")
    body = b"x" * 300_000
    async with serving(networks, (PUBLIC, 80), web), serving(networks, (OTHER, 80), web):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for host in ("web.test", "web.test", "other.test"):
            writer.write(f"POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\n".encode())
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.write(b"POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        for host in ("web.test", "web.test", "other.test"):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            said = await reader.readexactly(length)
            assert f"host: {host}".encode() in said
            assert said.endswith(body)
        assert b"abc" in await reader.readuntil(b"abc\r\n0\r\n\r\n")
        writer.close()


async def test_answers_of_every_length_come_whole(networks: Networks) -> None:
    _, port = networks.listen("web.test")
    async with serving(networks, (PUBLIC, 80), web):
        assert (await answered(port, request("http://web.test/chunks"))).count(b"x") == 5000
        assert (await answered(port, request("http://web.test/until-the-end"))).count(
            b"y"
        ) == 100_000
        status, said = await got(port, "http://web.test/two-lengths")
        assert status == 502
        assert "both" in said


async def test_an_answer_before_the_end_of_a_request_reaches_who_still_sends(
    networks: Networks,
) -> None:
    _, port = networks.listen("web.test")

    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 too large\r\nContent-Length: 0\r\n\r\n")

    async with serving(networks, (PUBLIC, 80), full):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("http://web.test/", "Content-Length: 900000", method="PUT"))
        await asyncio.wait_for(reader.readuntil(b"413 too large\r\n"), 60)
        writer.write(bytes(500_000))
        await writer.drain()
        writer.write_eof()
        assert (await reader.read()).lower().startswith(b"content-length: 0\r\n")
        writer.close()


async def test_a_request_for_a_websocket_gets_one(networks: Networks) -> None:
    _, port = networks.listen("web.test")
    asked = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\nearly"
    tunnel = b"CONNECT web.test:80 HTTP/1.1\r\n\r\n"
    async with serving(networks, (PUBLIC, 80), web):
        for first, begin in (
            (b"", b"GET http://web.test/socket HTTP/1.1\r\nHost: web.test\r\n"),
            (tunnel, b"GET /socket HTTP/1.1\r\nHost: web.test\r\n"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if first:
                writer.write(first)
                await reader.readuntil(b"\r\n\r\n")
            writer.write(begin + asked)
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(10) == b"firstEARLY"
            writer.write(b"more")
            assert await reader.readexactly(4) == b"MORE"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()


async def test_no_name_leads_to_an_address_that_is_not_public(networks: Networks) -> None:
    number, port = networks.listen("*")
    for name in (
        *("loop.test", "loop6.test", "mapped.test", "nat.test", "6to4.test", "inner.test"),
        *("meta.test", "own.test", "mixed.test", "localhost"),
    ):
        status, said = await got(port, f"http://{name}/")
        assert (status, name in said) == (403 if name != "localhost" else status, True)
        assert status in (403, 502)
        assert (await networks.told(number))["verdict"] in ("refused", "failed")
        status, _, writer = await tunnelled(port, f"{name}:443")
        assert status in (403, 502)
        writer.close()
    assert networks.untouched(*INNER)


async def test_no_address_is_reached_by_another_spelling(networks: Networks) -> None:
    _, port = networks.listen("*,8.8.8.8")
    for host in (
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "0x7f.1"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
        *(
            "169.254.169.254",
            "2852039166",
            "0xa9fea9fe",
            "[::ffff:169.254.169.254]",
            "0",
            "0.0.0.0",
        ),
        *("127.0.0.1.", "[fe80::1%25near]", PUBLIC, OWN, PRIVATE),
    ):
        for data in (request(f"http://{host}/"), f"CONNECT {host}:443 HTTP/1.1\r\n\r\n".encode()):
            assert (await answered(port, data)).split()[1] in (b"400", b"403"), host
    for host, words in ((METADATA, "any rule: it is link-local"), (PRIVATE, "have it named")):
        assert words in (await got(port, f"http://{host}/"))[1]
    assert networks.untouched(*INNER, (PUBLIC, 80), (PUBLIC, 443))


async def test_redirects_lead_nowhere_else(networks: Networks) -> None:
    _, port = networks.listen("web.test,*.web.test")
    async with serving(networks, (PUBLIC, 80), web):
        for target in (
            *("http://169.254.169.254/", "http://[::ffff:127.0.0.1]/", "http://2130706433/"),
            *("http://0x7f.1/", "http://other.test/", "http://web.test:22/", "http://meta.test/"),
        ):
            said = await answered(port, request(f"http://web.test/to/{target}"))
            location = said.partition(b"Location: ")[2] or said.partition(b"location: ")[2]
            assert location.split(b"\r\n")[0].decode() == target
            assert (await answered(port, request(target))).split()[1] in (b"400", b"403")
    assert networks.untouched(*INNER, (OTHER, 80), (PUBLIC, 22))


async def test_a_name_that_leads_elsewhere_is_followed_no_more(networks: Networks) -> None:
    _, port = networks.listen("web.test")
    async with serving(networks, (PUBLIC, 80), web):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = b"GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n"
        writer.write(first)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        try:
            for addresses in (["127.0.0.1"], [PUBLIC, "127.0.0.1"], ["::1", PUBLIC]):
                networks.name("web.test", *addresses)
                assert (await got(port, "http://web.test/"))[0] == 403
        finally:
            networks.name("web.test", PUBLIC)
        writer.close()
        assert (await got(port, "http://web.test/"))[0] == 200
    assert networks.untouched(("127.0.0.1", 80))


async def test_tls_is_for_the_name_of_the_tunnel(networks: Networks) -> None:
    number, port = networks.listen(f"web.test,{PUBLIC}")
    authority = Authority(["web.test"])
    context = authority.context("web.test")
    context.sni_callback = lambda *_: None
    async with serving(networks, (PUBLIC, 443), web, context):
        assert "200 OK" in await over_tls(port, "web.test:443", "web.test", authority)
        assert (await networks.told(number))["verdict"] == "ok"
        assert "200 OK" in await over_tls(port, "WEB.test.:443", "Web.Test", authority)
        assert (await networks.told(number))["verdict"] == "ok"
        for name in ("other.test", "www.web.test", None):
            said = await over_tls(port, "web.test:443", name, authority)
            assert "unrecognized name" in said.lower().replace("_", " ")
            told = await networks.told(number)
            assert told["verdict"] == "refused"
            assert "SNI" in told["why"]
        assert "200 OK" in await over_tls(port, f"{PUBLIC}:443", None, authority)
        assert (await networks.told(number))["verdict"] == "ok"
        assert "no: " in await over_tls(port, f"{PUBLIC}:443", "web.test", authority)


async def test_what_is_no_tls_goes_through_no_tunnel(networks: Networks) -> None:
    number, port = networks.listen("web.test")
    for place in ("web.test:22", "web.test:8443", "www.web.test:443"):
        status, _, writer = await tunnelled(port, place)
        assert status == 403
        writer.close()
        assert (await networks.told(number))["verdict"] == "refused"
    for data in (b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n", b"\x80\x2e\x01\0"):
        status, reader, writer = await tunnelled(port, "web.test:443")
        assert status == 200
        writer.write(data)
        assert b" 403 web.test:443 is for TLS" in await reader.read()
        writer.close()
        assert (await networks.told(number))["verdict"] == "refused"
    _, said = await got(port, "http://web.test:443/")
    assert " 403 web.test:443 is for TLS" in said
    assert (await networks.told(number))["verdict"] == "refused"
    async with serving(networks, (PUBLIC, 80), web):
        status, reader, writer = await tunnelled(port, "web.test:80")
        writer.write(b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
        assert b" 421 " in await reader.read()
        writer.close()
        status, reader, writer = await tunnelled(port, "web.test:80")
        writer.write(b"SSH-2.0-x\r\n\r\n")
        assert b" 400 " in await reader.read()
        writer.close()


async def test_no_request_is_smuggled_behind_another(networks: Networks) -> None:
    _, port = networks.listen("web.test")
    hidden = b"GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n"
    begin = b"POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\n"
    seen: list[bytes] = []

    async def noting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with serving(networks, (PUBLIC, 80), noting), serving(networks, (OTHER, 80), noting):
        for framing in (
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 0\r\nContent-Length: 70\r\n\r\n",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
            b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
            b"X: y\r\n Content-Length: 70\r\n\r\n",
            b"X: y\nContent-Length: 70\r\n\r\n",
            b"Connection: Content-Length\r\nContent-Length: 70\r\n\r\n",
        ):
            said = await answered(port, begin + framing + hidden)
            assert said.startswith(b"HTTP/1.1 400 ")
            assert said.count(b"HTTP/1.1 ") == 1
        assert seen == []
        said = await answered(port, begin + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n" + hidden)
        assert said.count(b"HTTP/1.1 ") == 1  # 400, or the host was quicker
        said = await answered(port, begin + b"Content-Length: 0\r\n\r\n" + hidden)
        assert (said.count(b" 200 "), said.count(b" 403 ")) == (1, 1)
        assert all(b"other.test" not in each for each in seen)
    assert networks.untouched((OTHER, 80))


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """All that comes while and after this is sent."""

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.ensure_future(send())
    said = await reader.read(-1)
    await sending
    writer.close()
    return said


async def test_an_exact_place_gets_the_bytes_as_they_are(networks: Networks) -> None:
    rules = f"db.test:5432,web.test:5432,{PRIVATE}:443,127.0.0.1:80"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write(b"end")

    data = hashlib.sha256(b"x").digest() * 100_000
    async with (
        serving(networks, (PUBLIC, 5432), echo),
        serving(networks, (PRIVATE, 443), echo),
        serving(networks, ("127.0.0.1", 80), echo),
    ):
        for place in ("web.test:5432", f"{PRIVATE}:443", "127.0.0.1:80"):
            number, port = networks.listen(rules, exact=place)
            _, proxy = networks.listen(rules)
            status, inward, outward = await tunnelled(proxy, place)
            assert status == 200
            straight = await asyncio.open_connection("127.0.0.1", port)
            for reader, writer in (straight, (inward, outward)):
                assert await echoed(reader, writer, data) == data + b"end"
            told = await networks.told(number)
            assert (told["verdict"], told["up"], told["down"]) == ("ok", len(data), len(data) + 3)
    number, port = networks.listen("*", exact="web.test:443")
    assert await answered(port, b"x") == b""
    assert (await networks.told(number))["verdict"] == "refused"


async def test_who_takes_too_long_loses_the_connection_and_others_do_not(
    networks: Networks,
) -> None:
    slow, port = networks.listen("web.test")
    _, other = networks.listen("web.test")

    async def drip(first: bytes, drops: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        reading = asyncio.ensure_future(reader.read())
        with suppress(OSError):
            for drop in drops:
                writer.write(bytes([drop]))
                await writer.drain()
                if (await asyncio.wait({reading}, timeout=0.5))[0]:
                    break
        writer.close()
        return await reading

    loop = asyncio.get_running_loop()
    async with serving(networks, (PUBLIC, 80), web), serving(networks, (PUBLIC, 443), web):
        began = loop.time()
        drips = [
            asyncio.ensure_future(each)
            for each in (
                *(drip(b"GET http://web.test/ HTTP/1.1\r\n", b"X: y\r\n" * 100) for _ in range(50)),
                drip(
                    b"CONNECT web.test:443 HTTP/1.1\r\n\r\n",
                    b"\x16\x03\x01\x0f\xff" + b"\x01" * 999,
                ),
            )
        ]
        while not drips[0].done():
            assert (await got(other, "http://web.test/"))[0] == 200
            await asyncio.wait(drips[:1], timeout=1)
        said = await asyncio.gather(*drips)
        assert loop.time() - began >= HEAD_S
        assert all(each.startswith(b"HTTP/1.1 504 ") for each in said[:-1])
        assert said[-1].endswith(b"\r\n\r\n")
    assert (await networks.told(slow))["verdict"] == "failed"


async def wait(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """A host that says nothing."""
    await reader.read()


@pytest.mark.parametrize("total", [1000, pytest.param(10_000, marks=pytest.mark.full)])
async def test_ten_thousand_connections_are_borne_and_counted(
    networks: Networks, total: int
) -> None:
    flood, port = networks.listen("web.test:5432,web.test")
    _, other = networks.listen("web.test")
    asked = request("http://web.test/")
    counts: dict[int, int] = {}

    async def some(count: int) -> None:
        for _ in range(count):
            said = await answered(port, asked)
            status = int(said.split()[1])
            counts[status] = counts.get(status, 0) + 1

    async with serving(networks, (PUBLIC, 80), web), serving(networks, (PUBLIC, 5432), wait):
        held = [await tunnelled(port, "web.test:5432") for _ in range(MOST_OF_ONE)]
        before = int(networks.status("VmRSS").split()[0])
        tasks = [asyncio.ensure_future(some(total // 50)) for _ in range(50)]
        served = 0
        while sum(counts.values()) < total:
            assert (await got(other, "http://web.test/"))[0] == 200
            served += 1
        await asyncio.gather(*tasks)
        assert int(networks.status("VmRSS").split()[0]) - before < 16 * 1024
        for _, _, writer in held:
            writer.close()
    assert counts == {503: total}
    assert served > 5
    told = records = 0
    while told < total:
        record = await networks.told(flood)
        told += record["count"] if record["why"].startswith("this session has") else 0
        records += 1
    assert records < MOST_OF_ONE + 200


@pytest.mark.ways
async def test_a_session_that_reads_nothing_costs_little_memory(networks: Networks) -> None:
    number, port = networks.listen("web.test:5432")
    before = int(networks.status("VmRSS").split()[0])

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read(100)
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    async with serving(networks, (PUBLIC, 5432), pour):
        writers = []
        for _ in range(MOST_OF_ONE):
            status, reader, writer = await tunnelled(port, "web.test:5432")
            assert status == 200
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"x")
            writers.append((reader, writer))
        for reader, writer in writers:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            await reader.readexactly(1)
        after = int(networks.status("VmRSS").split()[0])
        networks.close(number)
        for _, writer in writers:
            writer.close()
    assert after - before < 32 * 1024


async def test_a_listener_that_is_closed_takes_its_connections_along(networks: Networks) -> None:
    number, port = networks.listen("web.test:5432")
    descriptors = len(list(Path(f"/proc/{networks.pid}/fd").iterdir()))

    async with serving(networks, (PUBLIC, 5432), wait):
        open_ones = [await tunnelled(port, "web.test:5432") for _ in range(5)]
        networks.close(number)
        for _, reader, writer in open_ones:
            assert await reader.read() == b""
            writer.close()
        told = [await networks.told(number) for _ in open_ones]
    assert {(each["host"], each["verdict"]) for each in told} == {("web.test", "failed")}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert len(list(Path(f"/proc/{networks.pid}/fd").iterdir())) <= descriptors


async def test_what_is_no_listener_is_not_taken(networks: Networks) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as sock:
            number = networks.give(sock, "*")
            assert (await networks.told(number))["failed"] == number


def test_the_process_has_no_rights_and_bounds(networks: Networks) -> None:
    if os.geteuid() == 0:
        assert networks.status("Uid").split() == [str(PROXY_USER)] * 4
        assert networks.status("Groups") == ""
    assert networks.status("NoNewPrivs") == "1"
    assert int(networks.status("CapEff"), 16) == int(networks.status("CapPrm"), 16) == 0
    limits = Path(f"/proc/{networks.pid}/limits").read_text()
    for name, value in (
        ("Max address space", MEMORY_BYTES),
        ("Max open files", DESCRIPTORS),
        ("Max core file size", 0),
        ("Max file size", 0),
    ):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert line.removeprefix(name).split()[:2] == [str(value)] * 2


@pytest.mark.ways
def test_the_process_ends_with_its_server() -> None:
    with two_networks() as found:
        process = Path(f"/proc/{found.pid}")
        assert process.exists()
        found.control.close()
    assert not process.exists()
