"""Clients that end each connection behind their answer have read it, whoever closes first."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import httpx2
import pytest

from kernel_mcp.telemetry.logs import LINES
from tests.integration.httpclient import ACCEPT, META, MODERN, Said, bearer
from tests.integration.httpserver import READY_S, HttpServer, http_server

CELLS = 4
WORD = "which was running, has ended"

Post = Callable[[str, bytes, Mapping[str, str]], bytes]
"""Sends a body to an address with these headers; the body of its answer."""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def request(server: HttpServer, tool: str, **arguments: object) -> tuple[bytes, dict[str, str]]:
    """A call of a tool without an MCP session."""
    params = {"name": tool, "arguments": arguments, "_meta": META}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    named = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": tool}
    return json.dumps(body).encode(), {**ACCEPT, **named, **bearer(server.token)}


def called(server: HttpServer, post: Post, tool: str, url: str = "", **arguments: object) -> Said:
    """Return a tool's answer to a client that posts so."""
    body, headers = request(server, tool, **arguments)
    told = post(url or server.mcp, body, headers)
    kind = "application/json" if told.lstrip().startswith(b"{") else "text/event-stream"
    return Said(200, httpx2.Headers({"content-type": kind}), told)


def with_urllib(url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    asked = urllib.request.Request(url, body, dict(headers))
    with urllib.request.urlopen(asked, timeout=READY_S) as answer:
        return bytes(answer.read())


def with_http_1_0(url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    found = urlsplit(url)
    line = http.client.HTTPConnection(found.netloc, timeout=READY_S)
    line._http_vsn, line._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    line.request("POST", found.path, body, {**headers, "host": found.netloc})
    return line.getresponse().read()


def with_curl(url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    flags = [flag for name, value in headers.items() for flag in ("-H", f"{name}: {value}")]
    argv = ["curl", "--silent", "--fail", "--data-binary", "@-", *flags, url]
    return subprocess.run(argv, input=body, stdout=subprocess.PIPE, check=True).stdout


def kept_alive() -> Post:
    """One connection for all calls, as `requests.Session` has it."""
    client = httpx2.Client(timeout=READY_S)
    return lambda url, body, headers: client.post(url, content=body, headers=headers).content


@pytest.mark.parametrize("how", [with_urllib, with_http_1_0, with_curl, kept_alive()])
def test_what_a_client_has_read_is_not_told_again(server: HttpServer, how: Post) -> None:
    if how is with_curl and shutil.which("curl") is None:
        pytest.skip("requires curl")
    session = called(server, how, "create_session").data["session"]
    texts = [
        called(server, how, "execute", code=f"'cell {each}'", session=session).text
        for each in range(CELLS)
    ]
    assert texts == [f"'cell {each}'" for each in range(CELLS)]


NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{ listen {listen}; location / {{ proxy_pass {url}; proxy_set_header Host {host}; }} }}
}}
"""


@contextmanager
def nginx(url: str, folder: Path) -> Iterator[str]:
    """Run nginx with its defaults before a server; yields its address of MCP."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("requires nginx (Debian: nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    listen = f"127.0.0.1:{address[1]}"
    host = url.removeprefix("http://")
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, listen=listen, url=url, host=host))
    process = subprocess.Popen([program, "-e", "stderr", "-c", str(file), "-p", str(folder)])
    try:
        until = monotonic() + READY_S
        while process.poll() is None and monotonic() < until:
            with suppress(OSError):
                socket.create_connection(address, timeout=READY_S).close()
                break
        yield f"http://{listen}/mcp"
    finally:
        process.terminate()
        process.wait()


def test_what_nginx_has_read_is_not_told_again(server: HttpServer, tmp_path: Path) -> None:
    with nginx(server.url, tmp_path) as url:
        session = called(server, with_urllib, "create_session", url).data["session"]
        texts = [
            called(server, with_urllib, "execute", url, code=f"'cell {each}'", session=session).text
            for each in range(CELLS)
        ]
    assert texts == [f"'cell {each}'" for each in range(CELLS)]


def hang_up(server: HttpServer, connection: str, code: str, session: str) -> None:
    """Call `execute`, read the first bytes of its answer, and reset the connection."""
    body, headers = request(server, "execute", code=code, session=session)
    host = server.url.removeprefix("http://")
    head = {**headers, "host": host, "connection": connection, "content-length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in head.items()]
    with socket.create_connection(server.address, timeout=READY_S) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.sendall("\r\n".join(["POST /mcp HTTP/1.1", *lines, "", ""]).encode() + body)
        assert line.recv(8) == b"HTTP/1.1"


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("code", ["'small'", "print('large ' * 2_000_000)"], ids=["small", "large"])
def test_a_reset_in_the_middle_of_an_answer_is_no_delivery(
    server: HttpServer, connection: str, code: str
) -> None:
    session = called(server, with_urllib, "create_session").data["session"]
    hang_up(server, connection, code, session)
    told = called(server, with_urllib, "execute", session=session, code="'next'")
    assert WORD in told.text
    again = called(server, with_urllib, "execute", session=session, code="'next'")
    assert WORD not in again.text


FLOOD = 200


@pytest.mark.ways
def test_floods_of_requests_that_are_none_are_a_few_lines_and_a_count() -> None:
    with http_server() as flooded:
        upgrade = "GET /healthz HTTP/1.1\r\nHost: {}\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
        for each in range(FLOOD):
            junk = [b"junk %d\r\n\r\n" % each, upgrade.format(flooded.url[7:]).encode()]
            for text in junk:
                with socket.create_connection(flooded.address, timeout=READY_S) as line:
                    line.sendall(text)
                    line.recv(1)
            asked = urllib.request.Request(flooded.mcp, b"{}", {"Authorization": f"Bearer x{each}"})
            with suppress(urllib.error.HTTPError):
                urllib.request.urlopen(asked, timeout=READY_S)
    lines = flooded.log.splitlines()
    assert len([each for each in lines if "Invalid HTTP request" in each]) == LINES
    assert len(lines) < FLOOD
    assert any(f"{FLOOD - LINES} more lines of a kind" in each for each in lines), lines[-5:]
