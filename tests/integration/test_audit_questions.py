"""The audit trail of a server over HTTP answers who ran what, when, from where, with which file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.httpclient import bearer, http_agent, until
from tests.integration.principals import add, revoke
from tests.integration.test_http_operations import Operated, operating

pytestmark = [pytest.mark.anyio]


def events(operated: Operated, event: str) -> list[dict[str, Any]]:
    return [line for line in operated.trail if line["event"] == event]


async def test_who_ran_what_from_where_with_which_file_and_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "hidden-value-1")
    data, tokens = tmp_path / "data", tmp_path / "tokens"
    data.mkdir()
    ada = add(tokens, "ada", "--door", f"mount:{data},secret:API_KEY")
    flags = ["--tokens", str(tokens), "--mount", str(data), "--audit-code"]
    flags += ["--secret", "API_KEY@api.example.org"]
    with operating(*flags, token=ada) as operated:
        await operated.ready()
        server = operated.server
        proxied = {**bearer(ada), "x-request-id": "from-a-proxy"}
        async with http_agent(server) as notebook:
            code = "print('hidden-value-1')" + " " * 1000 + "# the end"
            await notebook.run(code)
            await notebook.call("write_file", path="a.txt", content="hello")
            await notebook.call("read_file", path="a.txt")
            await notebook.refused("read_file", path="missing.txt")
            session = (await notebook.call("info")).data["session"]
            url = f"{server.url}/sessions/{session}/files/a.txt"
            assert httpx2.get(url, headers=proxied).text == "hello"
            await notebook.client.read_resource(f"kernel://{session}/files/a.txt")
        (start,) = events(operated, "session_start")
        assert start["doors"]["mount"] == [f"{data}:ro"]
        assert start["doors"]["secret"] == ["API_KEY@api.example.org:Authorization"]
        (cell,) = events(operated, "cell")
        assert (cell["who"], cell["peer"], cell["session"]) == ("ada", "127.0.0.1", session)
        assert cell["request"]
        assert cell["code_sha256"] == hashlib.sha256(code.encode()).hexdigest()
        assert cell["code"].endswith("# the end")
        assert "hidden-value-1" not in (operated.folder / "audit").read_text()
        (written,) = events(operated, "file")
        assert (written["path"], written["peer"]) == ("a.txt", "127.0.0.1")
        read = events(operated, "file_read")
        assert [each["path"] for each in read] == ["a.txt"] * 3
        assert {each["peer"] for each in read} == {"127.0.0.1"}
        assert read[1]["request"] == "from-a-proxy"
        assert len({each["request"] for each in (cell, written, *read)}) == 5


async def test_the_trail_names_the_rows_of_tokens_that_changed(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    ada = add(tokens, "ada")
    with operating("--tokens", str(tokens), token=ada) as operated:
        await operated.ready()
        bob = hashlib.sha256(add(tokens, "bob").encode()).hexdigest()[:8]
        await until(lambda: f"added {bob} of bob" in str(events(operated, "tokens")))
        revoke(tokens, "bob")
        await until(lambda: f"removed {bob} of bob" in str(events(operated, "tokens")))
        assert ada not in str(operated.trail)
