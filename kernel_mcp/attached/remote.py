"""Kernels that sessions start on a Jupyter server elsewhere, and end again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.attached import web
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
END_ATTEMPTS, AGAIN_S = 6, 0.5
"""Attempts to end a kernel, and seconds between them."""
_ENDS = {
    "restarting": "has died, and its Jupyter server starts it again",
    "autorestarting": "has died, and its Jupyter server starts it again",
    "dead": "has died",
}
"""States of a kernel whose variables are gone, and why."""


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
        self._interrupts: set[asyncio.Task[None]] = set()
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
        return web.WebChannels(self._socket, self._floods, listener)

    async def ready(self, timeout: float) -> None:
        """See `Kernel`."""
        if not await self.connected(timeout):
            what = self.exit.describe() if self.exit else f"did not answer within {timeout:g} s"
            raise LaunchError(f"The kernel at {self._server} {what}.")
        version = one_line(str(self.language_info.get("version", "")))[:40]
        self.environment = replace(self.environment, version=version)

    def interrupt(self, *, alone: bool = False) -> None:
        """See `Kernel`: the server interrupts it."""
        task = asyncio.get_running_loop().create_task(self._interrupt())
        self._interrupts.add(task)
        task.add_done_callback(self._interrupts.discard)

    async def _interrupt(self) -> None:
        with Barrier("interrupting a kernel of a Jupyter server"):
            await web.interrupt_kernel(self._server, self._kernel)

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel == "iopub" and message.kind == "status" and self._output_received.is_set():
            why = _ENDS.get(str(message.content.get("execution_state")))
            if why is not None:
                self._end.end(why)
                return
        super()._on_message(channel, message)


async def start_remote(
    server: Attachment, *, floods: Floods, policy: Policy, masks: Masks
) -> RemoteKernel:
    """Start a kernel on a server. Raises LaunchError."""
    kernel = await web.start_kernel(server)
    try:
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
    for last in (*[False] * (END_ATTEMPTS - 1), True):
        with Barrier("ending a kernel of a Jupyter server"):
            try:
                await web.end_kernel(server, kernel)
            except LaunchError:
                if last:
                    raise
                await anyio.sleep(AGAIN_S)
            else:
                return
