"""Process, environment and resource limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kernel_specs.restricted import confine
from kernel_specs.restricted.config import BootConfig

ROOT = Path(__file__).parents[3]
MIB = 1024 * 1024


def in_child(body: str) -> Any:
    """Run code that prints JSON in a process of its own, for limits cannot be raised again."""
    prologue = "import json, resource\nfrom kernel_specs.restricted import confine, config\n"
    done = subprocess.run(
        [sys.executable, "-c", prologue + body],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=30,
    )
    return json.loads(done.stdout)


def test_environment_is_small_fixed_and_points_into_tmp() -> None:
    names = confine.environment(BootConfig(workspace="/workspace", tmp="/scratch"), threads=3)
    assert names["HOME"] == "/workspace"
    assert names["OPENBLAS_NUM_THREADS"] == names["OMP_NUM_THREADS"] == "3"
    assert names["MPLBACKEND"] == "module://matplotlib_inline.backend_inline"
    assert all(
        names[name].startswith("/scratch/")
        for name in names
        if name.endswith(("_DIR", "CONFIGDIR", "CACHE_HOME", "IPYTHONDIR"))
    )
    assert len(names) < 32


def test_variables_of_the_operator_go_over_the_kernels_own_and_time_follows_their_zone() -> None:
    seen = in_child("""
import os, time
variables = {"TOKEN": "secret", "LANG": "C", "TZ": "Etc/GMT-5"}
confine.confine(config.BootConfig(confined=True, variables=variables))
print(json.dumps([os.environ["TOKEN"], os.environ["LANG"], time.timezone]))
""")
    assert seen == ["secret", "C", -5 * 3600]


def test_address_space_has_a_reserve_that_is_opened_and_closed() -> None:
    seen = in_child(f"""
from kernel_specs.restricted.confine import Reserve
confine.apply_limits(config.ProcessLimits(memory_bytes={300 * MIB}))
seen = [resource.getrlimit(resource.RLIMIT_AS)]
reserve = Reserve()
for step in (reserve.renew, reserve.open, reserve.close):
    step()
    seen.append(resource.getrlimit(resource.RLIMIT_AS))
print(json.dumps(seen))
""")
    soft = 300 * MIB + confine.ADDRESS_SPACE_OVERHEAD
    most = soft + confine.MEMORY_RESERVE
    hard = most + confine.RESERVED_ADDRESSES
    begun, renewed, opened, closed = seen
    assert begun == [soft, hard]
    assert renewed[0] <= soft
    assert opened == [most, hard]
    assert closed[0] <= soft
    assert {renewed[1], closed[1]} == {hard}


def test_without_a_memory_limit_the_reserve_changes_nothing() -> None:
    seen = in_child("""
from kernel_specs.restricted.confine import Reserve
confine.apply_limits(config.ProcessLimits())
before = resource.getrlimit(resource.RLIMIT_AS)
reserve = Reserve()
reserve.renew()
reserve.open()
print(json.dumps([before, resource.getrlimit(resource.RLIMIT_AS)]))
""")
    assert seen[0] == seen[1]


def test_a_limit_is_never_raised_above_what_the_host_had_set() -> None:
    seen = in_child("""
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
confine.apply_limits(config.ProcessLimits(open_files=500, file_bytes=1000))
kinds = resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE
print(json.dumps([resource.getrlimit(kind) for kind in kinds]))
""")
    assert seen == [[100, 100], [1000, 1000], [0, 0]]


def test_what_linux_counts_by_user_is_shared_out_sparingly() -> None:
    seen = in_child("""
confine.apply_limits(config.ProcessLimits())
kinds = resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE
print(json.dumps([resource.getrlimit(kind) for kind in kinds]))
""")
    assert seen == [[1024, 1024], [256 * 1024, 256 * 1024]]


def test_a_kernel_without_boot_file_keeps_its_environment() -> None:
    seen = in_child("""
import os
os.environ["KEPT"] = "1"
confine.confine(config.BootConfig())
print(json.dumps([os.environ["KEPT"], os.getsid(0) == os.getpid()]))
""")
    assert seen == ["1", True]
