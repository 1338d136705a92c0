"""How cells, the watchdog and the end of a kernel see its limits."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.config.values import GIB, MIB
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.limits import deleted_files, meter
from kernel_mcp.limits import kernel as kernel_module
from kernel_mcp.limits import quota as quota_module
from kernel_mcp.limits.groups import GroupTree
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.limits.meter import Memory
from kernel_mcp.linux import cgroupfs
from kernel_mcp.linux import proc as usage_module
from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.linux.walk import Holding
from kernel_mcp.sandbox.base import SandboxCommand, SandboxReport
from tests.unit.fake_cgroups import FakeGroups

pytestmark = pytest.mark.anyio

SMALL = Limits(memory_bytes=2 * GIB, disk_bytes=4 * MIB, tmp_bytes=0)
KILLED = ExitStatus(signal=signal.SIGKILL)
REPORT = SandboxReport(backend="test", enforced=(), gaps=())


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module.FolderQuota, "due", lambda _self: True)


class Watched:
    """A kernel's limits, with what was done to it."""

    def __init__(self, limits: KernelLimits, workspace: Path) -> None:
        self.limits = limits
        self.workspace = workspace
        self.done: list[str] = []
        limits.kill = lambda: self.done.append("kill")

    async def begin(self) -> None:
        await self.limits.begin(lambda: self.done.append("stop"))

    def fill(self, size: int, name: str = "file") -> None:
        (self.workspace / name).write_bytes(b"x" * size)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def watched(workspace: Path) -> Watched:
    return Watched(ResourceManager().open(SMALL, workspace, workspace), workspace)


def with_groups(groups: FakeGroups) -> ResourceManager:
    hierarchies = find_hierarchies(groups.process)
    return ResourceManager(
        GroupTree.create(hierarchies, "kernel-mcp-1-x", groups.process / "record")
    )


async def test_a_cell_that_fills_the_disk_is_stopped(watched: Watched) -> None:
    await watched.begin()
    await watched.limits.check_disk()
    assert watched.done == []
    watched.fill(5 * MIB)
    await watched.limits.check_disk()
    assert watched.done == ["stop"]
    assert watched.limits.cause == "disk quota (the workspace holds 5 MiB, limit 4 MiB)"


async def test_after_the_stop_the_kernel_may_live_on(watched: Watched) -> None:
    await watched.begin()
    watched.fill(5 * MIB)
    await watched.limits.check_disk()
    watched.limits.end()
    watched.fill(6 * MIB)  # what was still written until the cell had stopped
    await watched.limits.check_disk()
    await watched.limits.check_disk()
    assert watched.done == ["stop"]
    await watched.begin()
    (watched.workspace / "file").unlink()
    await watched.limits.check_disk()
    assert watched.done == ["stop"]


async def test_what_goes_on_growing_between_cells_is_killed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_module, "SLACK_BYTES", MIB)
    await watched.begin()
    watched.limits.end()
    watched.fill(6 * MIB)
    await watched.limits.check_disk()
    assert watched.done == ["kill"]
    assert "disk quota" in watched.limits.explain(KILLED).describe()


async def test_twice_the_quota_is_killed_at_once_and_no_cell_runs_then(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched.limits.quotas[0], "_far", 8 * MIB)
    await watched.begin()
    watched.fill(9 * MIB)
    await watched.limits.check_disk()
    assert watched.done == ["stop", "kill"]
    watched.limits.end()
    with pytest.raises(WorkspaceError, match="reset with files=true"):
        await watched.begin()
    (watched.workspace / "file").unlink()
    await watched.begin()


async def test_files_from_before_count_for_a_new_kernel(watched: Watched) -> None:
    watched.fill(5 * MIB)
    await watched.begin()
    await watched.limits.check_disk()
    assert watched.done == []


