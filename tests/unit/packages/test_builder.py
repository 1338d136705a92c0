"""What an installer in its sandbox gets to see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_mcp.packages.builder import BuildRequest, BwrapBuilder, PlainBuilder, builder_for
from kernel_mcp.sandbox import rootfs
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.none import NoSandbox


@pytest.fixture
def sandbox() -> BwrapSandbox:
    return BwrapSandbox(
        program="/usr/bin/bwrap",
        setpriv="/usr/bin/setpriv",
        features=rootfs.Features(size=True, disable_userns=True),
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
    return BuildRequest(["uv"], env, {folder: "/packages/0/1"}, [Path("/usr")])


def test_bubblewrap_gets_a_builder_and_others_run_plain(sandbox: BwrapSandbox) -> None:
    assert builder_for(sandbox).confined
    assert not builder_for(NoSandbox()).confined


def test_only_the_given_folders_are_writable(sandbox: BwrapSandbox, tmp_path: Path) -> None:
    options, _ = command(BwrapBuilder(sandbox), request(tmp_path))
    binds = [options[at + 1 : at + 3] for at, word in enumerate(options) if word == "--bind"]
    assert binds == [[str(tmp_path), "/packages/0/1"]]


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


def test_files_with_credentials_are_kept_from_code_of_packages(
    sandbox: BwrapSandbox, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.touch()
    asked = request(tmp_path / "layer", NETRC=str(netrc))
    assert str(netrc) in command(BwrapBuilder(sandbox), asked)[0]
    hostile = BuildRequest(asked.argv, asked.env, asked.writable, asked.readonly, hostile=True)
    assert str(netrc) not in command(BwrapBuilder(sandbox), hostile)[0]


def test_compiled_files_carry_the_path_that_kernels_know(sandbox: BwrapSandbox) -> None:
    assert BwrapBuilder(sandbox).layer_path(Path("/layer/.next"), "3") == "/packages/0/3"
    assert PlainBuilder().layer_path(Path("/layer/.next"), "3") == "/layer/.next"


def test_without_a_sandbox_the_command_is_what_was_asked_for(tmp_path: Path) -> None:
    found = PlainBuilder().command(request(tmp_path, A="b"), None)
    assert found.argv[-1] == "uv"
    assert found.env == {"A": "b"}
