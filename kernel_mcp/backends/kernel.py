"""A live kernel of a back-end, as sessions see it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

from kernel_mcp.attached.process import Connected, attached_process
from kernel_mcp.backends.interface import RunningKernel
from kernel_mcp.backends.loop import BackendLoop
from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import BURST_S, Channel, ChannelListener, KernelChannels
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.kernels.message_codec import MAX_MESSAGE_BYTES, Message, MessageCodec, WireError
from kernel_mcp.kernels.run import Run
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

READY_S = 20.0
CLOSE_S = 5.0
"""Seconds that a kernel has to end; then it is left to itself."""
INTERRUPT_S = 5.0
END_GRACE_S = 0.3
"""Seconds in which the end of a kernel is reported after a cell that failed without an error."""
PAUSES = 2
"""Length of a pause between deliveries of a flood, as a multiple of `BURST_S`."""
MOST_WAITING = 1000
"""Messages that wait for the server; `emit` blocks the back-end's thread beyond."""
END_CHARS = 200
LATEST = 8
"""Number of cells that late output can be assigned to."""
NO_REASON = "the cell failed, and its back-end gave no reason"
_OUTPUT = (
    "stream",
    "display_data",
    "execute_result",
    "update_display_data",
    "clear_output",
    "error",
)


class BackendChannels(KernelChannels):
    """The channels of a kernel that is an object of this process, in the thread of `loop`."""

    def __init__(
        self, running: RunningKernel, loop: BackendLoop, language: str, listener: ChannelListener
    ) -> None:
        super().__init__(MessageCodec(""), listener)
        self._running = running
        self._thread = loop
        self._language = language
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Channel, str, dict[str, Any], str, bool]] = deque()
        self._delivering = False
        self._room = threading.Semaphore(MOST_WAITING)
        self._failed = ""
        """Id of the last request with an `error` message."""

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
            self._begin(self._thread.call(self._running.interrupt, INTERRUPT_S))
        elif kind == "kernel_info_request":
            info = {"status": "ok", "language_info": {"name": self._language}}
            self._loop.call_soon(partial(self._answer, channel, "kernel_info_reply", info, msg_id))
        return msg_id

    def taken(self, channel: Channel) -> bool:
        """Return True: a request is taken when it is sent."""
        return True

    async def drained(self, timeout: float) -> None:
        """Deliver what has been emitted."""
        self._deliver_some(timeout)

    def close(self) -> None:
        """See `KernelChannels`."""
        self._closed = True
        self._room.release(MOST_WAITING)
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
        self._put("iopub", "status", {"execution_state": "busy"}, msg_id)
        emit, succeeded, reason = partial(self._emit, msg_id), False, NO_REASON
        try:
            work = partial(self._running.execute, code, emit)
            succeeded = await self._thread.call(work) is True
        except LaunchError as error:
            reason = str(error)
        if not succeeded and self._failed != msg_id:
            await asyncio.sleep(END_GRACE_S)  # the end of its kernel is the better reason
            name, _, text = reason.partition(": ") if reason != NO_REASON else ("Error", "", reason)
            content = {"ename": name, "evalue": text, "traceback": []}
            self._put("iopub", "error", content, msg_id)
        reply = {"status": "ok" if succeeded else "error", "ename": "", "evalue": ""}
        self._answer("shell", "execute_reply", reply, msg_id)

    def _answer(self, channel: Channel, kind: str, content: dict[str, Any], parent: str) -> None:
        self._put(channel, kind, content, parent)
        self._put("iopub", "status", {"execution_state": "idle"}, parent)

    def _emit(self, msg_id: str, kind: str, content: Mapping[str, Any]) -> None:
        """Take a message of the back-end, in whatever thread; wait while many are not taken yet."""
        if kind not in _OUTPUT or not isinstance(content, Mapping) or self._closed:
            return
        if kind == "error":
            self._failed = msg_id
        taken = dict(content)
        if _size(taken) > MAX_MESSAGE_BYTES:
            kind = "stream"
            note = f"[left out: an output of more than {MAX_MESSAGE_BYTES:,} characters]\n"
            taken = {"name": "stderr", "text": note}
        self._room.acquire()
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self._put("iopub", kind, taken, msg_id, room=True)

    def _put(
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        parent: str,
        *,
        room: bool = False,
    ) -> None:
        """Queue a message, in whatever thread; `room` was acquired for it."""
        self._waiting.append((channel, kind, content, parent, room))
        if not self._delivering:
            self._delivering = True
            self._loop.call_soon_threadsafe(self._deliver_some)

    def _deliver_some(self, most_s: float = BURST_S) -> None:
        """Deliver queued messages for a while; the rest later, after other work of the server."""
        end = thread_time() + most_s
        while self._waiting and not self._closed and thread_time() < end:
            channel, kind, content, parent, room = self._waiting.popleft()
            if room:
                self._room.release()
            self.received += 1
            # malformed content is dropped
            with Barrier("taking a message of a back-end"), contextlib.suppress(WireError):
                self._listener.message(channel, Message(kind, parent, content))
        if not self._waiting:
            self._delivering = False
        if self._waiting and not self._closed:  # also of a thread that has just seen the flag
            self._delivering = True
            self._loop.call_later(PAUSES * BURST_S, self._deliver_some)


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
        self,
        running: RunningKernel,
        loop: BackendLoop,
        language: str,
        place: str,
        *,
        policy: Policy,
        masks: Masks,
    ) -> None:
        self._running = running
        self._thread = loop
        self._running_language = language
        self._end = Connected()
        self._latest: OrderedDict[str, Run] = OrderedDict()
        """The latest cells, by the ids of their requests."""
        handle = attached_process(place, ConnectionInfo(ip="", key=""), self._end)
        environment = KernelEnvironment(Path(), ())
        super().__init__(handle, environment=environment, policy=policy, masks=masks)
        handle.on_close(self._close_running)
        self._watching = asyncio.get_running_loop().create_task(self._watch_end())

    def _hand_over(self, run: Run, kind: str, content: dict[str, Any]) -> None:
        super()._hand_over(run, kind, content)
        self._latest[run.msg_id] = run
        while len(self._latest) > LATEST:
            self._latest.popitem(last=False)

    def _take_output(self, message: Message, run: Run | None) -> None:
        """See `Kernel`; a back-end knows the cell of late output."""
        super()._take_output(message, run or self._latest.get(message.parent))

    def _open(self, listener: ChannelListener) -> KernelChannels:
        return BackendChannels(self._running, self._thread, self._running_language, listener)

    async def ready(self, timeout: float) -> None:
        """See `Kernel`."""
        if not await self.connected(timeout):
            raise LaunchError(f"The kernel did not answer within {timeout:g} s.")

    def interrupt(self, *, alone: bool = False) -> None:
        """See `Kernel`."""
        self._channels.interrupt()

    async def _watch_end(self) -> None:
        try:
            reason = str(await self._thread.call(self._running.ended) or "")
        except LaunchError as error:
            reason = f"is not watched any longer by its back-end ({error})"
        self._end.end(one_line(reason)[:END_CHARS] or "has ended")

    async def _close_running(self) -> None:
        self._watching.cancel()
        with Barrier("ending a back-end's kernel"):
            await self._thread.call(self._running.aclose, CLOSE_S)
