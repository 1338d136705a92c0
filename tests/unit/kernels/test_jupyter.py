"""Hidden cells of kernels that speak only Jupyter's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.attached.process import Connected, attached_process
from kernel_mcp.attached.source import POLICY
from kernel_mcp.kernels.channels import ChannelListener, KernelChannels
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.kernels.message_codec import Message, MessageCodec
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment
from kernel_mcp.output.items import Event, Stream

pytestmark = pytest.mark.anyio


class Wire(KernelChannels):
    """Channels that only count requests."""

    sent = 0

    def send(self, *_: Any, **__: Any) -> str:
        self.sent += 1
        return f"request-{self.sent}"

    def taken(self, channel: Any) -> bool:
        return True

    async def drained(self, timeout: float) -> None:
        pass

    def close(self) -> None:
        pass


class Wired(JupyterKernel):
    wire: Wire

    def _open(self, listener: ChannelListener) -> KernelChannels:
        self.wire = Wire(MessageCodec(""), listener)
        return self.wire

    def hears(self, parent: str, kind: str, **content: Any) -> None:
        self._on_message("iopub", Message(kind, parent, content))


async def test_output_of_a_hidden_cell_that_was_given_up_is_no_cells() -> None:
    handle = attached_process("here", ConnectionInfo(ip="", key=""), Connected())
    environment = KernelEnvironment(Path(), ())
    kernel = Wired(handle, environment=environment, policy=POLICY)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.evaluate, "save", 60)
            while not kernel.wire.sent:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        seen: list[Event] = []
        run = kernel.submit("1", seen.append)
        kernel.hears("request-1", "stream", name="stdout", text="[7]")
        kernel.hears("request-1", "status", execution_state="idle")
        kernel.hears(run.msg_id, "stream", name="stdout", text="mine")
        assert seen == [Stream("stdout", "mine")]
    finally:
        await kernel.aclose()


class Interruptible(Wired):
    """A kernel whose hidden cell ends at the second interrupt."""

    interrupts = 0

    def interrupt(self, *, alone: bool = False) -> None:
        self.interrupts += alone
        if self.interrupts == 2:
            self.hears("request-1", "status", execution_state="idle")


async def test_a_hidden_cell_that_is_given_up_has_ended_before_a_cell_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.kernels.jupyter.SETTLE_S", 0.01)
    handle = attached_process("here", ConnectionInfo(ip="", key=""), Connected())
    kernel = Interruptible(handle, environment=KernelEnvironment(Path(), ()), policy=POLICY)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.evaluate, "save", 60)
            while not kernel.wire.sent:
                await anyio.lowlevel.checkpoint()
            kernel.hears("request-1", "status", execution_state="busy")
            tasks.cancel_scope.cancel()
        assert kernel.interrupts == 2
    finally:
        await kernel.aclose()
