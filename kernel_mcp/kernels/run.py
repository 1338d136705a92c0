"""One execute request: its outcome, and the end of its output.

Reply and output come on different channels, so a reply may precede earlier output. An `idle` may be
lost or withheld: the kernel is then sent a request on the control channel. iopub keeps one order,
so after the `idle` of that request no output of the cell can follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, Channels
from kernel_mcp.kernels.wire import Message, WireError, failure_from, whole_number
from kernel_mcp.output.items import Event, Failure

Sink: TypeAlias = Callable[[Event], None]


class Run:
    """One execute request in flight; `finished` is set when it ended or the kernel died.

    The first reply counts. `outputs` counts its messages, `unsure` means that no `idle` came. What
    is not `compiled` has not run.
    """

    def __init__(self, sink: Sink) -> None:
        self.msg_id = ""
        self.sink = sink
        self.status: str | None = None
        self.exit_code: int | None = None
        self.compiled = True
        self.failure: Failure | None = None
        self.finished = anyio.Event()
        self.begun = False
        self.outputs = 0
        self.unsure = False
        self._idle = False

    def on_reply(self, content: dict[str, Any]) -> None:
        """Take the outcome from an execute reply."""
        if self.status is not None:
            return
        status = content.get("status")
        if status == "error":
            self.exit_code = whole_number(content.get("exit_code"))
            self.compiled = content.get("begun") is not False
            with contextlib.suppress(WireError):
                self.failure = failure_from(content)
        self.status = status if status in ("ok", "error", "aborted") else "error"
        if self._idle:
            self.finished.set()

    def on_idle(self) -> None:
        """No more output of this request can follow."""
        self._idle = True
        if self.status is not None:
            self.finished.set()


LOOK_S = 2.0
"""Seconds to wait for the `idle` before a control request, and between later looks."""
MOST_LOOKS = 30
"""Looks after which a kernel that keeps sending, or does not answer, has its cell ended."""
UNSURE = (
    "The kernel did not say where the output of this cell ends: some of it may be missing here, or "
    "come with a later cell"
)


class Ending:
    """Ends a `run` whose reply has come, with or without its `idle`."""

    def __init__(self, run: Run, channels: Channels) -> None:
        self._run = run
        self._channels = channels
        self._asked = ""
        self._answered = False
        self._seen = -1
        self._looks = 0
        self._look_later()

    def hear(self, channel: Channel, message: Message) -> None:
        """Take the answer to the control request."""
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
        quiet = self._channels.received == self._seen
        if (self._answered and quiet) or self._looks > MOST_LOOKS or not self._ask():
            self._give_up()
            return
        self._seen = self._channels.received
        self._look_later()

    def _ask(self) -> bool:
        """Send the control request; False when the kernel takes none."""
        if not self._asked:
            try:
                self._asked = self._channels.send("control", "kernel_info_request", {})
            except LaunchError:
                return False
        return True

    def _give_up(self) -> None:
        self._run.unsure = True
        self._run.finished.set()

    def _look_later(self) -> None:
        self._channels.call_later(LOOK_S, self._look)
