"""Limits of one kernel in its control group, and what reports say of them."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits import groups as groups_module
from kernel_mcp.limits.groups import GroupTree
from kernel_mcp.limits.kernel import LONG_S, CpuPriority
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux import cgroupfs
from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.sandbox.base import SandboxCommand, SandboxReport
from kernel_mcp.units import GIB, MIB
from tests.unit.fake_cgroups import FakeGroups
from tests.unit.limits.watched import KILLED, SMALL, with_groups

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("always_due")]


REPORT = SandboxReport(backend="test", enforced=(), gaps=())


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
    aborted = ExitStatus(signal=6, detail="memory allocation of 9 bytes failed")
    assert "the limit is 2 GiB, and create_session" in limits.explain(aborted).cause
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
            assert moving.wait(60)
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
    assert str(groups.root / "memory" / "kernel-mcp-1-x" / "k-1" / "tasks") in started.argv


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


@pytest.mark.parametrize("version", [1, 2])
async def test_checkpoints_have_room_besides_the_limit_and_no_more_than_that(
    groups: FakeGroups, workspace: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = groups.mount_v1("memory") if version == 1 else groups.mount_v2("memory", root=True)
    monkeypatch.setattr(groups_module, "available_memory", lambda: 3 * GIB)
    limits = with_groups(groups).open(SMALL, workspace, workspace)
    await limits.settled()
    folder, usual = own / "kernel-mcp-1-x" / "k-1", int(2.4 * GIB)
    most = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    stat = "total_rss {}\ntotal_shmem 0\n" if version == 1 else "anon {}\nshmem 0\n"

    async def allowed(size: int) -> int:
        limits.make_room(size, {})
        limits.admit([])  # after which all is settled
        await limits.settled()
        return int(most.read_text())

    assert int(most.read_text()) == usual
    assert await allowed(GIB) == usual + GIB
    assert await allowed(50 * GIB) == usual + 2 * GIB  # a kernel can say that it holds anything
    monkeypatch.setattr(groups_module, "available_memory", lambda: MIB)
    assert await allowed(GIB) == usual + MIB
    monkeypatch.setattr(groups_module, "available_memory", lambda: 3 * GIB)
    assert await allowed(GIB) == usual + GIB
    (folder / "memory.stat").write_text(stat.format(usual + GIB // 2))
    assert await allowed(0) == usual + GIB  # Linux would have to end something
    (folder / "memory.stat").write_text(stat.format(usual // 2))
    assert await allowed(0) == usual
    if version == 1:
        assert (folder / "memory.memsw.limit_in_bytes").read_text() == str(usual)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("pids", [40, 0])
async def test_nothing_is_started_while_the_rest_of_a_kernel_is_ended(
    groups: FakeGroups, workspace: Path, version: int, pids: int
) -> None:
    own = groups.mount_v1("pids") if version == 1 else groups.mount_v2("pids", root=True)
    limits = with_groups(groups).open(replace(SMALL, pids=pids), workspace, workspace)
    await limits.settled()
    most = own / "kernel-mcp-1-x" / "k-1" / "pids.max"
    with limits.no_more_processes():
        assert most.read_text() == "1"
    assert most.read_text() == str(pids or "max")


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
        "no cgroup limits memory, processes and processors: see kernel-mcp doctor"
    ]


def test_time_that_has_passed_counts_where_processor_time_is_not_told(groups: FakeGroups) -> None:
    share = groups.mount_v1("cpu") / "kernel-mcp-1-x" / "k-1" / "cpu.shares"
    tree = GroupTree.create(
        find_hierarchies(groups.process), "kernel-mcp-1-x", groups.process / "record"
    )
    group = tree.kernel("k-1")
    group.make(Limits())
    now = [100.0]
    turns = CpuPriority(group, clock=lambda: now[0])
    turns.begin()
    turns.rank()
    assert share.read_text() == "1024"
    now[0] += 2 * LONG_S
    turns.rank()
    assert share.read_text() == "128"
    turns.begin()
    assert share.read_text() == "1024"


def test_without_a_group_there_is_nothing_to_rank() -> None:
    turns = CpuPriority(None)
    turns.begin()
    turns.rank()


async def test_a_group_tells_of_a_kernel_at_rest_what_it_needs_no_check_for(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("memory")
    groups.mount_v1("cpuacct")
    resources = with_groups(groups)
    limits = resources.open(SMALL, workspace, workspace)
    await limits.settled()
    usage = groups.root / "cpuacct" / "kernel-mcp-1-x" / "k-1" / "cpuacct.usage"
    usage.write_text("2000000000\n")
    await limits.begin(lambda: None)
    limits.end()
    assert not limits.at_rest()  # what its cell has done is not seen yet
    while limits.awake:
        await limits.check_disk()
    assert limits.at_rest()
    usage.write_text("2006000000\n")
    assert limits.at_rest()
    usage.write_text("2012000000\n")
    assert not limits.at_rest()
    usage.unlink()
    assert not limits.at_rest()
    await limits.aclose()
    resources.close()


async def test_a_kernel_whose_memory_no_group_bounds_is_checked_at_rest(
    groups: FakeGroups, workspace: Path
) -> None:
    groups.mount_v1("pids")
    groups.mount_v1("cpuacct")
    resources = with_groups(groups)
    limits = resources.open(SMALL, workspace, workspace)
    await limits.settled()
    usage = groups.root / "cpuacct" / "kernel-mcp-1-x" / "k-1" / "cpuacct.usage"
    usage.write_text("0\n")
    assert limits.awake is False
    assert not limits.at_rest()
    await limits.aclose()
    resources.close()
