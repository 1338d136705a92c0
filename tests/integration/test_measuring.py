"""Limits of disk and memory that the server enforces where the system does not.

An ordinary user's server owns the files of its kernels and has no control groups.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.quota import FolderQuota
from kernel_mcp.units import MIB
from tests.integration.limited_kernel import LimitedKernel, limited_kernel
from tests.integration.unprivileged import as_ordinary_user

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user"),
]

CLOSED = """
import os, tempfile, threading
from pathlib import Path
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.workspace import Workspace
MIB = 1 << 20
told = {}
with tempfile.TemporaryDirectory(dir="/var/tmp") as base:
    root = Path(base, "w")
    workspace = Workspace(root, disk_bytes=8 * MIB)
    for mode in (0o000, 0o600, 0o200, 0o100):
        folder = root / "a" / "b"
        folder.mkdir(parents=True)
        (folder / "big").write_bytes(b"x" * 6 * MIB)
        folder.chmod(mode)
        folder.parent.chmod(mode)
        try:
            workspace.write_file("c", "x" * 3 * MIB)
            told[f"{mode:o}"] = "written"
        except WorkspaceError as error:
            told[f"{mode:o}"] = str(error)
        workspace.clear()
    folder.mkdir(parents=True)
    (folder / "big").write_bytes(b"x" * 6 * MIB)
    done = threading.Event()
    def close():
        while not done.is_set():
            folder.parent.chmod(0)
    closer = threading.Thread(target=close)
    closer.start()
    told["raced"] = 0
    for _ in range(300):
        found = workspace.usage()
        told["raced"] += found.complete and found.bytes < 6 * MIB
    done.set()
    closer.join()
    workspace.remove()
print(json.dumps(told))
"""

POOL = """
import os
frame = bytearray(300 << 20)
for place in range(0, len(frame), 4096):
    frame[place] = 1
go, stop = os.pipe()
workers = []
for number in range(8):
    if not (pid := os.fork()):
        os.close(stop)
        sum(frame[place] for place in range(0, len(frame), 4096))
        os.read(go, 1)
        os._exit(0)
    workers.append(pid)
"""
END_POOL = "os.close(stop)\nprint([os.waitpid(pid, 0)[1] for pid in workers])"
GROW = """
import time
for number in range(6):
    if not os.fork():
        mine = bytearray(200 << 20)
        for place in range(0, len(mine), 4096):
            mine[place] = 1
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_no_closed_folder_hides_what_it_holds_from_an_ordinary_user_s_server() -> None:
    told = _as_user(f"import json{CLOSED}")
    assert told.pop("raced") == 0
    for mode, text in told.items():
        assert text.startswith("The workspace is full: it holds 6,"), (mode, text)


async def _shared_and_grown(kernel: LimitedKernel) -> dict[str, Any]:
    """Return the measured memory of a pool of workers that share one large frame, and its end."""
    forked = await kernel.run(POOL)
    with anyio.move_on_after(20):
        while kernel.handle.usage().memory_bytes > 500 * MIB:  # until it has been weighed
            await kernel.handle.limits.check_memory()
            await anyio.sleep(0.05)
    held = kernel.handle.usage().memory_bytes
    ended = await kernel.run(END_POOL)
    grown = await kernel.run(GROW)
    return {
        "forked": forked.status,
        "held": held,
        "ended": ended.text,
        "grown": [grown.status, grown.cause],
    }


@pytest.mark.ways
async def test_workers_that_share_a_frame_hold_it_once_and_what_each_adds_counts() -> None:
    limits = {"memory_bytes": 768 * MIB, "pids": 64}
    code = (
        "import anyio, json\n"
        "from kernel_mcp.config.settings import Limits\n"
        "from tests.integration import test_measuring as here\n"
        "from tests.integration.limited_kernel import limited_kernel\n"
        "async def main():\n"
        f"    async with limited_kernel(Limits(**{limits!r})) as kernel:\n"
        "        print(json.dumps(await here._shared_and_grown(kernel)))\n"
        "anyio.run(main)"
    )
    told = _as_user(code)
    assert told["forked"] == "ok", told
    assert 200 * MIB < told["held"] < 500 * MIB, told
    assert told["ended"].strip() == str([0] * 8)
    status, cause = told["grown"]
    assert status == "killed", told
    assert "out of memory (limit 768 MiB, peak " in cause
    size, unit = cause.partition("peak ")[2].rstrip(")").split()
    assert 900 < float(size) * (1024 if unit == "GiB" else 1) < 2048, cause


@pytest.mark.parametrize("groups", [True, False], ids=["cgroup", "watchdog"])
async def test_a_kernel_outlives_a_server_that_cannot_measure_it(
    groups: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FolderQuota, "due", lambda _self, _others: True)
    async with limited_kernel(Limits(), groups=groups) as kernel:
        kept = await kernel.run("open('file', 'w').write('x' * 5000)\nimport os\nkept = 40")
        assert kept.status == "ok"
        limits = kernel.handle.limits
        before = limits.usage(), limits.quotas[0].measured
        with no_descriptors():
            for _ in range(3):
                limits._looked_at.clear()
                await limits.check_disk()
                await limits.check_memory()
                used = limits.usage()
            assert limits.quotas[0].measured == before[1]
            assert not used.measured
            assert used.cpu_s >= before[0].cpu_s
            assert used.memory_bytes > 10 * MIB
        told = [text for text in caplog.messages if "of session test could not be measured" in text]
        assert len(told) == len(set(told)) >= 2, told
        assert (await kernel.run("kept + 2")).text.strip() == "42"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/", os.O_PATH))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def _as_user(code: str) -> Any:
    done = subprocess.run(
        as_ordinary_user([sys.executable, "-c", code]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
