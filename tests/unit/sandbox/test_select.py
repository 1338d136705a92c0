"""The choice of a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError, SandboxUnavailable
from kernel_mcp.sandbox.select import select_sandbox


def fake_bwrap(folder: Path, body: str) -> None:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, bwrap, none"):
        select_sandbox("gvisor")


def test_no_confinement_is_had_by_name_only_and_says_so() -> None:
    report = select_sandbox("none").report()
    assert report.enforced == ()
    assert "nothing is enforced" in report.gaps[0]


@pytest.mark.parametrize("name", ["auto", "bwrap"])
def test_a_missing_bubblewrap_is_refused_with_the_install_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
        select_sandbox(name)


def test_a_bubblewrap_that_cannot_run_is_refused_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_bwrap(
        tmp_path,
        '[ "$1" = --help ] && echo "--perms --size" && exit 0\n'
        'echo "bwrap: No permissions to create new namespace" >&2; exit 1',
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        select_sandbox("auto")


def test_an_old_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bwrap(tmp_path, "echo --ro-bind")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"0\.5 or later"):
        select_sandbox("bwrap")


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        select_sandbox("bwrap")
