"""Tokens of a file: who has one may call, as long as the file says so."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import (
    OPERATOR,
    RUN,
    OneToken,
    Principal,
    Unauthenticated,
    digest,
    new_token,
    tokens,
)
from kernel_mcp.identity.tokens import TokenFile
from tests.integration.httpclient import until

pytestmark = pytest.mark.anyio


def line(token: str, principal: str = "alice", **more: Any) -> str:
    return json.dumps({"principal": principal, "sha256": digest(token).hex(), **more}) + "\n"


def write(path: Path, *rows: str) -> None:
    """Put rows there in one step, as the command does."""
    fresh = path.with_name("fresh")
    fresh.write_text("".join(rows))
    fresh.chmod(0o600)
    fresh.rename(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


async def refused(verifier: TokenFile, token: str) -> bool:
    try:
        await verifier.verify(token)
    except Unauthenticated:
        return True
    return False


async def test_a_token_is_its_principals(path: Path) -> None:
    token, other = new_token(), new_token()
    write(
        path,
        line(token, scopes=[RUN], quotas={"sessions": 2}, doors=["network"]),
        line(other, "bob"),
    )
    found = TokenFile(path)
    assert await found.verify(token) == Principal(
        "alice", frozenset({RUN}), Quotas(sessions=2), ("network",)
    )
    assert (await found.verify(other)).name == "bob"
    for wrong in ("", "kmcp_", token[:-1], token + "x", digest(token).hex(), "ü\udc80", "x" * 9999):
        with pytest.raises(Unauthenticated, match="not valid here"):
            await found.verify(wrong)


async def test_a_row_for_a_claim_lets_no_token_of_ours_in(path: Path) -> None:
    write(path, '{"claim": "groups=x"}\n')
    found = TokenFile(path)
    assert await refused(found, "")
    row = await found.claimed({"groups": ["x"]})
    assert row is not None
    assert await found.claimed({"groups": ["y"]}) is None


async def test_several_tokens_are_of_one_principal(path: Path) -> None:
    write(path, line("kmcp_1"), line("kmcp_2"))
    found = TokenFile(path)
    assert await found.verify("kmcp_1") == await found.verify("kmcp_2")


async def test_what_changes_holds_from_the_next_call_on(path: Path) -> None:
    write(path, line("kmcp_1"), line("kmcp_2", "bob"))
    found = TokenFile(path)
    write(path, line("kmcp_2", "bob"), line("kmcp_3", "carol"))
    assert await refused(found, "kmcp_1")
    assert (await found.verify("kmcp_3")).name == "carol"


async def test_a_change_in_place_of_the_same_size_and_moment_is_seen(path: Path) -> None:
    write(path, line("kmcp_1"))
    found = TokenFile(path)
    path.write_text(line("kmcp_2"))
    assert await refused(found, "kmcp_1")
    assert not await refused(found, "kmcp_2")


async def test_an_unchanged_file_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, line("kmcp_1"))
    os.utime(path, (1, 1))
    found = TokenFile(path)
    monkeypatch.setattr(tokens, "read_tokens", lambda _: pytest.fail("read again"))
    assert not await refused(found, "kmcp_1")


@pytest.mark.parametrize(
    "broken", ["{", line("kmcp_2") + "\x00", line("kmcp_2", "../x")], ids=["cut", "nul", "name"]
)
async def test_a_broken_version_changes_nothing_and_is_logged_once(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, line("kmcp_1"))
    found = TokenFile(path)
    write(path, broken)
    for _ in range(3):
        assert not await refused(found, "kmcp_1")
        assert await refused(found, "kmcp_2")
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"{path}, line " in errors[0]
    write(path, line("kmcp_2"))
    assert await refused(found, "kmcp_1")
    assert not await refused(found, "kmcp_2")


async def test_without_its_file_nobody_may_call(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, line("kmcp_1"))
    found = TokenFile(path)
    path.unlink()
    assert await refused(found, "kmcp_1")
    assert await refused(found, "kmcp_1")
    assert caplog.text.count("is gone: nobody may call") == 1
    write(path, line("kmcp_1"))
    assert not await refused(found, "kmcp_1")


async def test_principals_lose_their_last_row_only_by_a_whole_file_without_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "LOOK_S", 0.01)
    first, second, bobs = line("kmcp_1", "ada"), line("kmcp_2", "ada"), line("kmcp_3", "bob")
    write(path, first, second, bobs)
    known, told = TokenFile(path), anyio.Event()
    gone: list[frozenset[str]] = []

    async def ended(names: frozenset[str]) -> None:
        gone.append(names)
        told.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(known.watch, ended)
        path.unlink()
        await until(lambda: not known.rows)
        path.touch(0o600)
        write(path, second, bobs)
        await until(lambda: len(known.rows) == 2)
        write(path, second)
        await told.wait()
        tasks.cancel_scope.cancel()
    assert gone == [frozenset({"bob"})]


async def test_a_version_that_others_may_write_is_not_believed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, line("kmcp_1"))
    found = TokenFile(path)
    write(path, line("kmcp_2"))
    path.chmod(0o620)
    assert await refused(found, "kmcp_2")
    assert "others may write to" in caplog.text
    path.chmod(0o600)
    assert not await refused(found, "kmcp_2")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    write(path, line("kmcp_1"))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"--tokens: others may write to .*chmod go-w"):
        TokenFile(path)


def test_a_file_in_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    write(folder / "tokens", line("kmcp_1"))
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="other users could replace"):
        TokenFile(folder / "tokens")


def test_one_that_others_may_read_is_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, line("kmcp_1"))
    path.chmod(0o644)
    TokenFile(path)
    assert "others may read" in caplog.text


def test_what_is_no_file_of_tokens_is_said_at_the_start(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="no such file; `kernel-mcp token add NAME"):
        TokenFile(path)
    path.mkdir()
    with pytest.raises(ConfigError, match=r"--tokens.*(directory|is no file)"):
        TokenFile(path)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        TokenFile(path)
    path.unlink()
    write(path)
    TokenFile(path)
    assert "nobody may call" in caplog.text


async def test_the_token_that_a_server_makes_is_of_the_one_at_its_side() -> None:
    made = OneToken()
    assert await made.verify(made.token) == Principal("local", OPERATOR)
    for wrong in ("", made.token[:-1], made.token + "\udc80", OneToken().token):
        with pytest.raises(Unauthenticated):
            await made.verify(wrong)
