"""One live kernel: its process, its channels and the request in flight."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, Channels
from kernel_mcp.kernels.run import Ending, Run, Sink
from kernel_mcp.kernels.wire import Message, event_from
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.output.items import Stream
from kernel_mcp.policy import Policy

MOST_NAMES = 2000
NAME_CHARS = 200


class KnownNames:
    """Names that a kernel reports as defined, in order; hostile data.

    `more` counts names beyond `MOST_NAMES`.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self.more = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def apply(self, changes: object) -> None:
        """Apply the `names` of an execute reply: new and deleted ones."""
        if not isinstance(changes, list) or len(changes) != 2:
            return
        for name in _texts(changes[1]):
            if name in self._names:
                del self._names[name]
            else:
                self.more = max(0, self.more - 1)
        self.add(_texts(changes[0]))

    def add(self, names: Iterable[str]) -> None:
        """Add names that are defined now."""
        for name in names:
            if name in self._names:
                continue
            if len(self._names) < MOST_NAMES:
                self._names[name] = None
            else:
                self.more += 1


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        return []
    return [
        name for name in value[:MOST_NAMES] if isinstance(name, str) and len(name) <= NAME_CHARS
    ]


DRAIN_S = 0.25
"""Seconds after a death to wait for data the kernel had sent."""


class Answer:
    """The reply to a request; `done` without `message` when the kernel has died."""

    def __init__(self) -> None:
        self.message: Message | None = None
        self.done = anyio.Event()


