"""The file of `--tool-servers`: what it may say, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.config.grants import grant_names, restricted_to
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.tool_servers import ToolServer, read_tool_servers, tool_names
from kernel_mcp.errors import ConfigError
from kernel_mcp.sessions.grants import grants_of, wider_grants

CRM = {"command": "crm", "args": ["--org", "${ORG}"], "env": {"KEY": "${KEY:-none}"}}
GIT = {"type": "http", "url": "https://${HOST}/mcp", "headers": {"X-Key": "${KEY}"}}


def written(folder: Path, rows: Any) -> Path:
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": rows}))
    return file


def read(folder: Path, rows: Any, environ: dict[str, str] | None = None) -> tuple[ToolServer, ...]:
    return read_tool_servers(written(folder, rows), (), environ or {})


def test_variables_are_expanded_outside(tmp_path: Path) -> None:
    environ = {"ORG": "ours", "HOST": "git.example", "KEY": "secret-1"}
    crm, git = read(tmp_path, {"crm": CRM, "git": {**GIT, "rate": 5, "per": "1m"}}, environ)
    assert (crm.command, crm.args, dict(crm.env)) == ("crm", ("--org", "ours"), {"KEY": "secret-1"})
    assert (git.url, dict(git.headers)) == ("https://git.example/mcp", {"X-Key": "secret-1"})
    assert (git.rate, git.per_s, crm.rate) == (5, 60.0, 0)
    assert "secret-1" not in repr((crm, git))
    assert ToolServer.from_json(json.loads(json.dumps(git.to_json()))).headers == git.headers


def test_a_default_stands_for_a_variable_that_is_not_set(tmp_path: Path) -> None:
    (crm,) = read(tmp_path, {"crm": CRM}, {"ORG": "ours"})
    assert dict(crm.env) == {"KEY": "none"}


def test_programs_and_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    (crm,) = read(tmp_path, {"crm": {"command": "./bin/crm", "cwd": "data"}})
    assert crm.command == str(tmp_path / "bin/crm")
    assert crm.cwd == str(tmp_path / "data")


def test_disabled_entries_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, {"crm": {"command": "crm", "disabled": True}}) == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (CRM, "no variable ORG"),
        ({"command": "a", "url": "https://b"}, "either a command"),
        ({}, "either a command"),
        ({"url": "ftp://host"}, "url is no address"),
        ({"url": "https://host", "type": "sse"}, "only stdio and streamable HTTP"),
        ({"command": "a", "trust": "full"}, 'trust is "read-only"'),
        ({"command": "a", "sandbox": True}, "not confined here"),
        ({"command": "a", "headers": {}}, "headers is for servers at a url"),
        ({"command": "a", "rate": True}, "rate is the number"),
        ({"command": "a", "args": "b c", "per": "0"}, "time above zero"),
        ({"command": "a", "autoApprove": []}, "no key 'autoApprove'"),
        ({"command": "${A"}, "has no }"),
    ],
)
def test_what_an_entry_may_not_say(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"mcp\.json: crm: ") as caught:
        read(tmp_path, {"crm": row})
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{", '{"mcpServers": 1}', "[" * 100_000])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--tool-servers {file}: "):
        read_tool_servers(file, (), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_tool_servers(tmp_path / "none.json", (), {})


def test_a_name_is_one_that_code_can_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with a letter"):
        read(tmp_path, {"my crm": {"command": "a"}})


def test_allowed_tools_name_server_and_tool() -> None:
    assert tool_names(["crm.*, git.read_?", "*"]) == ("crm.*", "git.read_?", "*")
    for wrong in ("crm", "crm.a b", "a.b;c"):
        with pytest.raises(ValueError, match=r"expected tools such as"):
            tool_names(wrong)
    with pytest.raises(ConfigError, match="no tools to allow"):
        read_tool_servers(None, ("crm.*",), {})


def test_a_server_is_a_grant_of_its_own(tmp_path: Path) -> None:
    rows = {"crm": {"command": "crm"}, "git": {"url": "https://a.b/c"}}
    settings = Settings(tool_servers=read(tmp_path, rows))
    assert {"tools:crm", "tools:git"} <= grant_names(settings)
    assert [each.name for each in restricted_to(settings, ("tools:git",)).tool_servers] == ["git"]
    assert restricted_to(settings, ()).tool_servers == ()


def test_a_kept_session_is_held_back_when_more_is_granted(tmp_path: Path) -> None:
    def grants(rows: Any, *allowed: str) -> dict[str, tuple[str, ...]]:
        return grants_of(Settings(tool_servers=read(tmp_path, rows), allow_tools=allowed), "bwrap")

    before = grants({"crm": {"command": "crm"}})
    assert wider_grants(before, before) == []
    assert wider_grants(before, {}) != []
    trusted = grants({"crm": {"command": "crm", "trust": "read-only"}})
    assert wider_grants(trusted, before) == ["tools crm trusted"]
    assert wider_grants(grants({"crm": {"command": "crm"}}, "crm.*"), before) == [
        "tools crm.* unasked"
    ]
    assert wider_grants(before, trusted) == []
