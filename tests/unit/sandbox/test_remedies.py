"""Messages for a person when a sandbox does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.sandbox import remedies
from kernel_mcp.sandbox.remedies import diagnose, install_hint


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "debian"}, "sudo apt-get install -y bubblewrap"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "sudo apt-get install -y bubblewrap"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "sudo dnf install -y bubblewrap"),
        ({"ID": "alpine"}, "sudo apk add bubblewrap"),
        ({"ID": "plan9"}, "the package bubblewrap"),
    ],
)
def test_the_install_command_is_the_one_of_the_distribution(
    release: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    hint = install_hint("bubblewrap", release)
    assert command in hint
    assert "--sandbox none" in hint


def test_root_needs_no_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "with: apt-get install" in install_hint("bubblewrap", {"ID": "debian"})
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "with: sudo apt-get install" in install_hint("bubblewrap", {"ID": "debian"})


NO_PROC = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
NO_NAMESPACE = "bwrap: Creating new namespace failed: Operation not permitted"


@pytest.mark.parametrize("said", [NO_PROC, NO_NAMESPACE])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("podman", "--user 1000 --security-opt seccomp=unconfined --security-opt unmask=ALL"),
        ("docker", "--user 1000 --security-opt seccomp=unconfined"),
    ],
)
def test_a_container_is_told_how_it_has_to_be_started(
    said: str, engine: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {engine: tmp_path})
    text = diagnose(said)
    assert said in text
    assert f"Start the container with {options}" in text
    assert f"in a container of {engine}" in remedies.surroundings()
    assert "start the container with --memory" in remedies.for_cgroups()


def test_a_container_with_a_read_only_root_is_known_by_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {"podman": Path("/nowhere")})
    assert remedies.container() == ""
    monkeypatch.setenv("container", "podman")
    assert remedies.container() == "podman"
    monkeypatch.setenv("container", "oci")
    assert remedies.container() == ""


def test_where_no_container_is_recognised_all_ways_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {})
    text = diagnose(NO_NAMESPACE)
    assert "RestrictNamespaces=" in text
    assert "with podman: --user 1000" in text
    assert "with docker: --user 1000" in text
    assert "--sandbox none" in text


@pytest.mark.parametrize(
    ("setting", "value", "command"),
    [
        ("_RESTRICTED_BY_APPARMOR", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("_USERNS_CLONE", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("_MAX_USERNS", "0", "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_user_namespaces_that_are_off_are_told_to_those_who_need_them(
    setting: str, value: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {})
    (tmp_path / "setting").write_text(f"{value}\n")
    monkeypatch.setattr(remedies, setting, tmp_path / "setting")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert command in diagnose(NO_NAMESPACE)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert command not in diagnose(NO_NAMESPACE)


def test_what_bubblewrap_said_is_cut() -> None:
    assert len(diagnose("x" * 10_000)) < 2000
