"""Which sandbox is chosen, what is said when none works, and the one that confines nothing."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import ConfigError, LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Sandbox, SandboxCommand, SandboxRequest
from kernel_mcp.sandbox.landlock import landlock_available
from kernel_mcp.sandbox.select import NoSandbox, proven_sandbox, select_sandbox
from kernel_mcp.sandbox.self_test import run_confined

NEEDS_LANDLOCK = pytest.mark.skipif(
    (reason := landlock_available()) is not None, reason=str(reason)
)


def fake_bwrap(folder: Path, body: str) -> None:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, bwrap, landlock, container, none"):
        select_sandbox("gvisor")


def test_no_confinement_is_had_by_name_only_and_says_so() -> None:
    report = select_sandbox("none").report()
    assert report.enforced == ()
    assert "no boundary" in report.gaps[0]


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


@NEEDS_LANDLOCK
def test_a_weaker_sandbox_is_taken_only_where_it_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed") as refusal:
        select_sandbox("auto")
    assert "`--sandbox bwrap,landlock` takes it instead" in str(refusal.value)
    assert select_sandbox("bwrap", "landlock").name == "landlock"


@NEEDS_LANDLOCK
def test_taking_a_later_sandbox_is_a_warning_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert proven_sandbox("bwrap", "landlock").name == "landlock"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the landlock sandbox, with the gaps that `info` lists" in record.getMessage()
    assert "--sandbox bwrap,landlock names before it" in record.getMessage()
    assert "bwrap: bubblewrap is not installed" in record.getMessage()


@NEEDS_LANDLOCK
def test_why_the_strongest_failed_is_told_where_a_weaker_one_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sandbox: Sandbox) -> None:
        raise SandboxUnavailable(f"the {sandbox.name} sandbox does not hold here: no filter")

    with pytest.raises(SandboxUnavailable) as refusal:
        select_sandbox("bwrap", "landlock", prove=refuse)
    first, second = str(refusal.value).splitlines()
    assert "the bwrap sandbox does not hold" in first
    assert "the landlock sandbox does not hold" in second
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable) as refusal:
        select_sandbox("bwrap", "landlock", prove=refuse)
    assert str(refusal.value).startswith("bwrap: bubblewrap is not installed")


@NEEDS_LANDLOCK
def test_why_the_strongest_failed_is_told_where_the_weaker_one_is_in_the_way_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sandbox: Sandbox) -> None:
        raise LaunchError("kernels may not enter this folder")

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed") as refusal:
        select_sandbox("auto", prove=refuse)
    assert "may not enter" not in str(refusal.value)
    with pytest.raises(SandboxUnavailable, match="landlock: kernels may not enter this folder"):
        select_sandbox("bwrap", "landlock", prove=refuse)


def test_folders_of_a_proof_can_be_entered_by_the_user_of_the_kernel() -> None:
    seen: list[int] = []

    class Watched(NoSandbox):
        def identity(self, workspace: Path | None = None) -> Identity | None:
            return Identity(os.geteuid(), os.getegid())

        def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
            seen.append(stat.S_IMODE(request.workspace.parent.stat().st_mode))
            return super().command(request, identity)

    assert run_confined(Watched(), ["/bin/true"]).returncode == 0
    assert seen == [0o711]


def test_ctrl_c_in_a_terminal_reaches_no_proof() -> None:
    """It would end bwrap alone, whose child ignores it and waits for bwrap for ever."""
    code = "import os; print(os.getpgrp())"
    done = run_confined(NoSandbox(), [sys.executable, "-c", code])
    assert int(done.stdout) != os.getpgrp()


@NEEDS_LANDLOCK
def test_landlock_holds_what_it_promises() -> None:
    assert proven_sandbox("landlock").report().backend == "landlock"


@NEEDS_LANDLOCK
def test_the_first_that_works_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert select_sandbox("bwrap", "landlock").name == "bwrap"
    assert select_sandbox("landlock", "bwrap").name == "landlock"
    assert caplog.records == []


def test_where_nothing_works_every_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("kernel_mcp.sandbox.landlock.unavailable", lambda: "Linux is too old")
    with pytest.raises(SandboxUnavailable) as refusal:
        select_sandbox("bwrap", "landlock")
    assert "bubblewrap is not installed" in str(refusal.value)
    assert "Linux is too old" in str(refusal.value)
    with pytest.raises(SandboxUnavailable) as shorter:
        select_sandbox("auto")
    assert "landlock" not in str(shorter.value)


def test_temporary_files_and_settings_are_not_looked_for_where_others_can_write(
    tmp_path: Path,
) -> None:
    request = SandboxRequest(["true"], {}, tmp_path, tmp_path, (), Limits())
    sandbox = NoSandbox()
    sandbox.command(request, None)
    tmp = Path(sandbox.guest_paths(tmp_path, tmp_path).tmp)
    assert tmp.parent == tmp_path
    assert tmp.stat().st_mode & 0o777 == 0o700
    tmp.rmdir()
    tmp.symlink_to("/tmp")
    with pytest.raises(LaunchError, match="in the way"):
        sandbox.command(request, None)
