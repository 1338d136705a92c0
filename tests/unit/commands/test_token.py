"""`kernel-mcp token`: principals and their tokens, in a file that stays whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_mcp.cli import EXIT_FAILED, EXIT_USAGE, main
from kernel_mcp.identity import Unauthenticated, digest
from kernel_mcp.identity.tokens import TokenFile


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def add(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The token that the command prints, alone."""
    assert main(["token", "add", *words, "--tokens", "tokens"]) == 0
    (token,) = capsys.readouterr().out.splitlines()
    return token


@pytest.mark.anyio
async def test_a_token_that_was_added_is_good_until_it_is_revoked(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = add(capsys, "alice", "--scope", "kernel:run", "--quota", "sessions=2,memory=8G")
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    assert digest(token).hex() in path.read_text()
    found = TokenFile(path)
    who = await found.verify(token)
    assert who.name == "alice"
    assert who.scopes == {"kernel:run"}
    assert who.grants == ()
    assert (who.quotas.sessions, who.quotas.memory) == (2, 8 * 1024**3)
    assert main(["token", "revoke", "alice", "--tokens", str(path)]) == 0
    assert "of alice" in capsys.readouterr().out
    with pytest.raises(Unauthenticated):
        await found.verify(token)


def test_the_token_alone_goes_to_stdout_and_what_to_do_with_it_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["token", "add", "a", "--tokens", "tokens", "--public-url", "https://x.example/"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("kmcp_")
    assert len(out.strip()) == 48
    assert "claude mcp add --transport http notebook https://x.example/mcp --header" in err
    assert out.strip() not in err


def test_a_second_token_of_a_name_has_what_the_first_has(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, "alice", "--quota", "cells=1", "--door", "network,mount:/a b", "--door", "env:X")
    add(capsys, "alice")
    first, second = TokenFile(path).rows
    assert (first.quotas, first.grants) == (second.quotas, second.grants)
    assert second.grants == ("env:X", "mount:/a b", "network")
    before = path.read_bytes()
    assert main(["token", "add", "alice", "--door", "*", "--tokens", "tokens"]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "`doors` of alice are others than in line 1" in error
    assert "revoke" in error
    assert path.read_bytes() == before


def test_other_rows_and_the_mode_stay_as_they_were(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = b'\n{ "claim" : "groups=x",  "quotas": {"cpu":1.50} }\n\n'
    path.write_bytes(odd + b'{"principal": "bob", "sha256": "%s"}' % (b"0" * 64))
    path.chmod(0o640)
    before = path.read_bytes()
    add(capsys, "alice")
    assert path.read_bytes().startswith(before + b'\n{"principal": "alice"')
    assert path.stat().st_mode & 0o777 == 0o640
    assert main(["token", "revoke", "bob", "--tokens", "tokens"]) == 0
    assert main(["token", "revoke", "alice", "--tokens", "tokens"]) == 0
    assert path.read_bytes() == odd
    assert [each.name for each in path.parent.iterdir()] == ["tokens"]


def test_the_file_keeps_its_owner(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []
    add(capsys, "alice")
    monkeypatch.setattr(os, "getegid", lambda: 12345)
    monkeypatch.setattr(os, "fchown", lambda fd, user, group: given.append((user, group)))
    add(capsys, "bob")
    assert given == [(path.stat().st_uid, path.stat().st_gid)]


def test_a_link_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").touch(mode=0o600)
    (tmp_path / "tokens").symlink_to("real")
    add(capsys, "alice")
    assert (tmp_path / "tokens").is_symlink()
    assert "alice" in (tmp_path / "real").read_text()


def test_the_list_has_no_more_of_a_hash_than_tells_it_from_others(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = add(capsys, "alice", "--quota", "disk=2G,rate=1.5", "--door", "network")
    with path.open("a") as opened:
        opened.write('{"claim": "groups=x"}\n')
    assert main(["token", "list", "--tokens", "tokens"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    name, digits, scopes, rest = first.split("  ", 3)
    assert (name, digits) == ("alice", digest(token).hex()[:8])
    assert scopes == "kernel:run,kernel:install"
    assert rest.startswith("quotas disk=2 GiB,rate=1.5  doors network  added 20")
    assert second.startswith("(by subject)  claim groups=x  ")
    assert last == "2 rows, 2 principals"


def test_one_token_of_several_is_revoked_by_its_digits(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = add(capsys, "alice"), add(capsys, "alice")
    digits = digest(one).hex()[:12]
    assert main(["token", "revoke", "bob", "--hash", digits, "--tokens", "tokens"]) == EXIT_FAILED
    assert main(["token", "revoke", "--hash", digits, "--tokens", "tokens"]) == 0
    assert [each.digest for each in TokenFile(path).rows] == [digest(two)]


def test_digits_of_several_tokens_revoke_none(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"principal": "a", "sha256": "abcd" + str(number) * 60} for number in (1, 2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    path.chmod(0o600)
    assert main(["token", "revoke", "--hash", "abcd", "--tokens", "tokens"]) == EXIT_FAILED
    assert "2 tokens begin so" in capsys.readouterr().err
    assert len(TokenFile(path).rows) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], EXIT_USAGE, "expected one of add, list, revoke"),
        (["ad"], EXIT_USAGE, "expected one of add, list, revoke"),
        (["add"], EXIT_USAGE, "NAME"),
        (["add", "a/b", "--tokens", "t"], EXIT_USAGE, "a principal has a name of"),
        (["add", "a@01234567", "--tokens", "t"], EXIT_USAGE, "those of an issuer's subjects"),
        (["add", "a", "--scope", "x", "--tokens", "t"], EXIT_USAGE, "'x' is no scope"),
        (["add", "a", "--door", "x", "--tokens", "t"], EXIT_USAGE, "'x' is no door"),
        (["add", "a", "--quota", "x=1", "--tokens", "t"], EXIT_USAGE, "'x' is no quota"),
        (["add", "a"], EXIT_USAGE, "--tokens FILE, or set KERNEL_MCP_TOKENS"),
        (["add", "a", "--tokens", "no/t"], EXIT_FAILED, "no/t: there is no "),
        (["add", "a", "--tokens", "."], EXIT_FAILED, "directory"),
        (["list", "--tokens", "t"], EXIT_FAILED, "t: there is no "),
        (["revoke", "--tokens", "t"], EXIT_USAGE, "expected the NAME of a principal"),
        (["revoke", "a", "--tokens", "t"], EXIT_FAILED, "t: there is no "),
        (["revoke", "--hash", "xyz", "--tokens", "t"], EXIT_USAGE, "expected 4 to 64 of the"),
    ],
    ids=range(15),
)
def test_what_cannot_be_is_said_in_one_line(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["token", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_broken_files_change_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, "alice")
    assert main(["token", "revoke", "bob", "--tokens", "tokens"]) == EXIT_FAILED
    assert "tokens has no row of bob" in capsys.readouterr().err
    path.write_text("{")
    for command in (["add", "bob"], ["list"], ["revoke", "bob"]):
        assert main(["token", *command, "--tokens", "tokens"]) == EXIT_USAGE
        assert "tokens, line 1: not JSON" in capsys.readouterr().err
    assert path.read_text() == "{"


def test_the_variable_names_the_file_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERNEL_MCP_TOKENS", str(path))
    assert main(["token", "add", "alice"]) == 0
    assert main(["token", "list"]) == 0
    assert "1 row, 1 principal" in capsys.readouterr().out


def test_commands_at_once_lose_no_row(path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kernel_mcp.identity.editing import add\n"
        "for number in range(5): add(Path(sys.argv[1]), f'n{sys.argv[2]}', now='')\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(number)])
        for number in range(4)
    ]
    assert [each.wait() for each in started] == [0] * 4
    assert len(TokenFile(path).rows) == 20


def test_the_help_has_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "--help"]) == 0
    assert "add NAME" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["token", "add", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: kernel-mcp token add")
    for word in ("NAME", "--scope", "--quota", "--door", "--tokens"):
        assert word in text
    assert "--allow" not in text
