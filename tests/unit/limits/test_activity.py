"""Processes are listed again only after one of those that are known has run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits import meter
from kernel_mcp.limits.activity import Activity
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import has_own_pids, processor_ns, tree, waits_for_machine

pytestmark = pytest.mark.anyio

COMMANDS = """
import os, sys
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Worker:
    """A process that runs one line of Python at a time."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.run("pass")

    def run(self, line: str) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        print(line, file=self.popen.stdin, flush=True)
        assert self.popen.stdout.readline() == "done\n"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.popen.kill()
    made.popen.communicate()


def settled(activity: Activity) -> list[int]:
    """List until the worker waits for its next line: it says that it is done before that."""
    while True:
        found = activity.processes()
        if not any(map(waits_for_machine, found)) and activity.since() == 0:  # in this order
            return found


def limits() -> KernelLimits:
    return KernelLimits(
        Limits(),
        membership=None,
        quotas=(),
        wake=lambda _kernel: None,
        forget=lambda _kernel: None,
    )


async def looked(kernel: KernelLimits) -> None:
    """Look at memory until nothing has run since."""
    settled(kernel._activity)
    for _ in range(3):
        await kernel.check_memory()


def test_what_has_not_run_need_not_be_listed(worker: Worker) -> None:
    lists: list[None] = []

    def processes() -> list[int]:
        lists.append(None)
        return list(tree(worker.popen.pid))

    activity = Activity(processes)
    assert activity.since() is None
    assert settled(activity) == [worker.popen.pid]
    asked = len(lists)
    assert [activity.since() for _ in range(5)] == [0] * 5
    assert len(lists) == asked
    worker.run("sum(range(10**6))")
    used = activity.since()
    assert used is not None
    assert 0 < used <= (processor_ns(worker.popen.pid) or 0)


def test_a_process_that_was_started_shows_as_work_of_the_one_that_started_it(
    worker: Worker,
) -> None:
    activity = Activity(lambda: tree(worker.popen.pid))
    settled(activity)
    worker.run("child = os.fork() or os.execvp('sleep', ['sleep', '60'])")
    assert activity.since()
    found = activity.processes()
    assert len(found) == 2
    assert (
        activity.since() is None
    )  # the new one may have started another before its clock was read
    assert settled(activity) == found
    worker.run("os.kill(child, 9), os.waitpid(child, 0)")
    assert activity.since() is None
    assert settled(activity) == [worker.popen.pid]


def test_a_process_with_the_id_of_one_that_computed_more_is_no_rest() -> None:
    clocks = {1: 10, 2: 9_000_000}
    activity = Activity(lambda: list(clocks), clocks.get)
    while activity.since() is None:
        activity.processes()
    clocks.update({1: 8_000_000, 2: 5})
    assert activity.since() is None


def test_processor_time_never_falls_and_has_that_of_children(worker: Worker) -> None:
    activity = Activity(lambda: tree(worker.popen.pid))
    activity.processes()
    before = activity.cpu_s()
    worker.run("child = os.fork() or [sum(range(10**6)), os.kill(os.getpid(), 19)]")
    worker.run("os.waitpid(child, os.WUNTRACED)")
    own = activity.cpu_s()
    activity.processes()
    both = activity.cpu_s()
    worker.run("os.kill(child, 9), os.waitpid(child, 0)")
    activity.processes()
    after = activity.cpu_s()
    assert before is not None
    assert own is not None
    assert both is not None
    assert after is not None
    assert before < own < both < after


def test_without_such_clocks_processes_are_always_listed() -> None:
    activity = Activity(lambda: [os.getpid()], clock=lambda _pid: None)
    assert activity.processes() == [os.getpid()]
    assert activity.since() is None
    assert activity.cpu_s() is None


async def test_a_list_for_something_else_hides_no_growth_from_the_next_look(
    worker: Worker,
) -> None:
    kernel = limits()
    kernel.admit([worker.popen.pid])
    await looked(kernel)
    assert kernel.at_rest()
    worker.run("kept = bytearray(10**7)")
    settled(kernel._activity)  # as a scan of folders lists, or an answer about memory
    kernel.usage()
    assert not kernel.at_rest()
    worker.run("child = os.fork() or [sum(range(10**5)), os.kill(os.getpid(), 19)]")
    worker.run("os.waitpid(child, os.WUNTRACED)")
    kernel.usage()
    kernel.usage()
    assert kernel.memory_due(10**6)
    await looked(kernel)
    assert not kernel.memory_due(0)
    worker.run("os.kill(child, 9), os.waitpid(child, 0)")
    await looked(kernel)
    assert kernel.at_rest()


async def test_what_a_launcher_tells_makes_processes_be_listed(worker: Worker) -> None:
    kernel = limits()
    assert kernel.memory_due(0)
    kernel.admit([worker.popen.pid])
    activity = kernel._activity
    await looked(kernel)
    assert activity.processes() == [worker.popen.pid]
    assert not kernel.memory_due(0)
    assert kernel.at_rest()
    kernel.make_room(0, {worker.popen.pid: 10**6})  # a copy that waits may go on
    assert kernel.memory_due(0)
    assert not kernel.at_rest()


async def test_light_work_is_looked_at_the_less_often_the_more_kernels_there_are(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = limits()
    kernel.admit([worker.popen.pid])
    await looked(kernel)
    gauge = kernel._gauge
    gauge._memory.looked_at, gauge._memory.cost_s = 100.0, 0.01
    now = 100.0 + 0.01 * meter.LOOKS * 3.5
    monkeypatch.setattr("kernel_mcp.limits.meter.time.monotonic", lambda: now)
    assert not kernel.memory_due(2)
    worker.run("pass")
    assert kernel.memory_due(2)
    assert not kernel.memory_due(3)
    worker.run("[sum(range(10**6)) for _ in range(20)]")
    assert kernel.memory_due(1000)


def test_processes_with_a_pid_namespace_of_their_own_are_known(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(pid: int) -> bool:
        asked.append(pid)
        return has_own_pids(pid)

    monkeypatch.setattr("kernel_mcp.limits.kernel.has_own_pids", counted)
    assert not has_own_pids(worker.popen.pid)
    assert not has_own_pids(2**22 + 1)
    argv = [
        "unshare",
        "--user",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        "echo; exec sleep 60",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as apart:
        assert apart.stdout is not None
        apart.stdout.readline()
        first, inside = tree(apart.pid)
        assert (has_own_pids(first), has_own_pids(inside)) == (False, True)
        kernel = limits()
        for root in (first, inside, inside):
            kernel.admit([root])
            assert kernel._everyone() == [first, inside]
        assert asked == [first, first, inside]  # no look reads again what has been found
        apart.kill()
