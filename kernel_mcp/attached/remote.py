"""Kernels that sessions start on a Jupyter server elsewhere, and end again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.attached import web
from kernel_mcp.attached.endings import ending_of
from kernel_mcp.attached.process import Connected, attached_process
from kernel_mcp.barriers import Barrier
from kernel_mcp.config.attachments import Attachment
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, ChannelListener, Floods, KernelChannels
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

if TYPE_CHECKING:
    from tornado.websocket import WebSocketClientConnection

    from kernel_mcp.kernels.message_codec import Message

READY_S = 60.0
END_S, AGAIN_S = 10.0, 0.5
"""Seconds in which a kernel is to be ended, and between the attempts."""
CHECK_S = 10.0
"""Seconds between two questions to the server whether the kernel of a running cell is there."""


class RemoteKernel(JupyterKernel):
    """A kernel on a Jupyter server, which belongs to one session."""

    def __init__(
        self,
        server: Attachment,
        kernel: str,
        socket: WebSocketClientConnection,
        *,
        floods: Floods,
        policy: Policy,
        masks: Masks,
    ) -> None:
        """`socket` is connected to the kernel with the id `kernel`."""
        self._server = server
        self._kernel = kernel
        self._socket = socket
        self._end = Connected()
        super().__init__(
            attached_process(server, ConnectionInfo(ip="", key=""), self._end),
            environment=KernelEnvironment(Path(), ()),
            policy=policy,
            masks=masks,
            floods=floods,
        )
        self.handle.on_close(partial(_end, server, kernel))

    def _open(self, listener: ChannelListener) -> KernelChannels:
        assert self._floods is not None
        return web.WebChannels(self._socket, self._server, self._kernel, self._floods, listener)

    async def ready(self, timeout: float) -> None:
        """See `Kernel`."""
        if not await self.connected(timeout):
            what = self.exit.describe() if self.exit else f"did not answer within {timeout:g} s"
            raise LaunchError(f"The kernel at {self._server} {what}.")
        version = one_line(str(self.language_info.get("version", "")))[:40]
        self.environment = replace(self.environment, version=version)

    def interrupt(self, *, alone: bool = False) -> None:
        """See `Kernel`."""
        self._channels.interrupt()

    async def watch(self) -> None:
        """See `Kernel`; while a cell runs, ask the server whether the kernel is there."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._look_often)
            await super().watch()
            tasks.cancel_scope.cancel()

    async def _look_often(self) -> None:
        while True:
            await anyio.sleep(CHECK_S)
            if self.running is not None:
                with Barrier("asking for a kernel of a Jupyter server"):
                    await self._look()

    async def _look(self) -> None:
        """Note the end of a kernel that is not on its server any more. Raises LaunchError."""
        if not await web.is_running(self._server, self._kernel):
            self._end.end(f"was lost, as {web.GONE}")

    def _on_message(self, channel: Channel, message: Message) -> None:
        ours = channel == "iopub" and self._output_received.is_set()
        if ours and (why := ending_of(message)) is not None:
            self._end.end(why)
            return
        super()._on_message(channel, message)

    def _on_broken(self, reason: str) -> None:
        self._end.end(f"was lost, as {reason}")


async def start_remote(
    server: Attachment, *, floods: Floods, policy: Policy, masks: Masks
) -> RemoteKernel:
    """Start a kernel on a server. Raises LaunchError."""
    with anyio.CancelScope(shield=True):  # else a kernel is left there that nobody knows
        kernel = await web.start_kernel(server)
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
        socket = await web.joined(server, kernel)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _end(server, kernel)
        raise
    made = RemoteKernel(server, kernel, socket, floods=floods, policy=policy, masks=masks)
    try:
        await made.ready(READY_S)
    except BaseException:
        await made.aclose()
        raise
    return made


async def _end(server: Attachment, kernel: str) -> None:
    """End a kernel; several attempts are needed while its server starts it again."""
    with Barrier("ending a kernel of a Jupyter server"), anyio.move_on_after(END_S):
        while await web.is_running(server, kernel):
            with suppress(LaunchError):
                await web.end_kernel(server, kernel)
                return
            await anyio.sleep(AGAIN_S)
