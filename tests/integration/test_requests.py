"""Lines that are no requests: each is answered, none ends the server or costs a variable."""

from __future__ import annotations

import json

import pytest

from tests.integration.rawclient import RawClient, raw_client

pytestmark = [pytest.mark.anyio]

MIB = 1024 * 1024
OVERSIZED = 270_000_000


def execute(number: bytes, code: bytes) -> bytes:
    """A call of `execute` whose code is what a client put between the quotes."""
    return (
        b'{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":'
        b'{"name":"execute","arguments":{"code":"%s"}}}\n' % (number, code)
    )


async def test_odd_lines_are_answered_and_the_server_goes_on() -> None:
    async with raw_client("--no-template") as client:
        assert "1" in await client.call("execute", code="x = 1; x")
        await client.send(execute(b'"surrogate"', rb"'a\ud800b'"))
        said = await client.answer("surrogate")
        assert said["result"]["content"][0]["text"] == "'a\ufffdb'"
        assert await client.call("execute", code="print(chr(0xd800)); chr(0xdfff)")
        assert await client.call("execute", code="raise ValueError(chr(0xd800))")
        await client.send(execute(b'"latin"', b"'caf\xe9'"))
        assert "caf\ufffd" in json.dumps(await client.answer("latin"), ensure_ascii=False)
        for number, line in (
            (1, b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b"[" * 100_000),
            (2, b'[{"jsonrpc":"2.0","id":2,"method":"ping"}]'),
            (3, execute(b"3", b"1\x002").strip()),
            (4, b'{"jsonrpc":"2.0","id":4,"method":"tools/call","params":7}'),
            (5.5, execute(b"5.5", b"1").strip()),
            (6, b'{"jsonrpc":"2.0","id":6,"method":6}'),
            (7, execute(b"7", b"1").strip() + b"}"),
        ):
            await client.send(line + b"\n")
            assert (await client.answer(number))["error"]["code"] in (-32600, -32700)
        await client.send(b"nonsense\n\n\xff\xfe\n" + execute(b"true", b"1"))
        await client.send(b'{"jsonrpc":"2.0","id":8,"id":9,"method":"ping"}\n')
        assert (await client.answer(9))["result"] == {}
        assert len(client.errors) == 3
        nan = b'{"name":"execute","arguments":{"code":"1","timeout":NaN,"wait":Infinity}}'
        await client.send(b'{"jsonrpc":"2.0","id":10,"method":"tools/call","params":%s}\n' % nan)
        assert "result" in await client.answer(10)
        assert await client.call("execute", code="x") == "1"


@pytest.mark.ways
async def test_a_line_of_270_megabytes_is_dropped_and_answered() -> None:
    async with raw_client("--no-template") as client:
        assert "1" in await client.call("execute", code="x = 1; x")
        before = client.memory_bytes
        await flood(client, b'{"jsonrpc":"2.0","id":"first","method":"tools/call","params":{"a":"')
        await client.send(b'"}}\n')
        said = await client.answer("first")
        assert said["error"]["code"] == -32600
        assert "several parts" in said["error"]["message"]
        await flood(client, b'{"params":{"a":"')
        await client.send(b'"},"method":"tools/call","jsonrpc":"2.0","id":"last"}\n')
        assert (await client.answer("last"))["error"]["code"] == -32600
        assert client.memory_bytes - before < 256 * MIB
        assert await client.call("execute", code="x") == "1"


async def flood(client: RawClient, head: bytes) -> None:
    await client.send(head)
    piece = b"x" * MIB
    for _ in range(OVERSIZED // MIB):
        await client.send(piece)
