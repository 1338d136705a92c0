"""Stock jupyter_client managers start the restricted kernel in its sandbox."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

import kernel_specs
from kernel_mcp.launch.provisioner import SandboxProvisioner

pytestmark = pytest.mark.anyio


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncKernelManager]:
    """A manager that finds the kernel spec as it is installed; it restarts when it is told to."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    specs = KernelSpecManager(kernel_dirs=[str(Path(kernel_specs.__file__).parent)])
    manager = AsyncIOLoopKernelManager(
        kernel_name="restricted", kernel_spec_manager=specs, autorestart=False
    )
    yield manager
    manager.context.destroy(linger=0)


@asynccontextmanager
async def started(manager: AsyncKernelManager) -> AsyncIterator[AsyncKernelClient]:
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=20)
        yield client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def result(client: AsyncKernelClient, code: str) -> str:
    """The text of the last expression, or the name of the exception."""
    found = ""

    def take(message: dict[str, Any]) -> None:
        nonlocal found
        if message["header"]["msg_type"] == "execute_result":
            found = message["content"]["data"]["text/plain"]

    with anyio.fail_after(60):
        reply = await client.execute_interactive(
            code, output_hook=take, allow_stdin=False, stop_on_error=False
        )
    return found or reply["content"].get("ename", "")


def provisioner(manager: AsyncKernelManager) -> SandboxProvisioner:
    found = manager.provisioner
    assert isinstance(found, SandboxProvisioner)
    return found


def kernel_pid(manager: AsyncKernelManager) -> int:
    kernel = provisioner(manager)._kernel
    assert kernel is not None
    return kernel.pid


def children() -> str:
    """Ids of all processes that any thread of this one has started."""
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


async def test_a_kernel_starts_in_the_sandbox_runs_cells_and_leaves_nothing(
    manager: AsyncKernelManager,
) -> None:
    async with started(manager) as client:
        assert await result(client, "40 + 2") == "42"
        pid = kernel_pid(manager)
        status = Path(f"/proc/{pid}/status").read_text()
        assert "Seccomp:\t2" in status
        assert "CapEff:\t0000000000000000" in status
        sockets = Path(manager.ip).parent
        assert sockets.is_dir()
        assert await manager.is_alive()
    assert not Path(f"/proc/{pid}").exists()
    assert not sockets.parent.parent.exists()
    assert not Path(manager.connection_file).exists()
    assert children() == ""
    assert "kernels" not in [thread.name for thread in threading.enumerate()]


async def test_an_interrupt_ends_the_cell_and_keeps_the_state(manager: AsyncKernelManager) -> None:
    async with started(manager) as client:
        await result(client, "kept = 'kept'")
        client.execute(
            "import time\nprint('go', flush=True)\nwhile True: time.sleep(9)", stop_on_error=False
        )
        with anyio.fail_after(60):
            while (await client.get_iopub_msg())["header"]["msg_type"] != "stream":
                pass
            await manager.interrupt_kernel()
            reply = await client.get_shell_msg()
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert await result(client, "kept") == "'kept'"


@pytest.mark.parametrize("now", [True, False], ids=["now", "politely"])
async def test_a_restart_keeps_the_connection_and_loses_the_state(
    manager: AsyncKernelManager, now: bool
) -> None:
    async with started(manager) as client:
        assert await result(client, "old = 1; old") == "1"
        before, address = kernel_pid(manager), manager.ip
        await manager.restart_kernel(now=now)
        assert manager.ip == address
        assert kernel_pid(manager) != before
        await client.wait_for_ready(timeout=20)
        assert await result(client, "old") == "NameError"


async def test_a_kernel_that_dies_is_seen_dead(manager: AsyncKernelManager) -> None:
    async with started(manager):
        assert await provisioner(manager).poll() is None
        os.kill(kernel_pid(manager), 9)
        with anyio.fail_after(60):
            assert await provisioner(manager).wait() == -9
        assert not await manager.is_alive()


async def test_a_kernel_that_dies_is_restarted_and_each_first_cell_answered_whole(
    manager: AsyncIOLoopKernelManager,
) -> None:
    """As in a Jupyter server, whose clients come back by themselves at some time of their own."""
    manager.autorestart = True
    manager.config.KernelRestarter.time_to_dead = 0.1  # s from one look to the next
    async with started(manager) as client:
        for _ in range(4):
            told = anyio.Event()
            manager.add_restart_callback(told.set)
            pid = kernel_pid(manager)
            os.kill(pid, 9)
            with anyio.fail_after(60):
                await told.wait()
            manager.remove_restart_callback(told.set)
            assert await result(client, "20 + 1") == "21"
            assert kernel_pid(manager) != pid


def test_an_end_is_told_to_every_event_loop_that_asks(manager: AsyncKernelManager) -> None:
    async def look(ask: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.fail_after(60):
            return await ask()

    asyncio.run(look(manager.start_kernel))
    assert asyncio.run(look(manager.is_alive))
    os.kill(kernel_pid(manager), 9)
    assert asyncio.run(look(provisioner(manager).wait)) == -9
    assert not asyncio.run(look(manager.is_alive))
    asyncio.run(look(partial(manager.shutdown_kernel, now=True)))


async def test_a_start_that_is_given_up_leaves_nothing(manager: AsyncKernelManager) -> None:
    async def start() -> None:
        await manager.start_kernel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        with anyio.fail_after(60):
            while not children():
                await anyio.sleep(0)
        tasks.cancel_scope.cancel()
    assert children() == ""
    assert not provisioner(manager).has_process


@pytest.mark.ways
async def test_a_round_trip_takes_no_longer_than_to_a_kernel_without_a_sandbox(
    manager: AsyncKernelManager,
) -> None:
    plain = AsyncKernelManager(kernel_name="python3")
    times: dict[AsyncKernelManager, list[float]] = {manager: [], plain: []}
    async with started(manager) as ours, started(plain) as stock:
        for _ in range(40):
            for client, of in ((ours, manager), (stock, plain)):
                began = perf_counter()
                assert await result(client, "1") == "1"
                times[of].append(perf_counter() - began)
    plain.context.destroy(linger=0)
    assert statistics.median(times[manager]) < 1.2 * statistics.median(times[plain])


async def test_the_policy_of_the_kernel_spec_holds(manager: AsyncKernelManager) -> None:
    spec = manager.kernel_spec
    assert spec is not None
    spec.metadata["kernel_provisioner"]["config"] = {"profile": "guarded"}
    async with started(manager) as client:
        assert await result(client, "import math, json; math.floor(2.5)") == "2"
        assert await result(client, "import subprocess") == "ModuleNotAllowedError"


async def test_without_a_policy_the_sandbox_alone_holds(manager: AsyncKernelManager) -> None:
    async with started(manager) as client:
        assert await result(client, "import subprocess; subprocess.call('true')") == "0"
        assert await result(client, "import os; os.path.exists('/root/.bashrc')") == "False"
