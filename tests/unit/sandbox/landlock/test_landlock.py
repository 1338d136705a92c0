"""The preparations of the Landlock backend before anything runs."""

from __future__ import annotations

import errno
import platform
import resource
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox import landlock
from kernel_mcp.sandbox.base import Grants, SandboxCommand, SandboxRequest
from kernel_mcp.sandbox.landlock import LandlockSandbox, landlock_report, resource_limits, rules
from kernel_mcp.sandbox.landlock.rules import (
    ON_FILES,
    READ,
    WRITE,
    Access,
    Ruleset,
    allow_required,
    closed_folder,
)
from kernel_mcp.units import GIB, MIB
from kernel_specs.restricted.confine import RESERVED_ADDRESSES

needs_landlock = pytest.mark.skipif(
    (reason := landlock.landlock_available()) is not None, reason=str(reason)
)
NOBODY = Identity(uid=54_321, gid=54_321)


def pretend_version(monkeypatch: pytest.MonkeyPatch, found: int | OSError) -> None:
    def version() -> int:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(rules, "version", version)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (OSError(errno.ENOSYS, "?"), "Linux 6.12"),
        (OSError(errno.EOPNOTSUPP, "?"), "lsm="),
        (OSError(errno.EPERM, "?"), "landlock_*"),
        (OSError(errno.EIO, "?"), "does not answer"),
        (5, "ABI 5"),
    ],
)
def test_a_linux_that_cannot_is_told_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, found: int | OSError, words: str
) -> None:
    pretend_version(monkeypatch, found)
    with pytest.raises(SandboxUnavailable, match="landlock sandbox cannot be used") as caught:
        LandlockSandbox.detect()
    assert words in str(caught.value)


def test_a_newer_landlock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, 9)
    assert rules.unavailable() is None


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in (landlock.landlock_available() or "")


def test_no_rule_lets_devices_be_made_or_controlled() -> None:
    assert not WRITE & (Access.MAKE_CHAR | Access.MAKE_BLOCK | Access.IOCTL_DEV)


def test_reading_changes_nothing() -> None:
    assert Access(READ) == Access.READ_FILE | Access.READ_DIR
    assert not READ & ON_FILES & ~Access.READ_FILE


@needs_landlock
@pytest.mark.parametrize(
    "path", ["/", "/etc", "/proc", "/tmp", "/home", "/root", "/var", "relative", "/usr/../etc"]
)
def test_folders_that_hold_too_much_are_not_opened(path: str) -> None:
    ruleset = Ruleset()
    try:
        with pytest.raises(LaunchError, match="folder or file of its own"):
            allow_required(ruleset, [Path(path)], READ)
    finally:
        ruleset.close()


@needs_landlock
def test_a_missing_prefix_is_named(tmp_path: Path) -> None:
    ruleset = Ruleset()
    try:
        with pytest.raises(LaunchError, match="nowhere"):
            allow_required(ruleset, [tmp_path / "nowhere"], READ)
    finally:
        ruleset.close()


def test_a_folder_that_others_may_not_enter_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    found = closed_folder([inner], NOBODY)
    assert found is not None
    assert inner.is_relative_to(found)


def test_the_own_group_and_user_may_enter(tmp_path: Path) -> None:
    file = Path("/usr/bin/env")
    assert closed_folder([file], NOBODY) is None
    mine = Identity(uid=tmp_path.stat().st_uid, gid=0)
    tmp_path.chmod(0o300)
    assert closed_folder([tmp_path], mine) != str(tmp_path)
    tmp_path.chmod(0o700)


def test_a_limit_of_zero_is_no_limit() -> None:
    free = Limits(memory_bytes=0, pids=0, disk_bytes=0, tmp_bytes=0, open_files=0)
    found = resource_limits(free, NOBODY)
    for kind in ("NPROC", "AS", "NOFILE", "FSIZE"):
        assert getattr(resource, f"RLIMIT_{kind}") not in found
    assert found[resource.RLIMIT_CORE] == (0, 0)


