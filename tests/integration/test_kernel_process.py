"""One contract for the process of a kernel, whatever started it; containers have theirs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.landlock import LandlockSandbox
from kernel_mcp.sandbox.select import NoSandbox
from tests.integration.kernel_contract import keeps_the_contract
from tests.integration.landlock_kernel import Notebook, notebook
from tests.integration.template.bench import bench

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(BwrapSandbox.detect, id="bwrap"),
        pytest.param(LandlockSandbox.detect, id="landlock", marks=pytest.mark.ways),
        pytest.param(NoSandbox, id="none", marks=pytest.mark.ways),
    ],
)
async def test_a_cold_kernel(
    backend: Callable[[], Sandbox], caplog: pytest.LogCaptureFixture
) -> None:
    with RunDirectory.create() as runs:

        def begin() -> AbstractAsyncContextManager[Notebook]:
            return notebook(runs, sandbox=backend())

        await keeps_the_contract(begin, caplog)


async def test_a_forked_kernel(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as made:

        def begin() -> AbstractAsyncContextManager[Notebook]:
            return notebook(made.runs, launcher=made.launcher, folder=made.workspaces)

        await keeps_the_contract(begin, caplog)
    assert "starting a kernel cold" not in caplog.text
