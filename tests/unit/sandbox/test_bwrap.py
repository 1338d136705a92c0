"""The view of an installer in its sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import BuildRequest
from kernel_mcp.sandbox.bwrap import BwrapBuilder, BwrapSandbox
from kernel_mcp.sandbox.select import NoSandbox, PlainBuilder, builder_for


@pytest.fixture
def sandbox() -> BwrapSandbox:
    return BwrapSandbox(
        program="/usr/bin/bwrap",
        setpriv="/usr/bin/setpriv",
        features=mounts.Features(size=True, disable_userns=True),
        seccomp_filter=b"filter",
        identities=None,
        boot=Path("/boot"),
    )


def command(builder: BwrapBuilder, request: BuildRequest) -> tuple[list[str], dict[str, str]]:
    """Bubblewrap's options and the environment."""
    found = builder.command(request, None)
    number = int(found.argv[found.argv.index("--args") + 1])
    os.lseek(number, 0, os.SEEK_SET)
    options = os.read(number, 1 << 20).decode().split("\0")
    found.close_passed()
    return options, dict(found.env)


def request(folder: Path, **env: str) -> BuildRequest:
    return BuildRequest(["uv"], env, [folder], [Path("/usr")])


def test_bubblewrap_confines_installers_wherever_it_works_and_its_lack_is_told(
    sandbox: BwrapSandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert builder_for(sandbox).confined
    assert builder_for(NoSandbox()).confined
    monkeypatch.setenv("PATH", "/nowhere")
    assert not builder_for(NoSandbox()).confined
    assert "without a sandbox" in caplog.text


def test_only_the_given_folders_are_writable(sandbox: BwrapSandbox, tmp_path: Path) -> None:
    options, _ = command(BwrapBuilder(sandbox), request(tmp_path))
    binds = [options[at + 1 : at + 3] for at, word in enumerate(options) if word == "--bind"]
    assert binds == [[str(tmp_path), str(tmp_path)]]


def test_the_network_is_shared_and_nothing_else(sandbox: BwrapSandbox, tmp_path: Path) -> None:
    options, _ = command(BwrapBuilder(sandbox), request(tmp_path))
    assert "--unshare-net" not in options
    for kept in ("--unshare-pid", "--unshare-ipc", "--unshare-user", "--cap-drop", "--seccomp"):
        assert kept in options


def test_the_environment_holds_where_packages_come_from_and_no_more(
    sandbox: BwrapSandbox, tmp_path: Path
) -> None:
    _, env = command(
        BwrapBuilder(sandbox),
        request(tmp_path, UV_INDEX_URL="u", https_proxy="p", HOME="/root", API_KEY="k", PATH="/x"),
    )
    assert env["UV_INDEX_URL"] == "u"
    assert env["https_proxy"] == "p"
    assert env["HOME"] == "/tmp"
    assert env["PATH"] != "/x"
    assert "API_KEY" not in env


def test_places_that_cannot_be_looked_at_are_passed_over(
    sandbox: BwrapSandbox, tmp_path: Path
) -> None:
    closed = f"{tmp_path}/{'x' * 300}"  # for everyone, as a closed folder is for ordinary users
    asked = request(tmp_path, XDG_CONFIG_HOME=closed, UV_FIND_LINKS=f"{closed}/wheels")
    assert closed not in " ".join(command(BwrapBuilder(sandbox), asked)[0])


def test_files_with_credentials_are_kept_from_code_of_packages(
    sandbox: BwrapSandbox, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.touch()
    asked = request(tmp_path / "layer", NETRC=str(netrc))
    assert str(netrc) in command(BwrapBuilder(sandbox), asked)[0]
    hostile = BuildRequest(asked.argv, asked.env, asked.writable, asked.readonly, hostile=True)
    assert str(netrc) not in command(BwrapBuilder(sandbox), hostile)[0]


def test_what_needs_no_network_has_none(sandbox: BwrapSandbox, tmp_path: Path) -> None:
    asked = BuildRequest(["python"], {}, [tmp_path], [], hostile=True, network=False)
    assert "--unshare-net" in command(BwrapBuilder(sandbox), asked)[0]


def test_folders_with_packages_and_the_users_settings_of_uv_are_there(
    sandbox: BwrapSandbox, tmp_path: Path
) -> None:
    links, settings = tmp_path / "links", tmp_path / "config/uv/uv.toml"
    links.mkdir()
    settings.parent.mkdir(parents=True)
    settings.touch()
    variables = {
        "UV_FIND_LINKS": f"https://x.example/w {links}",
        "UV_INDEX": f"mine=file://{links}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    asked = request(tmp_path / "layer", **variables)
    options, env = command(BwrapBuilder(sandbox), asked)
    assert str(links) in options
    assert str(settings) in options
    assert env["XDG_CONFIG_HOME"] == str(tmp_path / "config")
    hostile = BuildRequest(asked.argv, asked.env, asked.writable, asked.readonly, hostile=True)
    assert str(settings) not in command(BwrapBuilder(sandbox), hostile)[0]


def test_without_a_sandbox_the_command_is_what_was_asked_for(tmp_path: Path) -> None:
    found = PlainBuilder().command(request(tmp_path, A="b"), None)
    assert found.argv[-1] == "uv"
    assert found.env == {"A": "b"}
