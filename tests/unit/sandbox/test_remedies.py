"""What a person is told when a sandbox does not start."""

from __future__ import annotations

import pytest

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
    release: dict[str, str], command: str
) -> None:
    hint = install_hint("bubblewrap", release)
    assert command in hint
    assert "--sandbox none" in hint


def test_a_container_that_hides_proc_is_recognised() -> None:
    text = diagnose("bwrap: Can't mount proc on /newroot/proc: Operation not permitted")
    assert "systempaths=unconfined" in text
    assert "Can't mount proc" in text


def test_a_container_without_namespaces_is_recognised() -> None:
    text = diagnose("bwrap: Creating new namespace failed: Operation not permitted")
    assert "seccomp=unconfined" in text
    assert "--sandbox none" in text


def test_the_first_advice_for_root_is_to_be_an_ordinary_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "bwrap: Creating new namespace failed: Operation not permitted"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    _, _, advice = diagnose(said).partition("). ")
    assert advice.startswith("Run the server as an ordinary user")
    assert "seccomp=unconfined" in advice
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "as an ordinary user" not in diagnose(said)


def test_what_bubblewrap_said_is_cut() -> None:
    assert len(diagnose("x" * 10_000)) < 2000
