"""One live kernel: its process, its channels and the request in flight."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError, Uncopyable
from kernel_mcp.kernels.channels import Channel, ChannelListener, Channels, Floods, KernelChannels
from kernel_mcp.kernels.interpreter import Interpreter, Snapshots
from kernel_mcp.kernels.known_names import KnownNames
from kernel_mcp.kernels.message_codec import (
    Message,
    event_from,
)
from kernel_mcp.kernels.requests import ControlRequests
from kernel_mcp.kernels.run import IdleWait, InputRequest, Run, Sink
from kernel_mcp.launch import silence
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.notebooks.metadata import PYTHON_METADATA
from kernel_mcp.output.items import Event, Redactor, Stream
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

DRAIN_S = 0.25
"""Seconds after a death to wait for data that the kernel had sent."""


CHECKPOINT_S = 10.0
"""Processor seconds that a checkpoint may use, which needs some 10 ms per gigabyte."""
MOST_WORDS = 8
WORD_CHARS = 80


def _words(value: object) -> tuple[str, ...]:
    """Return texts that a kernel sent, bounded in number and length; `value` is hostile data."""
    found = value if isinstance(value, list) else []
    return tuple(
        one_line(each)[:WORD_CHARS] for each in found[:MOST_WORDS] if isinstance(each, str)
    )


class PendingReply:
    """The reply to a request; `done` is set without a `message` if the kernel has died."""

    def __init__(self) -> None:
        self.message: Message | None = None
        self.done = anyio.Event()


def _unheard(_text: str) -> None:
    """Do nothing: the default of callbacks."""


class ToolAccess(Protocol):
    """The tools that code of a session may call."""

    def connect(self, kernel: Kernel) -> None:
        """Connect the gateway to a kernel whose code asks for it."""

    def interrupt(self, kernel: Kernel) -> None:
        """Cancel the calls of a kernel that is being interrupted."""

    def begin_cell(self, kernel: Kernel) -> None:
        """Note that a cell begins in a kernel."""

    def words(self) -> list[str]:
        """Return a notice of the calls since the last one; none for none."""
        return []


class NoTools(ToolAccess):
    """The tools of a session that has none."""

    def connect(self, kernel: Kernel) -> None:
        """See `ToolAccess`."""

    interrupt = begin_cell = connect


class Kernel(ControlRequests):
    """A kernel that runs one cell at a time.

    `watch` must run as a task, to detect the end of the kernel.
    """

    extended = True
    """True if it supports this server's own requests; False if only those of Jupyter."""
    snapshots: Snapshots | None = None
    """Dumps of its variables, if it does not support the requests of this server for them."""
    starts_anew = "Threads, caches and the state of imported modules start anew"
    """A sentence on what is not in a save of variables."""

    def __init__(
        self,
        handle: KernelProcess,
        *,
        environment: KernelEnvironment,
        policy: Policy,
        masks: Masks | None = None,
        floods: Floods | None = None,
    ) -> None:
        """`masks` hide values in the output of cells; `floods` is shared by all kernels."""
        self._floods = floods
        self.tell: Callable[[str], object] = _unheard
        """Callback for a notice to the session's owner."""
        self.overheard: Callable[[str], object] = _unheard
        self.tools: ToolAccess = NoTools()
        """Callback for code that another client has run."""
        self.handle = handle
        self._masks = masks or Masks()
        self.environment = environment
        self.policy = policy
        self.dead = anyio.Event()
        self.names = KnownNames()
        self.known: dict[Checkpoint, KnownNames] = {}
        """Names of variables at each of its checkpoints."""
        self.closed_files: tuple[str, ...] = ()
        """Files that were open at the checkpoint from which it was restored, and are now closed;
        hostile data."""
        self.broken = False
        """True if a trial cell failed or requests are not answered: the kernel's code is broken."""
        self.known_peak = 0
        """Peak of its memory in bytes, where that could not be reset: a cell's may be lower."""
        self._run: Run | None = None
        self._ending: IdleWait | None = None
        self._stray: Sink | None = None
        self._early: list[Event] = []
        """Output between a wake and `hear`."""
        self._asked: dict[str, PendingReply] = {}
        self._closing = False
        self._received = 0
        self._broken = ""
        self._channels = self._open(
            ChannelListener(self._on_message, self._on_refused, self._on_broken)
        )

    def _open(self, listener: ChannelListener) -> KernelChannels:
        sockets = self.handle.sockets
        ends = sockets.channels
        return Channels(
            sockets.connection, listener, ends=ends, opened=bool(ends), floods=self._floods
        )

    async def ready(self, timeout: float) -> None:
        """Wait until no output can be lost, at most `timeout` seconds. Raises LaunchError."""
        await self._channels.ready(timeout)

    @property
    def exit(self) -> ExitStatus | None:
        """The exit status, with the reason if the server killed it; None while it runs."""
        status = self.handle.exit
        if status is not None and self._broken and status.signal == signal.SIGKILL:
            return replace(status, cause=status.cause or self._broken)
        return status

    @property
    def joined(self) -> Interpreter | None:
        """The interpreter of an external kernel, known once it is joined; None for others."""
        return None

    @property
    def running(self) -> Run | None:
        """The cell in flight; None when idle."""
        return self._run if self._run is not None and not self._run.finished.is_set() else None

    async def watch(self) -> None:
        """Wait for the end of the kernel, deliver its last output, and end pending requests."""
        await self.handle.wait()
        with Barrier("reading the last output of a kernel"):
            await self._channels.drained(DRAIN_S)
            rest = self.handle.unreceived(self._received)
            if rest and self._stray is not None:
                self._stray(Stream("stdout", rest))
        self.dead.set()
        if self._run is not None:
            self._run.end()
        for answer in self._asked.values():
            answer.done.set()

    def submit(
        self,
        code: str,
        sink: Sink,
        number: int | None = None,
        notebook: str = "",
        asks: Callable[[InputRequest], None] | None = None,
    ) -> Run:
        """Send a cell, with `number` as its execution count; pass its output to `sink` in order.

        It runs in the folder of the file `notebook`, if that is given. Lines that it asks a person
        for are passed to `asks`. Raises LaunchError.
        """
        self.tools.begin_cell(self)
        return self._send_cell("execute_request", code, sink, number, notebook, asks)

    def prewarm(self, code: str) -> Run:
        """Send a cell that leaves no trace in the namespace. Raises LaunchError."""
        return self._send_cell("kernel_mcp_prewarm_request", code, lambda _event: None)

    def _send_cell(
        self,
        kind: str,
        code: str,
        sink: Sink,
        number: int | None = None,
        notebook: str = "",
        asks: Callable[[InputRequest], None] | None = None,
    ) -> Run:
        run, memory = self._listen(sink), self.handle.limits.limits.memory_bytes
        run.asks = asks
        content: dict[str, Any] = {
            "code": code,
            "silent": False,
            "store_history": kind == "execute_request",
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
            "cell_number": number,
            **({"notebook": notebook} if notebook else {}),
            **({"memory_bytes": memory} if memory else {}),
            **({"asks": True} if asks is not None else {}),
        }
        self._hand_over(run, kind, content)
        return run

    def _listen(self, sink: Sink) -> Run:
        """Return the run that takes the place of the last one; its sink hides values."""
        if self._run is not None:
            self._run.lift()
        run = Run(sink)
        if self._masks:
            redactor = Redactor(self._masks, sink)
            run = Run(redactor, redactor.flush)
        self._run, self._ending, self._stray = run, None, run.sink
        return run

    def hear(self, sink: Sink) -> None:
        """Pass output to `sink` until the first cell: that of tasks from before a checkpoint."""
        early, self._early = self._early, []
        run = self._listen(sink)
        run.finished.set()
        for event in early:
            run.sink(event)

    def _hand_over(self, run: Run, kind: str, content: dict[str, Any]) -> None:
        run.msg_id = self._channels.send("shell", kind, content)

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a control request, and return the reply. Raises LaunchError after `timeout` seconds.

        While the kernel waits for a processor, only its processor time counts.
        """
        with self.asking("control", kind, content) as answer:
            await silence.await_patiently(answer.done, lambda: [self.handle.pid], timeout)
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
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> Iterator[PendingReply]:
        """Send a request, and receive its reply inside the block. Raises LaunchError.

        Requests on the shell channel wait for the running cell. The descriptor `given` is sent with
        the request.
        """
        answer = PendingReply()
        msg_id = self._channels.send(channel, kind, content, buffers, given)
        self._asked[msg_id] = answer
        try:
            yield answer
        finally:
            del self._asked[msg_id]

    @property
    def taken(self) -> bool:
        """True if the main thread has read all cells and other shell requests."""
        return self._channels.taken("shell")

    @property
    def rests(self) -> int:
        """Number of pauses in reading its messages, in favour of other kernels."""
        return self._channels.rests

    def send_probe(self) -> None:
        """Send a shell request that only serves to test `taken`. Raises LaunchError."""
        self._channels.send("shell", "kernel_info_request", {})

    def missed(self, run: Run) -> bool:
        """Return True if the kernel ended without reading the request of `run`."""
        return self.exit is not None and not run.begun and "shell" in self._channels.unread

    def interrupt(self, *, alone: bool = False) -> None:
        """Interrupt the running cell; with `alone`, no programs that code has started."""
        self.tools.interrupt(self)
        if alone:
            self.handle.signal(signal.SIGCONT)
            self.handle.signal(signal.SIGINT)
        else:
            self.handle.interrupt()

    def kill(self) -> None:
        """Kill the kernel and its descendants."""
        self.handle.kill()

    def end_unresponsive(self, run: Run) -> str | None:
        """Kill the kernel, as a cell in it ignores interrupts; return None.

        An external kernel is not killed; the result is then a sentence on its cell, or empty.
        """
        self.kill()
        return None

    @property
    def notebook_metadata(self) -> Mapping[str, Any]:
        """The fields `kernelspec` and `language_info` of notebooks with its cells."""
        return PYTHON_METADATA

    async def checkpoint(self) -> tuple[Checkpoint, float]:
        """Make a forked copy of this idle kernel; return it and the CPU seconds that it required.

        Raises Uncopyable if a copy would lack something that the kernel has, such as threads.
        Raises LaunchError if it cannot be made for another reason.
        """
        group = self.handle.sandbox_group
        if group is None:
            raise LaunchError("there are no checkpoints here")
        made = await group.new_checkpoint(self.handle)
        try:
            with self.asking("shell", "kernel_mcp_checkpoint_request", {}) as answer:
                why = await self._answer_to(answer.done, CHECKPOINT_S)
            said = {} if answer.message is None else answer.message.content
            if said.get("status") == "refused":
                raise Uncopyable(_words(said.get("hindrances")))
            if said.get("status") != "ok":
                raise LaunchError(
                    one_line(str(said.get("reason") or why or "the kernel has ended"))
                )
            await made.suspended(CHECKPOINT_S)
        except BaseException:
            group.drop(made)
            raise
        group.add(made)
        self.known[made] = KnownNames(self.names)
        for former in [each for each in self.known if each not in group.checkpoints]:
            del self.known[former]
        seconds = said.get("seconds")
        return made, seconds if isinstance(seconds, float) and seconds > 0 else 0.0

    async def _answer_to(self, answer: anyio.Event, cpu_s: float) -> str:
        """Wait for an answer; return the reason if none arrives in `cpu_s` CPU seconds, else ""."""
        return await silence.await_answer(answer, lambda: [self.handle.pid], cpu_s)

    async def become_branch(self, folder: str) -> None:
        """Send a fresh kernel the folder of its branch. Raises LaunchError without an answer."""
        order = {"folder": folder}
        with self.asking("shell", "kernel_mcp_branch_request", order) as answer:
            await self._answer_to(answer.done, CHECKPOINT_S)
        if answer.message is None:
            raise LaunchError("The kernel did not take the folder of its branch.")

    async def wake(self, checkpoint: Checkpoint, folder: str = "") -> Kernel:
        """Start a kernel from a checkpoint of this one, and return it once it is ready.

        `folder` is that of a branch, empty for none. Raises LaunchError, BoundaryBroken.
        """
        assert self.handle.sandbox_group is not None
        try:
            handle = await self.handle.sandbox_group.resume(checkpoint, folder)
        except OSError as reason:
            raise LaunchError(f"the checkpoint cannot be woken: {reason}") from reason
        kernel = Kernel(
            handle,
            environment=self.environment,
            policy=self.policy,
            masks=self._masks,
            floods=self._floods,
        )
        kernel.known = dict(self.known)
        kernel.closed_files = _words(handle.report.closed)
        kernel.tools = self.tools
        kernel.names = KnownNames(self.known.get(checkpoint, self.names))
        kernel._stray = kernel._early.append
        kernel._channels.wire.follow(self._channels.wire)
        try:
            why = await kernel._answer_to(kernel._channels.greeted, CHECKPOINT_S)
            if why:
                raise LaunchError(f"the kernel of the checkpoint is not ready: {why}")
            await kernel.ready(0.0)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel

    async def aclose(self) -> None:
        """Close the channels, end the process and remove its files.

        Files that other kernels share with it stay.
        """
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
                    self._ending = IdleWait(run, self._channels)
        elif message.kind == "status":
            if run is not None and mine and message.content.get("execution_state") == "idle":
                run.on_idle()
        elif message.kind == "kernel_mcp_tools":
            self.tools.connect(self)
        elif message.kind == "input_request":
            if run is not None and mine:
                self._take_question(run, message.content)
        else:
            self._take_output(message, run if mine else None)

    def _take_question(self, run: Run, content: Mapping[str, Any]) -> None:
        asked = InputRequest.of(content)
        if asked is not None and run.asks is not None and not run.finished.is_set():
            run.lift()
            run.asks(replace(asked, prompt=self._masks.masked(asked.prompt)))

    def _take_output(self, message: Message, run: Run | None) -> None:
        """Pass output to the cell it belongs to, else to the one that runs or ran last.

        That one also gets late output of threads and children, and text without a parent, which
        comes from file descriptors. `MessageCodec` drops answers to requests of other clients.
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
        """Kill a kernel whose channel is lost, unless it has exited."""
        if not self._closing and self.handle.exit is None:
            self._broken = self._broken or reason
            self.handle.kill()
