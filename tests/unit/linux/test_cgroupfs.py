"""Finding the control groups of this process in what /proc tells."""

from __future__ import annotations

from pathlib import Path

from kernel_mcp.linux.cgroupfs import Hierarchy, find_hierarchies
from tests.unit.fake_cgroups import FakeGroups


def test_version_1_has_a_tree_per_controller(groups: FakeGroups) -> None:
    memory = groups.mount_v1("memory", path="/service/a")
    both = groups.mount_v1("cpu", "cpuacct")
    groups.mount_v1("pids", path="/x")
    found = {tree.controllers: tree for tree in find_hierarchies(groups.process)}
    assert found[frozenset({"memory"})] == Hierarchy(1, memory, frozenset({"memory"}))
    assert found[frozenset({"cpu", "cpuacct"})].own == both
    assert len(found) == 3


def test_version_2_has_one_tree_with_the_controllers_that_reach_it(groups: FakeGroups) -> None:
    own = groups.mount_v2("cpuset cpu io memory pids", "/user/app")
    assert find_hierarchies(groups.process) == (
        Hierarchy(2, own, frozenset({"cpu", "memory", "pids"})),
    )


def test_a_hybrid_system_is_used_where_its_controllers_are(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    groups.mount_v2("hugetlb")
    assert [tree.version for tree in find_hierarchies(groups.process)] == [1]


def test_a_hybrid_system_may_have_useful_controllers_in_both(groups: FakeGroups) -> None:
    groups.mount_v1("memory")
    groups.mount_v2("pids cpu")
    found = find_hierarchies(groups.process)
    assert {(tree.version, *sorted(tree.controllers)) for tree in found} == {
        (1, "memory"),
        (2, "cpu", "pids"),
    }


def test_other_controllers_are_of_no_interest(groups: FakeGroups) -> None:
    (groups.process / "mountinfo").write_text(
        "36 25 0:32 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        "37 25 0:33 / /proc rw - proc proc rw\n"
        "broken\n"
    )
    (groups.process / "cgroup").write_text("1:name=systemd:/\n")
    assert find_hierarchies(groups.process) == ()


def test_a_container_sees_its_group_at_the_top_of_the_mount(groups: FakeGroups) -> None:
    own = groups.mount_v1("memory", path="/docker/1234", shown="/")
    mounts = groups.process / "mountinfo"
    mounts.write_text(mounts.read_text().replace("0:32 / ", "0:32 /docker/1234 "))
    assert [tree.own for tree in find_hierarchies(groups.process)] == [own]


def test_a_mount_that_does_not_show_the_group_is_not_used(groups: FakeGroups) -> None:
    groups.mount_v1("memory", path="/docker/1234", shown="/")
    mounts = groups.process / "mountinfo"
    mounts.write_text(mounts.read_text().replace("0:32 / ", "0:32 /docker/other "))
    assert find_hierarchies(groups.process) == ()


def test_spaces_in_the_mount_point_are_understood(groups: FakeGroups) -> None:
    own = groups.mount_v1("memory")
    spaced = own.with_name("with space")
    own.rename(spaced)
    mounts = groups.process / "mountinfo"
    mounts.write_text(mounts.read_text().replace(str(own), str(spaced).replace(" ", "\\040")))
    assert [tree.own for tree in find_hierarchies(groups.process)] == [spaced]


def test_no_proc_means_no_groups(tmp_path: Path) -> None:
    assert find_hierarchies(tmp_path / "nowhere") == ()
