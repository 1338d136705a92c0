"""Limits of one kernel without control groups: disk and weighed memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.limits import kernel as kernel_module
from kernel_mcp.limits import meter, quota
from kernel_mcp.limits import quota as quota_module
from kernel_mcp.limits.meter import Memory
from kernel_mcp.linux import proc as usage_module
from kernel_mcp.linux.walk import TreeSize
from kernel_mcp.units import GIB, MIB
from tests.unit.fake_cgroups import FakeGroups
from tests.unit.limits.watched import KILLED, SMALL, Watched, with_groups

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("always_due")]


async def test_a_cell_that_fills_the_disk_is_stopped(watched: Watched) -> None:
    await watched.begin()
    await watched.limits.check_disk()
    assert watched.done == []
    watched.fill(5 * MIB)
    await watched.limits.check_disk()
    assert watched.done == ["stop"]
    assert watched.limits.cause == "disk quota (the workspace holds 5 MiB, limit 4 MiB)"


async def test_each_folder_is_looked_at_when_it_is_due_and_once_more_at_rest(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looked: list[str] = []
    due = {"the workspace", "the temporary folder"}
    monkeypatch.setattr(quota_module.FolderQuota, "due", lambda self, _others: self._name in due)
    monkeypatch.setattr(
        quota_module.FolderQuota, "look", lambda self, _processes: looked.append(self._name)
    )
    limits = watched.limits
    limits.quotas = [
        *limits.quotas,
        quota_module.FolderQuota(tmp_path, "the temporary folder", MIB),
    ]
    await watched.begin()
    looked.clear()
    due.remove("the workspace")
    await limits.check_disk()
    assert looked == ["the temporary folder"]
    limits.end()
    await limits.check_disk()
    assert (looked, limits.awake) == (["the temporary folder"] * 2, True)
    await limits.check_disk()
    assert len(looked) == 2  # it is at rest, and was looked at since
    due.add("the workspace")
    await limits.check_disk()
    assert looked[2:] == ["the workspace"]
    assert not limits.awake


class Looks:
    """Counts looks at the workspace of a kernel that has used `cpu_s`."""

    def __init__(self, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s = 1.0
        self.number = 0
        self._limits = watched.limits
        self.on_look: Callable[[], None] = lambda: None
        monkeypatch.setattr(watched.limits._gauge, "cpu_s", self._used)
        monkeypatch.setattr(quota_module.FolderQuota, "look", self._look)

    async def _used(self) -> float:
        return self.cpu_s

    def _look(self, _processes: object) -> None:
        self.number += 1
        self.on_look()

    async def after(self, cpu_s: float = 0.0) -> tuple[int, bool]:
        """Check after so much more processor time; the looks so far, and whether it is awake."""
        self.cpu_s += cpu_s
        await self._limits.check_disk()
        return self.number, self._limits.awake


async def test_one_look_after_a_cell_is_enough_unless_the_kernel_computes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(watched, monkeypatch)
    await watched.begin()
    watched.limits.end()
    looks.number = 0
    assert await looks.after() == (1, True)
    assert await looks.after() == (1, False)
    assert await looks.after(0.02) == (2, True)  # a thread that was left behind
    assert await looks.after(0.02) == (3, True)
    assert await looks.after() == (3, False)


async def test_little_work_between_cells_adds_up_to_a_look(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(watched, monkeypatch)
    await watched.begin()
    watched.limits.end()
    await looks.after()
    await looks.after()
    looks.number = 0
    assert [(await looks.after(0.004))[0] for _ in range(6)] == [0, 0, 1, 1, 1, 2]


async def test_what_a_cell_changes_during_a_look_is_looked_at_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(watched, monkeypatch)
    await watched.begin()
    watched.limits.end()
    await looks.after()
    looks.cpu_s += 1
    looks.number = 0
    looks.on_look = partial(anyio.from_thread.run, watched.begin)
    assert await looks.after() == (1, True)
    looks.on_look = lambda: None
    watched.limits.end()
    looks.number = 0
    assert await looks.after() == (1, False)  # next to no processor time went by


async def test_a_look_that_is_not_due_is_all_that_a_kernel_at_rest_waits_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[int] = []
    monkeypatch.setattr(quota_module.FolderQuota, "due", lambda _self, others: others in due)
    monkeypatch.setattr(quota_module.FolderQuota, "in_turn", lambda _self, others: others in due)
    looks = Looks(watched, monkeypatch)
    assert not watched.limits.pressing(9)
    await watched.begin()
    assert watched.limits.pressing(9)
    watched.limits.end()
    looks.number = 0
    assert await looks.after() == (0, True)  # it has just computed
    assert watched.limits.pressing(9)
    assert await looks.after() == (0, True)
    assert not watched.limits.pressing(9)
    due.append(9)
    assert watched.limits.pressing(9)
    await watched.limits.check_disk(9)
    assert looks.number == 1
    assert not watched.limits.pressing(9)


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


async def test_the_cause_of_a_kill_is_told_though_a_cell_ends_or_begins_meanwhile(
    watched: Watched,
) -> None:
    await watched.begin()
    watched.limits.kill_for("it did what it must not")
    watched.limits.end()
    await watched.begin()
    assert "it did what it must not" in watched.limits.explain(KILLED).describe()


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
        monkeypatch.setattr(kernel_module, "family", lambda _roots, **_: [1, 2, 3, 4])

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


async def test_too_much_memory_ends_who_holds_most_of_it_and_other_reasons_end_all(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    Processes(monkeypatch, sees=GIB, share=GIB)
    watched.limits.relieve = lambda: watched.done.append("relieve")
    await watched.begin()
    await watched.limits.check_memory()
    assert watched.done == ["relieve"]
    watched.limits.kill_for("another reason")
    assert watched.done == ["relieve", "kill"]


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
    monkeypatch.setattr(meter, "closely", lambda _pid: held.wait(60) and Memory())
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
        await watched.limits.used()
    assert watched.limits.awake
    assert before.measured
    assert not watched.done
    said = [record for record in caplog.records if "no further thread" in record.message]
    assert len(said) == len(caplog.records) == 3
    assert not any(record.exc_info for record in said)


async def test_while_a_cell_runs_nobody_asks_what_it_has_computed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []

    async def cpu_s() -> float:
        asked.append(None)
        return 0.0

    monkeypatch.setattr(watched.limits._gauge, "cpu_s", cpu_s)
    await watched.begin()
    await watched.limits.check_disk()
    assert not asked
    watched.limits.end()
    await watched.limits.check_disk()
    assert len(asked) == 1


async def test_what_cannot_be_weighed_is_too_much(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MOST_FILES", 2)
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
    monkeypatch.setattr(quota_module, "measure", lambda *_, **__: TreeSize(0, 3, unreadable=2))
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


async def test_a_checkpoint_that_goes_on_growing_counts(watched: Watched) -> None:
    code = "import sys\nheld = bytearray(64 << 20)\nprint(flush=True)\nsys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as copy:
        assert copy.stdout is not None
        copy.stdout.readline()
        watched.limits.admit([copy.pid])
        for held, counted in ((64 * MIB, False), (8 * MIB, True)):
            watched.limits.make_room(held, {copy.pid: held})
            assert (copy.pid in watched.limits._processes()) is counted
        copy.kill()
