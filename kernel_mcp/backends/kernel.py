"""A live kernel of a back-end, as sessions see it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kernel_mcp.attached.process import Connected, attached_process
from kernel_mcp.backends.interface import RunningKernel
from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, ChannelListener, KernelChannels
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.kernels.message_codec import MAX_MESSAGE_BYTES, Message, MessageCodec, WireError
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

READY_S = 20.0
_OUTPUT = (
    "stream",
    "display_data",
    "execute_result",
    "update_display_data",
    "clear_output",
    "error",
)


class BackendChannels(KernelChannels):
    """The channels of a kernel that is an object of this process."""

    def __init__(self, running: RunningKernel, language: str, listener: ChannelListener) -> None:
        super().__init__(MessageCodec(""), listener)
        self._running = running
        self._language = language
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> str:
        """See `KernelChannels`; only requests for code, interrupts and information are answered."""
        msg_id, _ = self.wire.request(kind, {})
        if self._closed:
            raise LaunchError("The kernel has been closed.")
        if kind == "execute_request":
            self._begin(self._execute(msg_id, str(content["code"])))
        elif kind == "interrupt_request":
            self._begin(self._running.interrupt())
        elif kind == "kernel_info_request":
            info = {"status": "ok", "language_info": {"name": self._language}}
            self._loop.call_soon(partial(self._answer, channel, "kernel_info_reply", info, msg_id))
        return msg_id

    def taken(self, channel: Channel) -> bool:
        """Return True: a request is taken when it is sent."""
        return True

    async def drained(self, timeout: float) -> None:
        """Return at once: output is delivered when it is emitted."""

    def close(self) -> None:
        """See `KernelChannels`."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._confined(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _confined(self, work: Coroutine[Any, Any, None]) -> None:
        with Barrier("a back-end"):
            await work

    async def _execute(self, msg_id: str, code: str) -> None:
        self._say("iopub", "status", {"execution_state": "busy"}, msg_id)
        succeeded = False
        with Barrier("running a cell in a back-end") as barrier:
            succeeded = await self._running.execute(code, partial(self._emit, msg_id))
        if barrier.failure is not None:
            reason = one_line(reason_of(barrier.failure))
            error = {"ename": type(barrier.failure).__name__, "evalue": reason, "traceback": []}
            self._say("iopub", "error", error, msg_id)
        reply = {"status": "ok" if succeeded else "error", "ename": "", "evalue": ""}
        self._answer("shell", "execute_reply", reply, msg_id)

    def _answer(self, channel: Channel, kind: str, content: dict[str, Any], parent: str) -> None:
        self._say(channel, kind, content, parent)
        self._say("iopub", "status", {"execution_state": "idle"}, parent)

    def _emit(self, msg_id: str, kind: str, content: Mapping[str, Any]) -> None:
        if kind not in _OUTPUT:
            return
        if _size(content) > MAX_MESSAGE_BYTES:
            self._listener.refused(f"an output of more than {MAX_MESSAGE_BYTES:,} characters")
            return
        self._say("iopub", kind, dict(content), msg_id)

    def _say(self, channel: Channel, kind: str, content: dict[str, Any], parent: str) -> None:
        if self._closed:
            return
        self.received += 1
        with contextlib.suppress(WireError):  # malformed content is dropped
            self._listener.message(channel, Message(kind, parent, content))


def _size(content: Mapping[str, Any]) -> int:
    """Return the characters of all texts in a message's content, one level deep."""
    total = 0
    for value in content.values():
        parts = value.values() if isinstance(value, dict) else (value,)
        total += sum(len(each) for each in parts if isinstance(each, str))
    return total


class BackendKernel(JupyterKernel):
    """A kernel of a `Backend`."""

    def __init__(
        self, running: RunningKernel, language: str, place: str, *, policy: Policy, masks: Masks
    ) -> None:
        self._running = running
        self._running_language = language
        self._end = Connected()
        handle = attached_process(place, ConnectionInfo(ip="", key=""), self._end)
        environment = KernelEnvironment(Path(), ())
        super().__init__(handle, environment=environment, policy=policy, masks=masks)
        handle.on_close(running.aclose)
        self._watching = asyncio.get_running_loop().create_task(self._watch_end())
        handle.on_close(self._stop_watching)

    def _open(self, listener: ChannelListener) -> KernelChannels:
        return BackendChannels(self._running, self._running_language, listener)

    async def ready(self, timeout: float) -> None:
        """See `Kernel`."""
        if not await self.connected(timeout):
            raise LaunchError(f"The kernel did not answer within {timeout:g} s.")

    def interrupt(self, *, alone: bool = False) -> None:
        """See `Kernel`."""
        with contextlib.suppress(LaunchError):  # the end of the kernel is noticed elsewhere
            self._channels.send("control", "interrupt_request", {})

    async def _watch_end(self) -> None:
        with Barrier("waiting for the end of a back-end's kernel"):
            self._end.end(one_line(await self._running.ended()) or "has ended")

    async def _stop_watching(self) -> None:
        self._watching.cancel()
