"""Files of a session through the real server, with curl: of any size, whole, resumed, refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx2
import pytest

from tests.integration.httpclient import PATIENCE_S, bearer, until, wire
from tests.integration.httpserver import HttpServer, http_server

pytestmark = [pytest.mark.anyio]

CURL = shutil.which("curl")
MIB = 1024 * 1024
START = {"range": "bytes=0-4"}
GROWTH = 32 * MIB
"""Bytes by which the peak of the server's memory may rise, whatever is moved."""


@dataclass(frozen=True)
class Place:
    """A session of a server, and the address of its files."""

    server: HttpServer
    handle: str
    http: httpx2.AsyncClient

    def of(self, path: str) -> str:
        return f"{self.server.url}/sessions/{self.handle}/files/{path}"

    def curl(self, *arguments: str | Path) -> str:
        """The status of what curl asks for."""
        if CURL is None:
            pytest.skip("curl is missing")
        header = f"Authorization: Bearer {self.server.token}"
        done = subprocess.run(
            [CURL, "-sS", "-H", header, "-w", "%{stderr}%{http_code}", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.stderr[-3:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    flags = ("--workspace", str(folder / "w"), "--audit-log", str(folder / "audit.jsonl"))
    with http_server(*flags, "--disk", "6G") as running:
        yield running


@asynccontextmanager
async def placed(server: HttpServer, name: str) -> AsyncIterator[Place]:
    """A session of that name."""
    async with wire(server) as client:
        made = await client.call("create_session", name=name)
        async with httpx2.AsyncClient(headers=bearer(server.token), timeout=PATIENCE_S) as http:
            yield Place(server, made.data["session"], http)
        await client.call("close_session", session=name)


def sparse(path: Path, size: int) -> Path:
    """A file with something at both ends."""
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(size - 3)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    return path


def sha256_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(MIB):
            found.update(data)
    return found.hexdigest()


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(100 * MIB, id="M"),
        pytest.param(3 * 1024 * MIB + 1, id="G", marks=pytest.mark.ways),
    ],
)
async def test_a_large_file_goes_in_and_out_and_the_server_stays_small(
    server: HttpServer, folder: Path, tmp_path: Path, size: int
) -> None:
    async with placed(server, f"large-{size}") as place:
        assert place.curl("-T", sparse(tmp_path / "small", 100), place.of("small")) == "201"
        before = server.peak_bytes
        sent, got = sparse(tmp_path / "big", size), tmp_path / "got"
        assert place.curl("-T", sent, place.of("data/big")) == "201"
        assert place.curl(place.of("data/big"), "-o", got) == "200"
        assert server.peak_bytes - before < GROWTH
        wanted = sha256_of(sent)
        assert sha256_of(got) == wanted
        lines = (folder / "audit.jsonl").read_text().splitlines()
        noted = [found for line in lines if (found := json.loads(line))["event"] == "file"][-1]
        assert (noted["path"], noted["size"], noted["sha256"]) == ("data/big", size, wanted)
        assert (await place.http.delete(place.of("data/big"))).status_code == 204


async def test_a_download_is_resumed(server: HttpServer, tmp_path: Path) -> None:
    async with placed(server, "resumed") as place:
        whole = os.urandom(3 * MIB)
        (tmp_path / "whole").write_bytes(whole)
        assert place.curl("-T", tmp_path / "whole", place.of("a")) == "201"
        part = tmp_path / "part"
        part.write_bytes(whole[: MIB + 1])
        assert place.curl("-C", "-", place.of("a"), "-o", part) == "206"
        assert part.read_bytes() == whole


async def test_code_reads_what_was_put_and_what_it_writes_can_be_got(server: HttpServer) -> None:
    async with placed(server, "both") as place, wire(server) as client:
        put = await place.http.put(place.of("in/a.csv"), content=b"1,2")
        assert put.status_code == 201
        code = "n = open('in/a.csv').read(); open('in/a.csv', 'a').write('\\n3,4'); n"
        said = await client.call("execute", code=code, session=place.handle)
        assert "1,2" in said.text
        got = await place.http.get(place.of("in/a.csv"))
        assert got.text == "1,2\n3,4"
        late = await place.http.put(
            place.of("in/a.csv"), content=b"x", headers={"if-match": put.headers["etag"]}
        )
        assert late.status_code == 412


async def test_outputs_that_were_cut_are_whole_by_the_address_that_the_answer_names(
    server: HttpServer,
) -> None:
    async with placed(server, "cut") as place, wire(server) as client:
        code = "for n in range(100_000): print('line', n)"
        said = await client.call("execute", code=code, session=place.handle)
        base = f"{server.url}/sessions/{place.handle}"
        assert said.text.count(f"is {base}/… over HTTP") == 1
        assert server.token not in said.text
        got = await place.http.get(f"{base}/cells/1")
        assert got.text.splitlines() == [f"line {n}" for n in range(100_000)]
        book = await place.http.get(f"{base}/notebook")
        assert book.json()["cells"][0]["source"] == code


async def test_what_is_too_large_is_refused_before_it_is_sent(
    server: HttpServer, tmp_path: Path
) -> None:
    async with placed(server, "refused") as place:
        huge = sparse(tmp_path / "huge", 7 * 1024 * MIB)
        assert place.curl("-T", huge, place.of("huge")) == "413"
        assert place.curl("-H", "Expect:", "-T", huge, place.of("huge")) == "413"
        listed = (await place.http.get(place.of(""))).json()
        assert listed["entries"] == []


async def test_an_upload_that_breaks_off_leaves_nothing(server: HttpServer, folder: Path) -> None:
    async with placed(server, "broken") as place:
        (workspace,) = (folder / "w").rglob("broken")
        with socket.create_connection(server.address) as raw:
            raw.sendall(begun_upload(place))
            await until(lambda: server.opened_below(workspace) > 0)
        await until(lambda: server.opened_below(workspace) == 0)
        assert list(workspace.rglob("*")) == []
        assert (await place.http.get(place.of("new/a"))).status_code == 404


@pytest.mark.ways
async def test_readers_that_take_nothing_hold_neither_others_nor_memory(
    server: HttpServer, tmp_path: Path
) -> None:
    async with placed(server, "slow") as place:
        assert place.curl("-T", sparse(tmp_path / "big", 100 * MIB), place.of("big")) == "201"
        before = server.peak_bytes
        with ExitStack() as slow:
            for _ in range(16):
                raw = slow.enter_context(socket.create_connection(server.address))
                raw.sendall(slow_request(place))
                assert raw.recv(12) == b"HTTP/1.1 200"
            refused = await place.http.get(place.of("big"))
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
            assert server.peak_bytes - before < GROWTH
            async with wire(server) as client:
                assert not (await client.call("list_files", session=place.handle)).failed
        with anyio.fail_after(PATIENCE_S):
            while (got := await place.http.get(place.of("big"), headers=START)).status_code == 429:
                await anyio.lowlevel.checkpoint()
        assert got.content == b"begin"


def begun_upload(place: Place) -> bytes:
    head = (
        f"PUT /sessions/{place.handle}/files/new/a HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {place.server.token}\r\nContent-Length: 9000000\r\n\r\n"
    )
    return head.encode() + bytes(4 * MIB)


def slow_request(place: Place) -> bytes:
    return (
        f"GET /sessions/{place.handle}/files/big HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {place.server.token}\r\n\r\n"
    ).encode()


@pytest.mark.ways
async def test_transfers_that_run_do_not_hold_the_end_of_the_server(tmp_path: Path) -> None:
    with http_server("--drain", "1s") as server:
        async with placed_for_good(server) as place:
            assert place.curl("-T", sparse(tmp_path / "big", 50 * MIB), place.of("big")) == "201"
            with socket.create_connection(server.address) as raw:
                raw.sendall(slow_request(place))
                assert raw.recv(12) == b"HTTP/1.1 200"
                before = server.descriptors
                with socket.create_connection(server.address) as upload:
                    upload.sendall(begun_upload(place))
                    await until(lambda: server.descriptors >= before + 2)
                    known = server.processes
                    server.signal(signal.SIGTERM)
                    server.stopped(known=known)


@asynccontextmanager
async def placed_for_good(server: HttpServer) -> AsyncIterator[Place]:
    async with wire(server) as client:
        made = await client.call("create_session", name="last")
        async with httpx2.AsyncClient(headers=bearer(server.token), timeout=PATIENCE_S) as http:
            yield Place(server, made.data["session"], http)


async def test_no_token_no_file(server: HttpServer) -> None:
    async with placed(server, "closed") as place, httpx2.AsyncClient() as nobody:
        for method in ("GET", "PUT", "DELETE"):
            assert (await nobody.request(method, place.of("a"))).status_code == 401
