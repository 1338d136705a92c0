"""How many kernels fit into the limits of a process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from kernel_mcp.sessions import capacity as capacity_module
from kernel_mcp.sessions.capacity import Capacity
from tests.unit.fake_kernels import bound


def test_no_bound_leaves_room_for_any_number() -> None:
    assert Capacity().shortage(10**9) == ""
    assert Capacity().kernels() is None


@pytest.mark.parametrize(("used", "kernels"), [(0, 9), (5, 9), (6, 8), (85, 1), (86, 0), (99, 0)])
def test_a_kernel_has_room_while_what_has_to_stay_free_does(used: int, kernels: int) -> None:
    capacity = Capacity([bound(100, used)])
    assert capacity.kernels() == kernels
    assert capacity.shortage(kernels) == "" or used > 95
    assert capacity.shortage(kernels + 1) != ""


def test_the_tightest_bound_is_named_with_numbers_and_what_to_do() -> None:
    capacity = Capacity([bound(1000, 0), bound(30, 20, "the tight one")])
    text = capacity.shortage(1)
    assert "the tight one is 30, of which 20 of them are in use" in text
    assert "takes some 10, and 5 have to stay free" in text
    assert text.endswith("For more sessions do this")


def test_open_files_are_counted_with_and_without_the_help_of_linux(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (files,) = capacity_module._descriptors()
    there = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208
    assert files.used() == there
    monkeypatch.setattr(os, "stat", lambda _path: os.stat_result((0,) * 10))
    assert files.used() == there


@pytest.mark.parametrize(
    ("limit", "said"),
    [(resource.RLIMIT_NOFILE, "ulimit -n"), (resource.RLIMIT_NPROC, "ulimit -u")],
    ids=["descriptors", "processes"],
)
def test_the_limits_of_this_process_are_known(limit: int, said: str) -> None:
    code = (
        "import os, resource\n"
        "from kernel_mcp.sessions.capacity import Capacity\n"
        f"resource.setrlimit({limit}, (64, 64))\n"
        "if not os.geteuid(): os.setresuid(54321, 54321, 54321)\n"
        "capacity = Capacity.of_this_process()\n"
        "print(capacity.kernels())\n"
        "print(capacity.shortage(60))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    kernels, text = ran.stdout.strip().split("\n")
    # the processes of an ordinary user's other tests count, too
    alone = limit == resource.RLIMIT_NOFILE or os.geteuid() == 0
    assert alone <= int(kernels) <= 9
    assert f"({said}) is 64" in text
    assert f"{said} 1024" in text
