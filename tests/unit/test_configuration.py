"""Where settings come from, which source wins, and how a mistake is reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kernel_mcp.configuration import load
from kernel_mcp.errors import ConfigError
from kernel_mcp.options import OPTIONS
from kernel_mcp.settings import GIB, MIB, Limits, Settings


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    assert load({}, {}, tmp_path) == Settings()


def test_every_option_sets_an_existing_field() -> None:
    known = {f.name for cls in (Settings, Limits) for f in dataclasses.fields(cls)}
    assert {option.field for option in OPTIONS} <= known


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('memory = "1G"\ntimeout = "1m"\nwait = 5\n')
    environ = {"KERNEL_MCP_TIMEOUT": "2m", "KERNEL_MCP_WAIT": "6", "HOME": "/x"}
    settings = load({"wait": "7s"}, environ, tmp_path)
    assert settings.limits.memory_bytes == GIB
    assert settings.timeout_s == 120
    assert settings.wait_s == 7
    assert settings.grace_s == Settings().grace_s


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load({}, {"KERNEL_MCP_MEMORY": ""}, tmp_path) == Settings()


def test_a_table_in_pyproject_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.kernel-mcp]\nallow = ["numpy", "pandas>=2,<3"]\ndisk = "64M"\n'
    )
    settings = load({}, {}, tmp_path)
    assert settings.allow == ("numpy", "pandas>=2,<3")
    assert settings.limits.disk_bytes == 64 * MIB


def test_a_pyproject_without_the_table_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert load({}, {}, tmp_path) == Settings()


def test_a_file_of_its_own_is_preferred_to_pyproject(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text("pids = 7\n")
    (tmp_path / "pyproject.toml").write_text("[tool.kernel-mcp]\npids = 8\n")
    assert load({}, {}, tmp_path).limits.pids == 7


def test_a_named_file_replaces_the_found_one(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text("pids = 7\n")
    (tmp_path / "other.toml").write_text("max-sessions = 3\n")
    for sources in (
        load({"config": "other.toml"}, {}, tmp_path),
        load({}, {"KERNEL_MCP_CONFIG": str(tmp_path / "other.toml")}, tmp_path),
    ):
        assert sources.max_sessions == 3
        assert sources.limits.pids == Limits().pids


def test_a_path_in_a_file_is_relative_to_that_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.toml").write_text('workspace = "work"\npython = "bin/python"\n')
    settings = load({"config": "sub/c.toml"}, {}, tmp_path)
    assert settings.workspace == tmp_path / "sub" / "work"
    assert settings.python == str(tmp_path / "sub" / "bin/python")


def test_where_packages_come_from_is_read_from_any_source(tmp_path: Path) -> None:
    (tmp_path / "named.toml").write_text(
        'find-links = ["wheels", "https://x.example/w"]\noffline = true\ninstall-size = "64M"\n'
    )
    flags: dict[str, str | list[str]] = {
        "config": "named.toml",
        "allow-install": ["polars<2,rich", "*"],
        "index-url": "https://mirror.example/simple",
        "install-timeout": "1m",
    }
    found = load(flags, {"KERNEL_MCP_ALLOW_SOURCE_BUILDS": "1"}, tmp_path)
    assert found.allow_install == ("polars<2", "rich", "*")
    assert found.index_url == "https://mirror.example/simple"
    assert found.find_links == (str(tmp_path / "wheels"), "https://x.example/w")
    assert (found.offline, found.allow_source_builds) == (True, True)
    assert (found.install_bytes, found.install_timeout_s) == (64 * MIB, 60)


def test_a_path_in_a_flag_is_relative_to_the_current_folder(tmp_path: Path) -> None:
    assert load({"workspace": "work"}, {}, tmp_path).workspace == tmp_path / "work"
    assert load({"workspace": "/abs"}, {}, tmp_path).workspace == Path("/abs")


@pytest.mark.parametrize(
    "line",
    [
        'sandbox = "none"',
        'sandbox = " NONE "',
        'python = "./evil/python"',
        'workspace = "/home/ada"',
        'workspace = "../elsewhere"',
        'cache-dir = "/tmp/prepared"',
        'sandbox = "landlock"',
        "allow-weaker-sandbox = true",
        'container-engine = "docker"',
        'container-image = "somebody/image"',
        'container-runtime = "/tmp/program"',
        'index-url = "https://elsewhere.example/simple"',
        'find-links = ["wheels"]',
        "allow-source-builds = true",
        'audit-log = "/etc/cron.d/x"',
    ],
)
def test_a_file_nobody_named_cannot_weaken_the_boundary(tmp_path: Path, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.kernel-mcp]\n{line}\n")
    with pytest.raises(ConfigError, match="is not taken from a file found in the current folder"):
        load({}, {}, tmp_path)
    load({"config": "pyproject.toml"}, {}, tmp_path)


def test_a_link_out_of_the_folder_is_not_inside_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "work").symlink_to(tmp_path)
    (here / "kernel-mcp.toml").write_text('workspace = "work/x"\n')
    with pytest.raises(ConfigError, match="workspace"):
        load({}, {}, here)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('memry = "1G"', ["there is no setting 'memry'", "did you mean memory?"]),
        ("zzz = 1", ["there is no setting 'zzz'"]),
        ('memory = "2X"', ["memory = '2X'", "512M or 2G"]),
        ("memory = [", ["not valid TOML"]),
        ("allow = [1]", ["allow = [1]", "expected names"]),
        ("python = 3.12", ["in quotes"]),
        ("max-sessions = 0", ["at least one session"]),
    ],
)
def test_a_bad_file_is_one_line_with_the_remedy(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    (tmp_path / "kernel-mcp.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KERNEL_MCP_TIMEOUT=soon: expected a time"):
        load({}, {"KERNEL_MCP_TIMEOUT": "soon"}, tmp_path)


def test_an_unknown_variable_of_ours_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean KERNEL_MCP_MEMORY"):
        load({}, {"KERNEL_MCP_MEMROY": "2G"}, tmp_path)


def test_a_bad_flag_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sandbox docker: expected auto, bwrap, landlock, c"):
        load({"sandbox": "docker"}, {}, tmp_path)


def test_a_config_file_that_is_missing_or_has_no_table_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load({"config": "nope.toml"}, {}, tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    with pytest.raises(ConfigError, match=r"no table \[tool.kernel-mcp\]"):
        load({"config": "pyproject.toml"}, {}, tmp_path)