class Processes:
    """Processes as /proc tells of them: what each sees, and what its share of that is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sees: int, share: int) -> None:
        self.sees, self.share = sees, share
        self.failure: Exception | None = None
        monkeypatch.setattr(meter, "plainly", lambda _pid: self._told(self.sees))
        monkeypatch.setattr(meter, "closely", lambda _pid: self._told(self.share))
        monkeypatch.setattr(meter, "files_in_memory", lambda _processes: 0)
        monkeypatch.setattr(kernel_module, "family", lambda _roots: [1, 2, 3, 4])

    def _told(self, size: int) -> Memory:
        if self.failure is not None:
            raise self.failure
        return Memory(size)


async def test_without_a_group_memory_is_weighed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Processes(monkeypatch, sees=int(2.3 * GIB / 4), share=int(2.3 * GIB / 4))
    await watched.begin()
    await watched.limits.check_memory()
    assert watched.done == []
    found.sees = found.share = int(2.5 * GIB / 4)
    await watched.limits.check_memory()
    assert watched.done == ["kill"]
    assert watched.limits.explain(KILLED).describe() == (
        "killed by SIGKILL: out of memory (limit 2 GiB, peak 2.5 GiB)"
    )


async def test_shared_memory_counts_once_in_all_that_is_judged_and_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Processes(monkeypatch, sees=3 * GIB, share=GIB // 4)
    await watched.begin()
    await watched.limits.check_memory()
    assert watched.done == []
    assert watched.limits.usage().memory_bytes == GIB
    found.share = 3 * GIB
    await watched.limits.check_memory()
    assert watched.done == ["kill"]
    assert "peak 12 GiB" in watched.limits.explain(KILLED).describe()


async def test_a_process_that_keeps_its_share_to_itself_counts_with_all_it_sees(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    Processes(monkeypatch, sees=3 * GIB, share=0)
    monkeypatch.setattr(meter, "PATIENCE_S", 0.01)
    held = threading.Event()
    monkeypatch.setattr(meter, "closely", lambda _pid: held.wait(10) and Memory())
    await watched.limits.check_memory()
    held.set()
    assert watched.done == ["kill"]


@pytest.mark.parametrize(
    "reason",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RuntimeError("no new thread")],
)
async def test_what_the_server_lacks_is_no_reason_to_end_anything(
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: Exception,
) -> None:
    watched.limits.session = "s-1"
    watched.fill(5 * MIB)
    found = Processes(monkeypatch, sees=GIB // 4, share=GIB // 4)
    await watched.begin()
    await watched.limits.check_memory()
    await watched.limits.check_disk()
    before = watched.limits.quotas[0].measured
    monkeypatch.setattr(usage_module, "_ticks", lambda _pid: ((1, 1), 100, 0))
    used = watched.limits.usage()

    def failing(*_: object, **__: object) -> Any:
        raise reason

    found.failure = reason
    monkeypatch.setattr(quota_module, "measure", failing)
    monkeypatch.setattr(usage_module, "_ticks", failing)
    for _ in range(3):
        await watched.limits.check_memory()
        await watched.limits.check_disk()
        assert watched.limits.usage() == replace(used, measured=False)
    assert watched.limits.quotas[0].measured == before
    watched.limits.end()
    await watched.begin()
    assert watched.done == []
    told = [text for text in caplog.messages if "session s-1 could not be measured" in text]
    assert len(told) == len(set(told)) == 3, told


async def test_a_system_that_gives_no_thread_leaves_the_last_values(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    watched.limits.admit([os.getpid()])
    await watched.begin()
    await watched.limits.check_disk()
    before = watched.limits.usage()
    monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
    for _ in range(3):
        await watched.limits.check_memory()
        await watched.limits.check_disk()
    assert watched.limits.awake
    assert before.measured
    assert not watched.done
    said = [record for record in caplog.records if "no further thread" in record.message]
    assert len(said) == len(caplog.records) == 3
    assert not any(record.exc_info for record in said)


async def test_what_cannot_be_weighed_is_too_much(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_files, "MOST_FILES", 2)
    watched.limits.admit([os.getpid()])
    await watched.limits.check_memory()
    assert watched.done == ["kill"]
    assert watched.limits.explain(KILLED).describe() == (
        "killed by SIGKILL: out of memory (its processes hold more files than can be measured)"
    )


async def test_folders_that_cannot_be_seen_are_said_once_and_held_against_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.limits.session = "s-1"
    monkeypatch.setattr(quota_module, "measure", lambda *_, **__: Holding(0, 3, unseen=2))
    await watched.begin()
    await watched.limits.check_disk()
    assert watched.done == []
    [told] = caplog.messages
    assert told == (
        "the measured disk space of session s-1 is not all: 2 folders belong to others, who have "
        "closed them"
    )


async def test_memory_that_takes_long_to_weigh_is_weighed_seldom(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Processes(monkeypatch, sees=0, share=0)
    monkeypatch.setattr(meter, "LONG_S", -1.0)
    monkeypatch.setattr(meter, "REST", 1e9)
    await watched.limits.check_memory()
    found.sees = found.share = 9 * GIB
    await watched.limits.check_memory()
    assert watched.done == []


async def test_what_ends_because_the_machine_is_out_of_memory_is_not_said_to_be_too_large(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("memory")
    resources = with_groups(groups)
    limits = resources.open(SMALL, workspace, workspace)
    await limits.settled()
    folder = groups.root / "memory" / "kernel-mcp-1-x" / "k-1"
    (folder / "memory.oom_control").write_text("oom_kill 1\n")
    (folder / "memory.max_usage_in_bytes").write_text(str(300 * MIB))
    assert limits.explain(KILLED).cause == (
        "the machine was out of memory; this session held 300 MiB at most"
    )
    await limits.aclose()
    resources.close()


async def test_the_system_s_kill_for_lack_of_memory_is_named(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("memory")
    resources = with_groups(groups)
    limits = resources.open(SMALL, workspace, workspace)
    await limits.settled()
    folder = groups.root / "memory" / "kernel-mcp-1-x" / "k-1"
    await limits.begin(lambda: None)
    assert limits.explain(KILLED).cause == ""
    (folder / "memory.oom_control").write_text("oom_kill 2\n")
    (folder / "memory.max_usage_in_bytes").write_text(str(int(2.4 * GIB)))
    assert limits.explain(KILLED).cause == "out of memory (limit 2 GiB, peak 2.4 GiB)"
    assert limits.explain(ExitStatus(code=1)).cause == ""
    assert limits.end() == [
        "The system killed 2 processes of this session: out of memory (limit 2 GiB, peak 2.4 GiB)"
    ]
    assert limits.end() == []
    assert limits.explain(KILLED).cause == ""
    await limits.aclose()
    resources.close()
    assert not folder.exists()


async def test_a_group_that_cannot_be_made_fails_the_start(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("memory")
    resources = with_groups(groups)
    groups.unwritable.add(groups.root / "memory" / "kernel-mcp-1-x")
    limits = resources.open(SMALL, workspace, workspace)
    limits.admit([os.getpid()])
    with pytest.raises(PermissionError):
        await limits.settled()
    await limits.aclose()
    resources.close()


async def test_the_event_loop_goes_on_while_the_system_moves_a_process(
    groups: FakeGroups, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.mount_v1("memory")
    resources = with_groups(groups)
    moving = threading.Event()
    fake = cgroupfs.write

    def slowly(file: Path, value: int | str) -> None:
        if file.name == "cgroup.procs":
            assert moving.wait(10)
        fake(file, value)

    monkeypatch.setattr(cgroupfs, "write", slowly)
    limits = resources.open(SMALL, workspace, workspace)
    with subprocess.Popen(["sleep", "60"]) as child:
        limits.admit([child.pid])
        moving.set()
        await limits.settled()
        assert limits.group is not None
        assert limits.group.processes() == [child.pid]
        child.kill()
    await limits.aclose()
    resources.close()


async def test_processes_start_in_their_group(groups: FakeGroups, workspace: Path) -> None:
    groups.mount_v1("memory")
    limits = with_groups(groups).open(SMALL, workspace, workspace)
    started = limits.command(SandboxCommand(argv=["bwrap", "x"], pass_fds=[], env={}))
    assert started.argv[0] == "/bin/sh"
    assert list(started.argv[-2:]) == ["bwrap", "x"]
    assert str(groups.root / "memory" / "kernel-mcp-1-x" / "k-1" / "cgroup.procs") in started.argv


async def test_a_folder_that_is_not_there_leaves_no_group(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("memory")
    with pytest.raises(FileNotFoundError):
        with_groups(groups).open(SMALL, workspace / "missing", workspace)
    assert list(groups.root.rglob("k-1")) == []


@pytest.mark.parametrize("version", [1, 2])
async def test_a_long_cell_lets_others_go_first(
    groups: FakeGroups, workspace: Path, version: int
) -> None:
    own = groups.mount_v1("cpu", "cpuacct") if version == 1 else groups.mount_v2("cpu", root=True)
    limits = with_groups(groups).open(SMALL, workspace, workspace)
    await limits.settled()
    folder = own / "kernel-mcp-1-x" / "k-1"
    share = folder / ("cpu.shares" if version == 1 else "cpu.weight")
    usual = int(share.read_text())

    def use(seconds: float) -> None:
        if version == 1:
            (folder / "cpuacct.usage").write_text(str(int(seconds * 1e9)))
        else:
            (folder / "cpu.stat").write_text(f"usage_usec {int(seconds * 1e6)}\n")

    await limits.begin(lambda: None)
    for seconds in (10.0, 10.01, 10.02):  # it waits for its turn
        use(seconds)
        limits.rank()
    assert int(share.read_text()) == usual
    use(10.22)
    limits.rank()
    assert int(share.read_text()) == usual // 8
    limits.end()
    await limits.begin(lambda: None)
    assert int(share.read_text()) == usual


def test_the_report_says_what_is_in_force(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    groups.mount_v2("pids cpu", root=True)
    report = with_groups(groups).report(REPORT, Limits(cpus=1.5))
    assert report.enforced == (
        "memory 2 GiB by RLIMIT_AS and cgroup v1",
        "512 processes and threads by cgroup v2",
        "1.5 processors by cgroup v2",
        "workspace 1 GiB by a watchdog",
    )
    assert report.gaps == ()


def test_the_report_says_what_is_only_weakly_so() -> None:
    resources = ResourceManager(refusal="no controller of cgroups is mounted here")
    report = resources.report(REPORT, Limits(cpus=2, disk_bytes=0))
    why = "(no cgroup: no controller of cgroups is mounted here)"
    assert report.enforced == (
        f"memory 2 GiB by RLIMIT_AS and a watchdog {why}",
        f"512 processes and threads by RLIMIT_NPROC {why}",
    )
    assert report.gaps == (
        "no cgroup limits memory, processes and processors",
        "disk not limited at all",
    )


def test_the_weaker_form_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    ResourceManager(refusal="it is not mounted").warn(Limits())
    assert caplog.messages == [
        "no cgroup limits memory and processes of kernels: it is not mounted"
    ]
