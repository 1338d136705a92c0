"""Join kernels that the operator has named, and start kernels on their Jupyter servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.attached.interpreter import REMOTE_LACKING
from kernel_mcp.attached.targets import AttachTarget, ConnectionFile, read_connection, target_of
from kernel_mcp.config.attachments import Attachment
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import ChannelListener, Channels, Floods, KernelChannels
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.kernels.message_codec import MessageCodec
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.output.text import Masks
from kernel_mcp.policy import Policy

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

CONNECT_S = 10.0
"""Seconds that connect(2) may take for each channel."""
READY_S = 20.0
"""Seconds that a kernel has to answer: its control channel does so while a cell runs."""
_WEB = "kernel_mcp.attached.web"
_KERNEL = "kernel_mcp.attached.kernel"
_REMOTE = "kernel_mcp.attached.remote"


def step(module: str, *, once: bool) -> str:
    """Return a sentence on how to install a module in an attached kernel."""
    root = module.partition(".")[0]
    return f"This kernel's own environment lacks it: a cell with %pip install {root} may add it."


POLICY = Policy(frozenset(), allow_all=True, profile="default", step=step, confined=False)
"""Nothing is refused in kernels that are not this server's."""


async def description_of(attachment: Attachment) -> str:
    """Return one line for the operator on the present state of an attachment."""
    try:
        if attachment.is_server:
            web = await anyio.to_thread.run_sync(import_module, _WEB)
            count = len(await web.kernels_of(attachment))
            return f"{attachment}: {count} kernel{'' if count == 1 else 's'} there"
        ends: list[socket.socket] = []
        try:
            path = Path(attachment.place)
            connection = await anyio.to_thread.run_sync(read_connection, path)
            await anyio.to_thread.run_sync(_connect, connection, ends)
        finally:
            for end in ends:
                end.close()
        return f"{attachment}: a kernel listens"
    except (LaunchError, OSError) as reason:
        return f"{attachment}: not to be joined now: {reason}"


class AttachingSource:
    """The `KernelSource` of interpreters with a place: it joins the kernel there."""

    def __init__(self, named: Sequence[Attachment], masks: Masks | None = None) -> None:
        self._named = tuple(named)
        self._masks = masks or Masks()
        self._floods = Floods()

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Join a kernel. Raises KernelMcpError."""
        await anyio.to_thread.run_sync(import_module, _KERNEL)
        place = target_of(request.interpreter.place, self._named)
        await progress(f"Joining the kernel at {place}")
        if place.attachment.is_server:
            return await self._behind_server(place)
        return await self._at_sockets(place)

    async def _at_sockets(self, place: AttachTarget) -> Kernel:
        path = Path(place.attachment.place)
        connection = await anyio.to_thread.run_sync(read_connection, path)
        ends: list[socket.socket] = []
        try:
            await anyio.to_thread.run_sync(_connect, connection, ends)
        except OSError as reason:
            for end in ends:
                end.close()
            raise LaunchError(
                f"No kernel listens where {path} says: {reason}. It has ended, or is on another "
                "machine."
            ) from reason
        wire = MessageCodec(connection.key, shared=True)
        opened = partial(_channels, connection, ends, wire, self._floods)
        return await self._joined(place, connection, opened)

    async def _behind_server(self, place: AttachTarget) -> Kernel:
        web = await anyio.to_thread.run_sync(import_module, _WEB)
        running = await web.kernel_at(place)
        end = await web.joined(place.attachment, running.kernel)
        exact = AttachTarget(place.attachment, running.kernel, running.path)
        nowhere = ConnectionInfo(ip="", key="")
        return await self._joined(
            exact,
            nowhere,
            partial(web.WebChannels, end, place.attachment, running.kernel, self._floods),
        )

    async def _joined(
        self,
        place: AttachTarget,
        connection: ConnectionInfo,
        channels: Callable[[ChannelListener], KernelChannels],
    ) -> Kernel:
        from kernel_mcp.attached.kernel import AttachedKernel
        from kernel_mcp.attached.process import Connected, attached_process

        start = Connected()
        kernel = AttachedKernel(
            attached_process(place, connection, start),
            start,
            place=place,
            channels=channels,
            policy=POLICY,
            masks=self._masks,
        )
        try:
            await kernel.ready(READY_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel


class RemoteSource:
    """The `KernelSource` of a Jupyter server, on which each session has a kernel of its own."""

    def __init__(self, name: str, server: Attachment, masks: Masks) -> None:
        self._server = server
        self._masks = masks
        self._floods = Floods()
        self.interpreter = Interpreter(name, name, place=str(server), lacking=REMOTE_LACKING)

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel there. Raises KernelMcpError."""
        remote = await anyio.to_thread.run_sync(import_module, _REMOTE)
        await progress(f"Starting a kernel at {self._server}")
        made: Kernel = await remote.start_remote(
            self._server, floods=self._floods, policy=POLICY, masks=self._masks
        )
        return made

    async def aclose(self) -> None:
        """Release nothing: each kernel is that of one session."""


def _connect(connection: ConnectionFile, ends: list[socket.socket]) -> None:
    """Append sockets of shell, control, iopub, and stdin if there is one.

    Blocks; raises OSError.
    """
    for port in (connection.shell_port, connection.control_port, connection.iopub_port):
        ends.append(_connected(connection, port))  # noqa: PERF401 - what is open is closed
    with suppress(OSError):
        ends.append(_connected(connection, connection.stdin_port))


def _connected(connection: ConnectionFile, port: int) -> socket.socket:
    """Return a connected, non-blocking socket of one channel. Blocks; raises OSError."""
    family = socket.AF_INET
    place: str | tuple[str, int] = (connection.host, port)
    if connection.transport == "ipc":
        family, place = socket.AF_UNIX, connection.path(port)
    elif ":" in connection.host:
        family = socket.AF_INET6
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.settimeout(CONNECT_S)
        end.connect(place)
        if family is not socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
    except BaseException:
        end.close()
        raise
    return end


def _channels(
    connection: ConnectionFile,
    ends: Sequence[socket.socket],
    wire: MessageCodec,
    floods: Floods,
    listener: ChannelListener,
) -> Channels:
    return Channels(connection, listener, ends=ends, floods=floods, wire=wire, reads_ahead=True)
