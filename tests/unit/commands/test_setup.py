"""`kernel-mcp setup`: entries for clients, and files of users that lose nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.cli import EXIT_USAGE, main
from kernel_mcp.commands.setup import CLIENTS
from kernel_mcp.config.values import parse_toml

USUAL = ["--allow", "numpy,pandas,matplotlib", "--allow-install", "*"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, which is the current one too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for client in CLIENTS.values():
        monkeypatch.delenv(client.variable or "unset", raising=False)
    return tmp_path


def servers(client: str, text: str) -> dict[str, Any]:
    """The servers in a client's file."""
    about = CLIENTS[client]
    found = (parse_toml(text) if about.toml else json.loads(text))[about.key]
    assert isinstance(found, dict)
    return found


def file_of(client: str, home: Path) -> Path:
    return home / CLIENTS[client].place.removeprefix("~/")


@pytest.mark.parametrize("client", CLIENTS)
def test_the_entry_is_printed_alone_and_written_when_asked(
    client: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["setup", client]) == 0
    printed = capsys.readouterr().out
    entry = servers(client, printed)["notebook"]
    assert Path(entry["command"]).is_absolute()
    assert entry["args"][-4:] == USUAL
    shown = {"vscode": ["--mount", "${workspaceFolder}"], "lmstudio": []}
    mounted = (
        entry["args"][entry["args"].index("--mount") : -4] if "--mount" in entry["args"] else []
    )
    assert mounted == shown.get(client, ["--mount", "."])
    assert list(home.iterdir()) == []
    assert main(["setup", client, "--write"]) == 0
    assert servers(client, file_of(client, home).read_text())["notebook"] == entry
    assert stat.S_IMODE(file_of(client, home).stat().st_mode) == 0o600
    capsys.readouterr()
    assert main(["setup", client, "--write"]) == 0
    assert "already" in capsys.readouterr().out


