"""Calls that cannot be served: a clear tool error, and the session is unharmed."""

# ruff: noqa: RUF001

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.integration.agent import ERAS
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]


async def test_words_for_nothing_mean_that_an_argument_is_not_given(servers: Servers) -> None:
    async with servers.agent() as notebook:
        session = (await notebook.run("x = 1")).cell["session"]
        for word in ("None", "null", " ", "\n"):
            given: Any = dict.fromkeys(("session", "timeout", "wait"), word)
            answer = await notebook.call("execute", code="x", **given)
            assert (answer.text, answer.cell["session"]) == ("1", session)
        made = await notebook.call("create_session", name="None", python="null", packages="null")
        assert made.data.get("name", "") == ""
        await notebook.call("write_file", path="null", content="None", encoding="null")
        assert (await notebook.call("read_file", path="null", encoding="None")).text == "None"
        listed = await notebook.call("list_files", match="null", session="null")
        assert "null  4 bytes" in listed.text


async def test_the_encoding_of_a_text_is_named_or_said_to_be_uncertain(servers: Servers) -> None:
    texts = {
        "cp1254": "ad;soyad\nAyşe;Yılmaz\n",
        "cp1253": "πόλη;πληθυσμός\nΑθήνα;664046\n",
        "cp1251": "МОСКВА;1\nКАЗАНЬ;2\n",
        "koi8-r": "Все люди рождаются свободными\n",
    }
    async with servers.agent() as notebook:
        for encoding, text in texts.items():
            data = base64.b64encode(text.encode(encoding)).decode()
            await notebook.call("write_file", path="text", content=data, encoding="base64")
            refused = await notebook.refused("read_file", path="text")
            assert f"its encoding looks like {encoding}. Read it with" in refused
            read = await notebook.call("read_file", path="text", encoding=encoding)
            assert read.text.strip() == text.strip()
        data = base64.b64encode("date,τιμή\n2024-01-01,3\n".encode("cp1253")).decode()
        await notebook.call("write_file", path="text", content=data, encoding="base64")
        refused = await notebook.refused("read_file", path="text")
        assert "looks like koi8-r, but is not certain (or cp1253)" in refused


@pytest.mark.parametrize("era", sampled(ERAS, "auto"))
async def test_bad_input_gets_a_clear_error_and_loses_nothing(era: str, servers: Servers) -> None:
    async with servers.agent(era=era) as notebook:
        await notebook.run("x = 1; open('latin.txt', 'wb').write(b'caf\\xe9')")
        assert "create_session" in await notebook.refused("execute", code="1", session="s-nope")
        assert "empty" in await notebook.refused("execute", code="  \n")
        assert "1,000,000" in await notebook.refused("execute", code="x" * 5_000_000)
        assert "timeout" in await notebook.refused("execute", code="1", timeout=-1)
        assert "wait" in await notebook.refused("execute", code="1", wait=-1)
        assert "outside" in await notebook.refused("read_file", path="../../etc/passwd")
        assert "outside" in await notebook.refused("write_file", path="/etc/x", content="y")
        assert await notebook.refused("read_file", path="missing.txt")
        assert "base64" in await notebook.refused(
            "write_file", path="a.bin", content="not base64!", encoding="base64"
        )
        assert "utf-8" in await notebook.refused(
            "write_file", path="a", content="b", encoding="utf-7"
        )
        assert await notebook.refused("execute")
        assert (await notebook.run("x")).text == "1"


async def test_a_binary_write_and_read_keep_every_byte(servers: Servers) -> None:
    async with servers.agent() as notebook:
        raw = bytes(range(256))
        await notebook.call(
            "write_file",
            path="raw.bin",
            content=base64.b64encode(raw).decode(),
            encoding="base64",
        )
        assert (
            await notebook.run("open('raw.bin','rb').read() == bytes(range(256))")
        ).text == "True"
        answer = await notebook.call("read_file", path="raw.bin", encoding="base64")
        assert not answer.failed
        assert base64.b64encode(raw).decode() in answer.text


async def test_a_foreign_and_a_closed_handle_get_the_same_error_as_an_unknown_one(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        handle = (await notebook.call("create_session")).data["session"]
        await notebook.call("close_session", session=handle)
        closed = await notebook.refused("execute", code="1", session=handle)
        unknown = await notebook.refused("execute", code="1", session="s-unknown")
        assert closed.replace(handle, "H") == unknown.replace("s-unknown", "H")


@pytest.mark.ways
async def test_the_quota_of_sessions_is_explained(servers: Servers) -> None:
    async with servers.agent("--max-sessions", "2") as notebook:
        for _ in range(2):
            handle = (await notebook.call("create_session")).data["session"]
            await notebook.run("import time; time.sleep(60)", session=handle, wait=0)
        assert "close_session" in await notebook.refused("create_session")
