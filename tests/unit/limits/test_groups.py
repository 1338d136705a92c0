"""The groups of a server on fake systems of every kind."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.groups import GroupsUnavailable, GroupTree, remove_recorded
from kernel_mcp.linux import cgroupfs
from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.units import GIB, MIB
from kernel_specs import linux
from tests.unit.fake_cgroups import FakeGroups

NAME = "kernel-mcp-1-abcd"
LIMITS = Limits(memory_bytes=GIB, pids=99, cpus=1.5)


def tree_of(groups: FakeGroups) -> GroupTree:
    return GroupTree.create(find_hierarchies(groups.process), NAME, record_of(groups))


def record_of(groups: FakeGroups, run: str = "s-abcd") -> Path:
    folder = groups.process / run
    folder.mkdir(exist_ok=True)
    return folder / "record"


def died(tree: GroupTree) -> None:
    for lock in tree._locks:
        os.close(lock)


def all_groups(groups: FakeGroups) -> list[Path]:
    return [path for path in groups.root.rglob(f"{NAME}*") if path.is_dir()]


def test_groups_of_version_1_are_entered_by_gates(groups: FakeGroups) -> None:
    folders = [groups.mount_v1("memory"), groups.mount_v1("cpu", "cpuacct")]
    group = tree_of(groups).kernel("k-1")
    group.make(LIMITS)
    assert group.enters_by_fds
    gates = group.entry_fds()
    assert [Path(f"/proc/self/fd/{fd}").readlink() for fd in gates] == [
        folder / NAME / "k-1" / "tasks" for folder in folders
    ]
    assert not any(map(os.get_inheritable, gates))
    linux.enter_groups(gates)
    linux.close_all(gates)
    assert {(folder / NAME / "k-1" / "tasks").read_text() for folder in folders} == {"0"}


def test_gates_that_cannot_all_be_had_are_given_back(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    second = groups.mount_v1("pids")
    group = tree_of(groups).kernel("k-1")
    group.make(LIMITS)
    (second / NAME / "k-1" / "tasks").unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        group.entry_fds()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_group_of_version_2_takes_what_is_moved_into_it(groups: FakeGroups) -> None:
    groups.mount_v1("cpuacct")
    groups.mount_v2("memory pids", root=True)
    group = tree_of(groups).kernel("k-1")
    group.make(LIMITS)
    assert not group.enters_by_fds
    assert [Path(each).name for each in group.entry()[-2:]] == ["tasks", "cgroup.procs"]


def test_version_1_limits_every_controller_in_its_own_tree(groups: FakeGroups) -> None:
    for controllers in (("memory",), ("pids",), ("cpu", "cpuacct")):
        groups.mount_v1(*controllers)
    tree = tree_of(groups)
    group = tree.kernel("k-1")
    group.make(LIMITS)
    read = {
        path.name: path.read_text()
        for path in groups.root.rglob("k-1/*")
        if path.name.endswith(("_in_bytes", "_us", "pids.max"))
    }
    assert read["memory.limit_in_bytes"] == read["memory.memsw.limit_in_bytes"] == "1288490188"
    assert read["memory.kmem.tcp.limit_in_bytes"] == str(64 * MIB)
    assert read["pids.max"] == "99"
    assert read["cpu.cfs_quota_us"] == "150000"
    assert tree.versions == {"memory": 1, "pids": 1, "cpu": 1, "cpuacct": 1}
    sample = group.sample()
    assert (sample.cpu_s, sample.memory_bytes) == (1.5, 1200)


def test_where_a_group_above_may_keep_fewer_processors_busy_that_holds(
    groups: FakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.mount_v1("cpu", "cpuacct")
    plain_write = cgroupfs.write

    def write(file: Path, value: int | str) -> None:
        if file.name == "cpu.cfs_quota_us":
            raise OSError(errno.EINVAL, "Invalid argument")
        plain_write(file, value)

    monkeypatch.setattr(cgroupfs, "write", write)
    tree_of(groups).kernel("k-1").make(LIMITS)
    assert (groups.root / "cpu,cpuacct" / NAME / "k-1").exists()


def test_without_swap_accounting_nothing_is_swapped(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    group = tree_of(groups).kernel("k-1")
    groups.missing.add("memory.memsw.limit_in_bytes")
    group.make(LIMITS)
    assert (groups.root / "memory" / NAME / "k-1" / "memory.swappiness").read_text() == "0"


def test_a_system_that_does_not_limit_buffers_of_tcp_limits_the_rest(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    groups.missing.add("memory.kmem.tcp.limit_in_bytes")
    tree_of(groups).kernel("k-1").make(LIMITS)
    folder = groups.root / "memory" / NAME / "k-1"
    assert (folder / "memory.limit_in_bytes").read_text() == "1288490188"


def test_a_limit_of_zero_is_not_written(groups: FakeGroups) -> None:
    groups.mount_v1("pids")
    tree_of(groups).kernel("k-1").make(Limits(pids=0))
    assert (groups.root / "pids" / NAME / "k-1" / "pids.max").read_text() == "max"


def test_version_2_moves_the_server_out_of_the_way_and_back(groups: FakeGroups) -> None:
    own = groups.mount_v2("memory pids cpu", "/app.scope")
    tree = tree_of(groups)
    assert (own / "cgroup.procs").read_text() == ""
    assert (own / NAME / "server" / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (own / NAME / "server" / "cpu.weight").read_text() == "1000"
    group = tree.kernel("k-1")
    group.make(LIMITS)
    folder = own / NAME / "k-1"
    assert (folder / "memory.max").read_text() == "1288490188"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cpu.max").read_text() == "150000 100000"
    assert (folder / "pids.max").read_text() == "99"
    assert (group.sample().cpu_s, group.sample().memory_bytes) == (2.5, 3050)
    assert (group.peak(), group.oom_kills()) == (4096, 1)
    tree.discard(group)
    tree.close()
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (own / "cgroup.subtree_control").read_text() == ""
    assert all_groups(groups) == []


def test_version_2_leaves_a_group_alone_that_others_are_in_too(groups: FakeGroups) -> None:
    own = groups.mount_v2("memory pids cpu", "/session.scope")
    before = f"{os.getpid()}\n{os.getppid()}\n"
    (own / "cgroup.procs").write_text(before)
    with pytest.raises(GroupsUnavailable, match=f"such as {os.getppid()}.*systemd-run"):
        tree_of(groups)
    assert (own / "cgroup.procs").read_text() == before
    assert (own / "cgroup.subtree_control").read_text() == ""
    assert all_groups(groups) == []


def test_version_2_takes_processes_along_that_the_server_has_started(groups: FakeGroups) -> None:
    own = groups.mount_v2("memory", "/app.scope")
    with subprocess.Popen(["sleep", "60"]) as child:
        (own / "cgroup.procs").write_text(f"{os.getpid()}\n{child.pid}\n")
        tree_of(groups)
        child.kill()
    assert str(child.pid) in (own / NAME / "server" / "cgroup.procs").read_text()


def test_in_the_root_group_of_version_2_nobody_has_to_move(groups: FakeGroups) -> None:
    own = groups.mount_v2("memory pids cpu", root=True)
    tree = tree_of(groups)
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (own / NAME / "cgroup.subtree_control").read_text() == "cpu memory pids"
    tree.close()
    assert all_groups(groups) == []


def test_what_goes_wrong_in_version_2_is_undone(groups: FakeGroups) -> None:
    own = groups.mount_v2("memory pids", "/app.scope")
    hierarchies = find_hierarchies(groups.process)
    (own / "cgroup.controllers").write_text("memory")
    with pytest.raises(GroupsUnavailable):
        GroupTree.create(hierarchies, NAME, groups.process / "record")
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert all_groups(groups) == []


def test_an_unwritable_group_is_refused_with_the_reason(groups: FakeGroups) -> None:
    own = groups.mount_v1("memory")
    groups.unwritable.add(own)
    with pytest.raises(GroupsUnavailable, match="memory: Permission denied"):
        tree_of(groups)
    assert not (groups.process / "record").exists()


def test_controllers_that_may_be_used_are(groups: FakeGroups) -> None:
    groups.unwritable.add(groups.mount_v1("memory"))
    groups.mount_v1("pids")
    tree = tree_of(groups)
    assert tree.versions == {"pids": 1}
    group = tree.kernel("k-1")
    group.make(LIMITS)
    assert group.sample().memory_bytes is None
    assert (group.peak(), group.oom_kills()) == (0, 0)


def test_no_hierarchy_is_refused_in_words(groups: FakeGroups) -> None:
    with pytest.raises(GroupsUnavailable, match="no controller"):
        GroupTree.create((), NAME, groups.process / "record")


def test_a_kernel_group_that_cannot_be_made_leaves_nothing(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    pids = groups.mount_v1("pids")
    tree = tree_of(groups)
    groups.unwritable.add(pids / NAME)
    with pytest.raises(PermissionError):
        tree.kernel("k-1").make(LIMITS)
    assert list(groups.root.rglob("k-1")) == []


def test_a_group_is_removed_when_the_last_process_is_gone(groups: FakeGroups) -> None:
    groups.mount_v1("pids")
    tree = tree_of(groups)
    with subprocess.Popen(["sleep", "60"]) as child:
        group = tree.kernel("k-1")
        group.make(LIMITS)
        group.admit([child.pid])
        tree.discard(group)  # kills it; the fake group does not notice
        assert child.wait() == -9
    folder = groups.root / "pids" / NAME / "k-1"
    assert folder.exists()
    (folder / "cgroup.procs").write_text("")
    tree.discard(tree.kernel("k-2"))
    assert not folder.exists()


def test_groups_of_a_dead_server_go_by_its_record(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    groups.mount_v1("pids", path="/elsewhere")
    tree = tree_of(groups)
    tree.kernel("k-1").make(LIMITS)
    assert len(all_groups(groups)) == 2
    remove_recorded(record_of(groups), groups.process)
    assert len(all_groups(groups)) == 2, "its server lives"
    died(tree)
    remove_recorded(record_of(groups), groups.process)
    assert all_groups(groups) == []
    remove_recorded(record_of(groups), groups.process)
    remove_recorded(groups.process / "no record", groups.process)


def test_a_record_cannot_name_other_groups(groups: FakeGroups, tmp_path: Path) -> None:
    """Nor a folder that only looks like one, whose processes would be killed."""
    own = groups.mount_v1("memory")
    (own / "cgroup.procs").write_text("")
    record = record_of(groups)
    with subprocess.Popen(["sleep", "60"]) as victim:
        named = [own, own / "kernel-mcp-1-dead", own / "kernel-mcp-1-abcd.service"]
        planted = [tmp_path / NAME, tmp_path / "below" / NAME]
        for folder in (*named[1:], *planted):
            folder.mkdir(parents=True)
            (folder / "cgroup.procs").write_text(f"{victim.pid}\n")
        (own / "kernel-mcp-2-abcd").symlink_to(tmp_path / NAME)
        detour = f"{own}/../../below/{NAME}"
        record.write_text(
            "".join(f"{it}\n" for it in (*named, *planted, own / "kernel-mcp-2-abcd", detour))
        )
        remove_recorded(record, groups.process)
        assert victim.poll() is None
        victim.kill()
    assert all(folder.exists() for folder in (*named, *planted))


def test_groups_beside_it_go_unless_their_server_lives(groups: FakeGroups) -> None:
    own = groups.mount_v1("memory")
    hierarchies = find_hierarchies(groups.process)
    died(GroupTree.create(hierarchies, "kernel-mcp-2-dead", record_of(groups, "s-dead")))
    live = GroupTree.create(hierarchies, "kernel-mcp-3-live", record_of(groups, "s-live"))
    live.kernel("k-1").make(LIMITS)
    groups.make(own / "kernel-mcp-web.service")
    tree_of(groups)
    names = {path.name for path in (groups.root / "memory").iterdir() if path.is_dir()}
    assert names == {"kernel-mcp-3-live", "kernel-mcp-web.service", NAME}


def test_a_group_with_the_server_in_it_is_never_killed(groups: FakeGroups) -> None:
    groups.mount_v1("pids")
    tree = tree_of(groups)
    group = tree.kernel("k-1")
    group.make(LIMITS)
    group.admit([os.getpid()])
    assert not group.remove()
