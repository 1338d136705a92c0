"""One live kernel: its process, its channels and the request in flight."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError, Uncopyable
from kernel_mcp.kernels.channels import Channel, Channels, Floods, Hearer, KernelChannels
from kernel_mcp.kernels.message_codec import (
    Message,
    WireError,
    event_from,
    failure_from,
    whole_number,
)
from kernel_mcp.launch import silence
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.output.items import Event, Failure, Redactor, Stream
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

# An execute request: its outcome, and the end of its output.
#
# Reply and output come on different channels, so a reply may arrive before earlier output. An
# `idle` may be lost or withheld: the kernel is then sent a request on the control channel. iopub is
# ordered, so no output of the cell can follow after the `idle` of that request.

Sink: TypeAlias = Callable[[Event], None]


class Run:
    """One execute request in flight; `finished` is set when it ended or the kernel died.

    Only the first reply counts. `outputs` is the number of its output messages. `unsure` means that
    no `idle` was received. `compiled` is False if the code was refused before it ran. `begun` is
    True once the kernel has sent a message about it.
    """

    def __init__(self, sink: Sink, lift: Callable[[], None] = lambda: None) -> None:
        """`lift` flushes the output that `sink` holds back."""
        self.msg_id = ""
        self.sink = sink
        self.lift = lift
        self.status: str | None = None
        self.exit_code: int | None = None
        self.compiled = True
        self.removed: tuple[int, list[str]] = (0, [])
        """Number of variables removed without a `del` that names them, and the first names."""
        self.failure: Failure | None = None
        self.finished = anyio.Event()
        self.begun = False
        self.outputs = 0
        self.unsure = False
        self._idle = False

    def on_reply(self, content: dict[str, Any]) -> None:
        """Set the outcome from an execute reply."""
        if self.status is not None:
            return
        status = content.get("status")
        if status == "error":
            self.exit_code = whole_number(content.get("exit_code"))
            self.compiled = content.get("begun") is not False
            with contextlib.suppress(WireError):
                self.failure = failure_from(content)
        self.status = status if status in ("ok", "error", "aborted") else "error"
        self.removed = _removed(content.get("removed"))
        if self._idle:
            self.end()

    def on_idle(self) -> None:
        """Note that no more output of this request can follow."""
        self._idle = True
        if self.status is not None:
            self.end()

    def end(self) -> None:
        """Flush remaining output, and set `finished`."""
        self.lift()
        self.finished.set()


LOOK_S = 2.0
"""Seconds to wait for the `idle` before a control request is sent, and between later checks."""
MOST_LOOKS = 30
"""Number of checks after which a cell is ended whose kernel keeps sending or does not answer."""
UNSURE = (
    "The kernel did not say where the output of this cell ends: some of it may be missing here, or "
    "come with a later cell"
)


class IdleWait:
    """Ends a `run` whose reply has arrived, even without its `idle`."""

    def __init__(self, run: Run, channels: KernelChannels) -> None:
        self._run = run
        self._channels = channels
        self._asked = ""
        self._answered = False
        self._seen = -1
        self._looks = 0
        self._look_later()

    def hear(self, channel: Channel, message: Message) -> None:
        """Handle a message, which may be the answer to the control request."""
        if not self._asked or message.parent != self._asked or self._run.finished.is_set():
            return
        if channel == "control":
            self._answered = True
        elif message.kind == "status" and message.content.get("execution_state") == "idle":
            self._give_up()

    def _look(self) -> None:
        if self._run.finished.is_set():
            return
        self._looks += 1
        quiet = self._channels.received == self._seen and not self._channels.resting
        if (self._answered and quiet) or self._looks > MOST_LOOKS or not self._ask():
            self._give_up()
            return
        self._seen = self._channels.received
        self._look_later()

    def _ask(self) -> bool:
        """Send the control request, once; return False if the kernel accepts none."""
        if not self._asked:
            try:
                self._asked = self._channels.send("control", "kernel_info_request", {})
            except LaunchError:
                return False
        return True

    def _give_up(self) -> None:
        self._run.unsure = True
        self._run.end()

    def _look_later(self) -> None:
        self._channels.call_later(LOOK_S, self._look)


MOST_NAMES = 2000
NAME_CHARS = 200


class KnownNames:
    """Names that a kernel reports as defined, in order; hostile data.

    `more` is the number of names beyond `MOST_NAMES`.
    """

    def __init__(self, known: KnownNames | None = None) -> None:
        self._names: dict[str, None] = {} if known is None else dict(known._names)
        self.more: int = 0 if known is None else known.more

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def apply(self, changes: object) -> None:
        """Apply the `names` of an execute reply: a list of new names and one of deleted names."""
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


def _removed(value: object) -> tuple[int, list[str]]:
    """Return the `removed` of an execute reply, a number and names; 0 for malformed data."""
    if not isinstance(value, list) or len(value) != 2:
        return 0, []
    count, names = whole_number(value[0]), _texts(value[1])
    return max(count or 0, len(names)), names


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        return []
    return [
        name for name in value[:MOST_NAMES] if isinstance(name, str) and len(name) <= NAME_CHARS
    ]


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


class Kernel:
    """A kernel that runs one cell at a time.

    `watch` must run as a task, to detect the end of the kernel.
    """

    attached = False
    """True for an external kernel, which understands only Jupyter's own protocol."""
    place = ""
    """Address of such a kernel, as passed to `create_session` in `attach`."""

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
        self._run: Run | None = None
        self._ending: IdleWait | None = None
        self._stray: Sink | None = None
        self._asked: dict[str, PendingReply] = {}
        self._closing = False
        self._received = 0
        self._broken = ""
        self._channels = self._open(Hearer(self._on_message, self._on_refused, self._on_broken))

    def _open(self, hearer: Hearer) -> KernelChannels:
        handle = self.handle
        ends = handle.channels
        return Channels(
            handle.connection, hearer, ends=ends, opened=bool(ends), floods=self._floods
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

    def submit(self, code: str, sink: Sink, number: int | None = None, notebook: str = "") -> Run:
        """Send a cell, with `number` as its execution count; pass its output to `sink` in order.

        It runs in the folder of the file `notebook`, if that is given. Raises LaunchError.
        """
        return self._send_cell("execute_request", code, sink, number, notebook)

    def prewarm(self, code: str) -> Run:
        """Send a cell that leaves no trace in the namespace. Raises LaunchError."""
        return self._send_cell("kernel_mcp_prewarm_request", code, lambda _event: None)

    def _send_cell(
        self, kind: str, code: str, sink: Sink, number: int | None = None, notebook: str = ""
    ) -> Run:
        if self._run is not None:
            self._run.lift()
        run = Run(sink)
        if self._masks:
            veil = Redactor(self._masks, sink)
            run = Run(veil, veil.flush)
        sink = run.sink
        self._run = run
        self._ending = None
        self._stray = sink
        content: dict[str, Any] = {
            "code": code,
            "silent": False,
            "store_history": kind == "execute_request",
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
            "cell_number": number,
            **({"notebook": notebook} if notebook else {}),
        }
        self._hand_over(run, kind, content)
        return run

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
        if alone:
            self.handle.signal(signal.SIGCONT)
            self.handle.signal(signal.SIGINT)
        else:
            self.handle.interrupt()

    def kill(self) -> None:
        """Kill the kernel and its descendants."""
        self.handle.kill()

    def give_up(self, run: Run) -> str | None:
        """End a cell that does not stop: kill the kernel, and return None.

        An attached kernel is not killed; the result is then a sentence on its cell, or empty.
        """
        self.kill()
        return None

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
        kernel.closed_files = _words(handle.closed)
        kernel.names = KnownNames(self.known.get(checkpoint, self.names))
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
        else:
            self._take_output(message, run if mine else None)

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
