"""A kernel whose limits are watched, without a kernel."""

from __future__ import annotations

import signal
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.groups import GroupTree
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.units import GIB, MIB
from tests.unit.fake_cgroups import FakeGroups

SMALL = Limits(memory_bytes=2 * GIB, disk_bytes=4 * MIB, tmp_bytes=0)


KILLED = ExitStatus(signal=signal.SIGKILL)


def with_groups(groups: FakeGroups) -> ResourceManager:
    hierarchies = find_hierarchies(groups.process)
    return ResourceManager(
        GroupTree.create(hierarchies, "kernel-mcp-1-x", groups.process / "record")
    )


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