def test_the_limits_of_a_kernel_become_ceilings() -> None:
    limits = Limits(memory_bytes=GIB, pids=10, disk_bytes=MIB, tmp_bytes=2 * MIB, open_files=99)
    found = resource_limits(limits, NOBODY)
    assert found[resource.RLIMIT_DATA] == (2 * GIB, 2 * GIB)
    assert found[resource.RLIMIT_AS] == (2 * GIB, 2 * GIB + RESERVED_ADDRESSES)
    assert found[resource.RLIMIT_NPROC] == (11, 11)
    assert found[resource.RLIMIT_FSIZE] == (2 * MIB, 2 * MIB)
    assert found[resource.RLIMIT_NOFILE] == (99, 99)


def test_processes_of_a_shared_user_are_counted_in() -> None:
    shared, _ = resource_limits(Limits(pids=10), None)[resource.RLIMIT_NPROC]
    assert shared > 10


@pytest.mark.parametrize("own_user", [True, False])
def test_the_report_names_what_is_missing(own_user: bool) -> None:
    report = landlock_report(own_user=own_user)
    text = "\n".join(report.gaps)
    for gap in ("process ids", "host's name", "/dev/shm", "pty", "multiprocessing", "datagram"):
        assert gap in text
    assert ("CAP_DAC_READ_SEARCH" in text) == own_user
    assert ("server's user: Linux counts" in text) != own_user
    assert ("chmod" in text) != own_user


def test_the_report_is_true_with_what_is_open() -> None:
    grants = Grants(mounts=True, writable=("/data",), devices=("/dev/x",))
    text = "; ".join(landlock_report(grants, own_user=False).enforced)
    assert "one for temporary files and /data, no other" in text
    assert "readable: `mounts` without known secrets, the system's programs" in text
    assert "of the host's devices only /dev/x" in text
    closed = "; ".join(landlock_report(own_user=False).enforced)
    assert "the folder of its sockets and one for temporary files, no other" in closed
    assert "mounts" not in closed
    assert "devices" not in closed


@pytest.fixture
def sandbox() -> LandlockSandbox:
    return LandlockSandbox(filters=(b"", b""), identities=None)


@pytest.fixture
def request_for(tmp_path: Path) -> SandboxRequest:
    workspace, sockets = tmp_path / "workspace", tmp_path / "sockets"
    workspace.mkdir()
    sockets.mkdir()
    return SandboxRequest(
        argv=["/bin/true"],
        env={"LANG": "C.UTF-8", "TMPDIR": "/tmp"},
        workspace=workspace,
        sockets=sockets,
        readonly=[],
        limits=Limits(),
        inherit=[],
    )


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


@needs_landlock
def test_temporary_files_go_beside_the_sockets(
    sandbox: LandlockSandbox, request_for: SandboxRequest
) -> None:
    paths = sandbox.guest_paths(request_for.workspace, request_for.sockets)
    command: SandboxCommand = sandbox.command(request_for, None)
    command.close_passed()
    assert paths.tmp == command.env["TMPDIR"]
    assert not paths.own_process_count
    assert Path(paths.tmp).stat().st_mode & 0o777 == 0o700
    assert Path(paths.tmp).parent == request_for.sockets
    assert command.status_fd == -1


@needs_landlock
def test_a_planted_link_in_the_place_of_temporary_files_is_refused(
    sandbox: LandlockSandbox, request_for: SandboxRequest
) -> None:
    (request_for.sockets / "tmp").symlink_to("/")
    with pytest.raises(LaunchError, match="in the way"):
        sandbox.command(request_for, None)


@needs_landlock
def test_a_failing_command_leaves_no_descriptor(
    sandbox: LandlockSandbox, request_for: SandboxRequest
) -> None:
    before = open_descriptors()
    request_for.workspace.rmdir()
    with pytest.raises(LaunchError):
        sandbox.command(request_for, None)
    assert open_descriptors() == before