def test_the_command_of_an_entry_starts_this_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "cursor"]) == 0
    entry = servers("cursor", capsys.readouterr().out)["notebook"]
    own = entry["args"][: -len(["--mount", ".", *USUAL])]
    done = subprocess.run([entry["command"], *own, "version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"kernel-mcp ")


def test_flags_are_those_of_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mount", ".", "--offline", "--mount", "/etc:/e", "--memory", "4G"]
    assert main(["setup", "VS Code", "--name", "nb", *flags]) == 0
    entry = servers("vscode", capsys.readouterr().out)["nb"]
    expected = ["--mount", ".", "--mount", "/etc:/e", "--offline", "--memory", "4G"]
    assert sorted(entry["args"][-len(flags) :]) == sorted(expected)
    assert entry["type"] == "stdio"


@pytest.mark.parametrize("client", ["cursor", "gemini", "vscode", "claude-code"])
def test_what_a_user_has_in_a_json_file_stays(client: str, home: Path) -> None:
    file = file_of(client, home)
    file.parent.mkdir(exist_ok=True)
    kept = file.with_name("dotfiles.json")
    other = {"command": "x", "args": [], "env": {"KEY": "ü"}}
    before = {"theme": "dark", CLIENTS[client].key: {"other": other}, "last": [1.5, None, 10**30]}
    kept.write_text(json.dumps(before, indent="\t", ensure_ascii=False))
    kept.chmod(0o640)
    file.symlink_to(kept)
    old = kept.read_bytes()
    assert main(["setup", client, "--write"]) == 0
    assert file.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640
    text = kept.read_text()
    assert "ü" in text
    assert '\n\t"theme"' in text
    after = json.loads(text)
    assert after[CLIENTS[client].key].pop("notebook")
    assert after == before
    assert list(after) == list(before)
    assert kept.with_name("dotfiles.json.before-kernel-mcp").read_bytes() == old


def test_an_entry_of_this_server_is_brought_up_to_date(home: Path) -> None:
    file = file_of("cursor", home)
    file.parent.mkdir()
    own = {"command": "/old/kernel-mcp", "args": [], "env": {"A": "b"}, "disabled": True}
    file.write_text(json.dumps({"mcpServers": {"notebook": own}}))
    assert main(["setup", "cursor", "--write"]) == 0
    entry = servers("cursor", file.read_text())["notebook"]
    assert entry.pop("command") != own["command"]
    assert entry.pop("args")[-4:] == USUAL
    assert entry == {"env": {"A": "b"}, "disabled": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  // mine\n  "mcpServers": {}\n}', "not plain JSON in line 2"),
        ('{"mcpServers": {},}', "a last comma"),
        ("[]", "no object `mcpServers`"),
        ('{"mcpServers": []}', "no object `mcpServers`"),
        ('{"mcpServers": {"notebook": {"command": "other"}}}', "take another --name"),
        ('{"mcpServers": {"notebook": "other"}}', "no object"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ('{"a": 1e999}', "JSON"),
        ("[" * 100_000, "recursion"),
        ('{"a": 0.12345678901234567890}', "would round"),
        ('{"a": 1e-99999999999999999999}', "would round"),
        (
            '{"mcpServers": {"notebook": {"command": "uvx", "args": ["kernel-mcp", "--offline"]}}}',
            "flags of its own",
        ),
        ("\udcff", "utf-8"),
    ],
)
def test_a_json_file_that_would_lose_something_is_refused_and_stays(
    text: str, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of("cursor", home)
    file.parent.mkdir()
    file.write_bytes(old := text.encode(errors="surrogateescape"))
    assert main(["setup", "cursor", "--write"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert words in error
    assert "nothing was written" in error
    assert error.count("\n") == 1
    assert file.read_bytes() == old
    assert list(file.parent.iterdir()) == [file]


def test_flags_that_a_user_changes_are_replaced_when_others_are_given(home: Path) -> None:
    file = file_of("cursor", home)
    contents = []
    for memory in ("1G", "2G", "3G", "2G"):
        assert main(["setup", "cursor", "--write", "--memory", memory]) == 0
        contents.append(file.read_bytes())
    assert main(["setup", "cursor", "--write"]) == EXIT_USAGE
    assert file.read_bytes() == contents[-1] == contents[1]
    kept = [file.with_name(f"mcp.json.before-kernel-mcp{end}") for end in ("", "-2", "-3")]
    assert [each.read_bytes() for each in kept] == contents[:3]


@pytest.mark.parametrize("client", ["cursor", "codex"])
def test_the_mark_and_the_line_ends_of_windows_stay(client: str, home: Path) -> None:
    file = file_of(client, home)
    file.parent.mkdir()
    old = "model = 'x'  \r\n# mine  \r\n\r\n" if client == "codex" else '{\r\n  "a": 1.5\r\n}\r\n'
    file.write_bytes(old.encode("utf-8-sig"))
    assert main(["setup", client, "--write"]) == 0
    text = (made := file.read_bytes()).decode()
    assert text.startswith(f"\ufeff{old}" if client == "codex" else "\ufeff{")
    assert text.count("\n") == text.count("\r\n") > 3
    assert main(["setup", client, "--write"]) == 0
    assert file.read_bytes() == made


@pytest.mark.parametrize("client", ["cursor", "codex"])
def test_a_file_without_the_right_to_write_is_left_alone(
    client: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(client, home)
    file.parent.mkdir()
    file.write_text("{}" if client == "cursor" else "a = 1\n")
    file.chmod(0o444)
    assert main(["setup", client, "--write"]) == EXIT_USAGE
    assert "read-only" in capsys.readouterr().err
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("client", ["cursor", "codex"])
def test_paths_of_any_bytes_are_written_or_refused(
    client: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "a \"b\" 'c' \\ \u3000\x7f"
    (home / path).mkdir()
    assert main(["setup", client, "--write", "--mount", path]) == 0
    assert servers(client, file_of(client, home).read_text())["notebook"]["args"][-1] == path
    (home / "\udcff").mkdir()
    for words in ([], ["--write"]):
        assert main(["setup", client, *words, "--mount", "\udcff"]) == EXIT_USAGE
        assert "not UTF-8" in capsys.readouterr().err


CODEX = """\
# mine
model = "x"  # why

[mcp_servers.other]
command = 'y'
[mcp_servers.other.env]
A = "b"
"""


@pytest.mark.parametrize("end", ["", "\n\n\n", "# no newline at the end"])
def test_a_table_is_appended_to_toml_and_nothing_else_changes(home: Path, end: str) -> None:
    file = file_of("codex", home)
    file.parent.mkdir()
    file.write_text(CODEX + end)
    assert main(["setup", "codex", "--write"]) == 0
    text = file.read_text()
    assert text.startswith(CODEX + end)
    found = parse_toml(text)
    assert found["mcp_servers"].pop("notebook")["args"][-4:] == USUAL
    assert found == parse_toml(CODEX)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mcp_servers = {other = {command = "x"}}\n', "no table can be appended"),
        ("mcp_servers = 3\n", "no table can be appended"),
        ('[[mcp_servers]]\ncommand = "x"\n', "no table can be appended"),
        ('[mcp_servers.notebook]\ncommand = "x"\n', "change that one, or take another --name"),
        ("model = \n", "line 1"),
    ],
)
def test_toml_to_which_nothing_can_be_appended_is_refused_and_stays(
    text: str, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of("codex", home)
    file.parent.mkdir()
    file.write_text(text)
    assert main(["setup", "codex", "--write"]) == EXIT_USAGE
    assert words in capsys.readouterr().err
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("client", "variable", "name"),
    [("codex", "CODEX_HOME", "config.toml"), ("claude-code", "CLAUDE_CONFIG_DIR", ".claude.json")],
)
def test_a_folder_that_the_client_is_given_is_used(
    client: str, variable: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert main(["setup", client, "--write"]) == 0
    assert (tmp_path / "elsewhere" / name).is_file()


@pytest.mark.parametrize("given", ["", "/", "relative"])
def test_without_a_home_folder_one_sentence_says_so(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", given)
    assert main(["setup", "lm-studio", "--write"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("kernel-mcp: error: setup: this user has no home folder")
    assert error.count("\n") == 1
    assert main(["setup", "lm-studio"]) == 0
    assert main(["setup", "vscode", "--write"]) == 0, "its file is in the current folder"


def test_what_is_in_the_way_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of("cursor", home).mkdir(parents=True)
    assert main(["setup", "cursor", "--write"]) == EXIT_USAGE
    assert "no ordinary file" in capsys.readouterr().err
    (home / ".gemini").write_text("a file")
    assert main(["setup", "gemini", "--write"]) == EXIT_USAGE
    assert f"{home / '.gemini'}: File exists" in capsys.readouterr().err
    os.mkfifo(home / ".claude.json")
    assert main(["setup", "claude", "--write"]) == EXIT_USAGE
    assert "no ordinary file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "expected claude-code, cursor, vscode, codex, gemini, lmstudio"),
        (["zed"], "there is no client zed"),
        (["codx"], "did you mean codex?"),
        (["cursor", "--memroy", "2G"], "did you mean --memory?"),
        (["cursor", "--memory", "2X"], "expected a size"),
        (["cursor", "--name", "a.b"], "--name a.b: expected letters"),
        (["cursor", "--http", "8000"], "docs/clients.md"),
        (["cursor", "--mount", "nothere:rw"], "nothere: there is no such folder"),
        (["vscode", "--write", "--mount", "${x}", "--mount", "/nothere:/data"], "/nothere: there"),
        (["cursor", "--project", "nothere"], "--project"),
        (["cursor", "--requirements", "nothere.txt"], "nothere.txt: there is no such"),
    ],
)
def test_what_is_not_understood_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["setup", *words]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_copy_that_uvx_has_made_is_no_lasting_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "archive-v0" / "x" / "bin" / "kernel-mcp"
    copy.parent.mkdir(parents=True)
    copy.touch()
    monkeypatch.setattr(sys, "argv", [str(copy)])
    assert main(["setup", "cursor"]) == 0
    assert "uv tool install" in capsys.readouterr().err
