"""The end of a cell: its reply, and then the `idle` that follows its last output.

Both come on different channels, so that a reply can be read before output that was sent before it.
An `idle` may be lost, and a hostile kernel may withhold it: the kernel is then asked something else
on the control channel. It sends everything on iopub in one order, so when the `idle` of that
request has come, no output of the cell can follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, Channels
from kernel_mcp.kernels.wire import Message

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Run

LOOK_S = 2.0
"""How long to wait for the `idle` before the kernel is asked, and between later looks."""
MOST_LOOKS = 30
"""A kernel that goes on sending for so long, or answers nothing, has its cell ended."""
UNSURE = (
    "The kernel did not say where the output of this cell ends: some of it may be missing here, or "
    "come with a later cell"
)


class Ending:
    """Ends a `run` whose reply has come, also without its `idle`; nothing else of it is kept."""

    def __init__(self, run: Run, channels: Channels) -> None:
        """Looks are taken until the run has finished."""
        self._run = run
        self._channels = channels
        self._asked = ""
        self._answered = False
        self._seen = -1
        self._looks = 0
        self._look_later()

    def hear(self, channel: Channel, message: Message) -> None:
        """Note what answers the question."""
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
        """Ask once; False when the kernel takes no requests."""
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
