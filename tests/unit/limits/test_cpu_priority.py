"""Who goes first where the system does not tell what a kernel has used."""

from __future__ import annotations

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.groups import GroupTree
from kernel_mcp.limits.kernel import LONG_S, CpuPriority
from kernel_mcp.linux.cgroupfs import find_hierarchies
from tests.unit.fake_cgroups import FakeGroups


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
