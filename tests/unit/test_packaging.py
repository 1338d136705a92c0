"""Manifests and documented client configurations name only flags that the server accepts."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from kernel_mcp import __version__
from kernel_mcp.config.load import settings_from, settings_parser
from kernel_mcp.config.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
README = (ROOT / "README.md").read_text()
CLIENTS = (ROOT / "docs/clients.md").read_text()
TOOLS = (ROOT / "docs/tools.md").read_text()
ALLOW, INSTALL = ("numpy", "pandas", "matplotlib"), ("*",)


def settings(argv: list[str]) -> Settings:
    return settings_from(vars(settings_parser("kernel-mcp", "", "").parse_args(argv)))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The server's arguments in every configuration of a page."""
    found = [configured(json.loads(block)) for block in blocks(page, "json")]
    found += [configured(tomllib.loads(block)) for block in blocks(page, "toml")]
    line = next(line for line in page.splitlines() if line.startswith("claude mcp add"))
    return [*found, shlex.split(line.partition(" -- kernel-mcp ")[2])]


def configured(config: dict[str, Any]) -> list[str]:
    """The server's arguments in a client's configuration."""
    (servers,) = (value for key, value in config.items() if key.lower().endswith("servers"))
    server = servers["notebook"]
    words = [server["command"], *server["args"]]
    start = next(at for at, word in enumerate(words) if Path(word).name == "kernel-mcp")
    return [str(word) for word in words[start + 1 :]]


def test_every_documented_configuration_starts_the_same_server() -> None:
    in_readme, in_clients = commands(README), commands(CLIENTS)
    assert (len(in_readme), len(in_clients)) == (3, 5)
    plugin = configured(json.loads((PACKAGING / "claude-code/.mcp.json").read_text()))
    for argv in (*in_readme, *in_clients, plugin):
        read = settings(argv)
        assert (read.allow, read.allow_install) == (ALLOW, INSTALL)


def test_the_manifests_are_of_this_version_and_their_flags_are_known() -> None:
    plugin = json.loads((PACKAGING / "claude-code/.claude-plugin/plugin.json").read_text())
    bundle = json.loads((PACKAGING / "mcpb/manifest.json").read_text())
    assert plugin["version"] == bundle["version"] == __version__
    assert bundle["server"]["type"] == "uv"
    assert (ROOT / bundle["server"]["entry_point"]).is_file()
    args = bundle["server"]["mcp_config"]["args"]
    argv = args[args.index("kernel-mcp") + 1 :]
    for name, option in bundle["user_config"].items():
        argv = [option["default"] if word == f"${{user_config.{name}}}" else word for word in argv]
    read = settings(argv)
    assert (read.allow, read.allow_install) == (ALLOW, INSTALL)


def test_the_readme_has_the_name_of_the_server() -> None:
    assert "<!-- mcp-name: io.github.kernel-mcp/kernel-mcp -->" in README


def test_the_skill_names_tools_of_the_documents() -> None:
    skill = (PACKAGING / "claude-code/skills/notebook/SKILL.md").read_text()
    named = set(re.findall(r"`([a-z]+_[a-z]+|execute|install|wait|interrupt)`", skill))
    table = TOOLS.partition("## Overview")[2].partition("## Arguments and results")[0]
    assert named
    assert all(f"`{name}`" in table for name in named)