class Kernel:
    """A kernel that runs one cell at a time.

    `watch` must run as a task meanwhile: it notices the death.
    """

    def __init__(
        self,
        handle: KernelProcess,
        *,
        environment: KernelEnvironment,
        policy: Policy,
    ) -> None:
        self.handle = handle
        self.environment = environment
        self.policy = policy
        self.dead = anyio.Event()
        self.names = KnownNames()
        self.broken = False
        """Whether a trial cell failed: the kernel's own code does not work any more."""
        self._run: Run | None = None
        self._ending: Ending | None = None
        self._stray: Sink | None = None
        self._asked: dict[str, Answer] = {}
        self._closing = False
        self._received = 0
        self._broken = ""
        self._channels = Channels(
            handle.connection,
            on_message=self._on_message,
            on_refused=self._on_refused,
            on_broken=self._on_broken,
        )

    async def ready(self, timeout: float) -> None:
        """Wait until no output can be lost; `timeout` in seconds. Raises LaunchError."""
        await self._channels.ready(timeout)

    @property
    def exit(self) -> ExitStatus | None:
        """The exit status, None while it lives."""
        status = self.handle.exit
        if status is not None and self._broken and status.signal == signal.SIGKILL:
            return replace(status, cause=status.cause or self._broken)
        return status

    @property
    def running(self) -> Run | None:
        """The cell in flight, None when idle."""
        return self._run if self._run is not None and not self._run.finished.is_set() else None

    async def watch(self) -> None:
        """Return when the kernel has ended, after delivering what it had sent."""
        await self.handle.wait()
        with Barrier("reading the last output of a kernel"):
            await self._channels.drained(DRAIN_S)
            rest = self.handle.unreceived(self._received)
            if rest and self._stray is not None:
                self._stray(Stream("stdout", rest))
        self.dead.set()
        if self._run is not None:
            self._run.finished.set()
        for answer in self._asked.values():
            answer.done.set()

    def submit(self, code: str, sink: Sink, number: int | None = None) -> Run:
        """Send one cell, known by `number` there; its output goes to `sink` in order.

        Raises LaunchError.
        """
        return self._send_cell("execute_request", code, sink, number)

    def prewarm(self, code: str) -> Run:
        """Send a cell that leaves no trace in the namespace. Raises LaunchError."""
        return self._send_cell("kernel_mcp_prewarm_request", code, lambda _event: None)

    def _send_cell(self, kind: str, code: str, sink: Sink, number: int | None = None) -> Run:
        run = Run(sink)
        self._run = run
        self._ending = None
        self._stray = sink
        run.msg_id = self._channels.send(
            "shell",
            kind,
            {
                "code": code,
                "silent": False,
                "store_history": kind == "execute_request",
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
                "cell_number": number,
            },
        )
        return run

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """The reply to a control request, within `timeout` seconds. Raises LaunchError."""
        with self.asking("control", kind, content) as answer, anyio.move_on_after(timeout):
            await answer.done.wait()
        if answer.message is None and self.exit is not None:
            raise LaunchError("The kernel has ended.")
        if answer.message is None:
            raise LaunchError(
                f"The kernel did not answer within {timeout:g} s: it is held up by code that does "
                "not let other threads run, or code has broken what answers. Wait for the cell to "
                "end, or interrupt it; where no cell runs, call reset."
            )
        return answer.message.content

    @contextlib.contextmanager
    def asking(
        self, channel: Channel, kind: str, content: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> Iterator[Answer]:
        """Send a request and receive its reply inside the block. Raises LaunchError.

        Requests on the shell channel wait for the running cell.
        """
        answer = Answer()
        msg_id = self._channels.send(channel, kind, content, buffers)
        self._asked[msg_id] = answer
        try:
            yield answer
        finally:
            del self._asked[msg_id]

    @property
    def taken(self) -> bool:
        """Whether the main thread has read all cells and other shell requests."""
        return self._channels.taken("shell")

    def send_probe(self) -> None:
        """Send a shell request that only shows whether it is `taken`. Raises LaunchError."""
        self._channels.send("shell", "kernel_info_request", {})

    def missed(self, run: Run) -> bool:
        """Whether the kernel ended without reading the request of `run`."""
        return self.exit is not None and not run.begun and "shell" in self._channels.unread

    def interrupt(self) -> None:
        """Interrupt the running cell."""
        self.handle.interrupt()

    def kill(self) -> None:
        """Kill the kernel and its descendants."""
        self.handle.kill()

    async def aclose(self) -> None:
        """Close the channels, end the process and remove its files."""
        self._closing = True
        self._channels.close()
        with anyio.CancelScope(shield=True):
            await self.handle.aclose()

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel != "iopub" and (answer := self._asked.get(message.parent)) is not None:
            answer.message = message
            answer.done.set()
        if self._ending is not None:
            self._ending.hear(channel, message)
        if channel == "control":
            return
        run = self._run
        mine = run is not None and message.parent == run.msg_id
        if run is not None and mine:
            run.begun = True
        if channel == "shell":
            if run is not None and mine and message.kind == "execute_reply":
                first = run.status is None
                run.on_reply(message.content)
                if first:
                    self.names.apply(message.content.get("names"))
                if first and not run.finished.is_set():
                    self._ending = Ending(run, self._channels)
        elif message.kind == "status":
            if run is not None and mine and message.content.get("execution_state") == "idle":
                run.on_idle()
        else:
            self._take_output(message, run if mine else None)

    def _take_output(self, message: Message, run: Run | None) -> None:
        """Hand output to the cell it belongs to, else to the one that runs or ran last.

        That one gets late output of threads and children, and text without a parent, from file
        descriptors. `Wire` drops messages of foreign requests.
        """
        if run is not None:
            run.outputs += 1
        event = event_from(message)
        if isinstance(event, Stream):
            self._received += len(event.text)
        elif not message.parent:
            return
        if event is not None and self._stray is not None:
            (run.sink if run is not None else self._stray)(event)

    def _on_refused(self, reason: str) -> None:
        if self._stray is not None:
            self._stray(Stream("stderr", f"[left out: {reason}]\n"))

    def _on_broken(self, reason: str) -> None:
        """Kill a kernel that has lost a channel, unless it has exited."""
        if not self._closing and self.handle.exit is None:
            self._broken = self._broken or reason
            self.handle.kill()
