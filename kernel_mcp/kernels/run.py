"""An execute request: its outcome, and the end of its output.

Reply and output come on different channels, so a reply may arrive before earlier output. An `idle`
may be lost or withheld: the kernel is then sent a request on the control channel. iopub is ordered,
so no output of the cell can follow after the `idle` of that request.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, KernelChannels
from kernel_mcp.kernels.known_names import texts
from kernel_mcp.kernels.message_codec import (
    MAX_ID_CHARS,
    UNNAMED,
    Message,
    WireError,
    event_from,
    failure_from,
    whole_number,
)
from kernel_mcp.output.items import Event, Failure
from kernel_mcp.records import dataclass

Sink: TypeAlias = Callable[[Event], None]
ABORTED = Failure(UNNAMED, "the cell was aborted", ())
RENEWED = Failure(UNNAMED, "the code ended its own interpreter", ())
ALL_LOST = (
    "The kernel has begun a fresh interpreter: all variables and functions of this session are "
    "lost; files in the workspace are kept"
)
MOST_HOLDERS = 5
RECORD_CHARS = 32_000
"""Longest record of a cell as JSON."""
MOST_PAYLOADS = 8
QUITS = (
    "The code has asked its kernel to end: some kernels do, others go on and keep their variables. "
    "Call reset for a fresh one, close_session to end the session"
)
NAME_CHARS = 80
MAX_PROMPT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class CellUsage:
    """Processor time and memory of one cell, as its kernel reports them; None where unknown.

    Memory is that of the kernel's process, in bytes: its peak, what is in use after the cell, what
    was before, and what was cleared of the frames of an error. `holders` are the largest values if
    memory is short.
    """

    cpu_s: float | None = None
    peak_bytes: int | None = None
    memory_bytes: int = 0
    before_bytes: int = 0
    cleared_bytes: int = 0
    holders: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class InputRequest:
    """A line that code asks for, or, if `withdrawn`, no longer waits for; hostile data.

    `key` is the kernel's. With `secret` the line is one that must not be shown.
    """

    key: str
    prompt: str = ""
    secret: bool = False
    withdrawn: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> InputRequest | None:
        """Return the request in an `input_request` message; None if it is malformed."""
        key, prompt = content.get("key"), content.get("prompt", "")
        if not isinstance(key, str) or not isinstance(prompt, str) or len(key) > MAX_ID_CHARS:
            return None
        return cls(
            key,
            prompt[:MAX_PROMPT_CHARS],
            content.get("password") is True,
            content.get("withdrawn") is True,
        )


class Run:
    """One execute request in flight; `finished` is set when it ended or the kernel died.

    Only the first reply counts; its pages, such as help, follow all other output. `outputs` is the
    number of its output messages. `compiled` is False if the code was refused before it ran.
    `begun` is True once the kernel has sent a message about it.
    """

    def __init__(self, sink: Sink, lift: Callable[[], None] = lambda: None) -> None:
        """`lift` flushes the output that `sink` holds back."""
        self.asks: Callable[[InputRequest], None] | None = None
        """Callback for lines that its code asks a person for; None if it may not."""
        self.msg_id = ""
        self.sink = sink
        self.lift = lift
        self.status: str | None = None
        self.exit_code: int | None = None
        self.compiled = True
        self.removed: tuple[int, list[str]] = (0, [])
        """Number of variables removed without a `del` that names them, and the first names."""
        self.usage = CellUsage()
        self.record: dict[str, Any] = {}
        """The record of the kernel; hostile data, within `RECORD_CHARS`."""
        self.failure: Failure | None = None
        self.finished = anyio.Event()
        self.begun = False
        self.renewed = False
        """True if code has ended its interpreter, and the kernel has begun a fresh one."""
        self.outputs = 0
        self.notices: list[str] = []
        """Notices for the session's owner."""
        self._pages: list[Event] = []
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
        if status == "abort":  # IRkernel, bash_kernel and tslab write it so
            status = "aborted"
        self.status = status if status in ("ok", "error", "aborted") else "error"
        self.removed = _removed(content.get("removed"))
        self.usage = _usage(content.get("used"))
        self.record = _record(content.get("record"))
        self._take_payloads(content.get("payload"))
        if self._idle:
            self.end()

    def on_idle(self) -> None:
        """Note that no more output of this request can follow."""
        self._idle = True
        if self.status is not None:
            self.end()

    def end(self) -> None:
        """Flush remaining output, and set `finished`."""
        if self.status == "aborted" and self.outputs:
            self.status = "error"  # it was not dropped but interrupted
            self.failure = ABORTED
        if self.renewed:
            self.status, self.failure = "error", RENEWED
            self.notices.append(ALL_LOST)
        while self._pages:
            self.sink(self._pages.pop(0))
        self.lift()
        self.finished.set()

    def _take_payloads(self, value: object) -> None:
        """Take in the pages of an execute reply, and its wish to end the kernel; hostile data."""
        for each in value[:MOST_PAYLOADS] if isinstance(value, list) else ():
            source = each.get("source") if isinstance(each, dict) else ""
            if source == "page":
                with contextlib.suppress(WireError):
                    page = event_from(Message("display_data", self.msg_id, each))
                    self._pages += [page] if page is not None else []
            elif source == "ask_exit" and QUITS not in self.notices:
                self.notices.append(QUITS)


LOOK_S = 2.0
"""Seconds to wait for the `idle` before a control request is sent, and between later checks."""
MOST_LOOKS = 30
"""Number of checks after which a cell is ended whose kernel keeps sending or does not answer."""
CROWDED = (
    "This cell sent hundreds of messages within a second. Its kernel drops messages that wait, and "
    "does not report it: output may be missing here. Write long output to a file"
)
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
        self._run.notices.append(UNSURE)
        self._run.end()

    def _look_later(self) -> None:
        self._channels.call_later(LOOK_S, self._look)


def _removed(value: object) -> tuple[int, list[str]]:
    """Return the `removed` of an execute reply, a number and names; 0 for malformed data."""
    if not isinstance(value, list) or len(value) != 2:
        return 0, []
    count, names = whole_number(value[0]), texts(value[1])
    return max(count or 0, len(names)), names


def _record(value: object) -> dict[str, Any]:
    """Return the `record` of an execute reply; empty if it is malformed or too long."""
    if not isinstance(value, dict) or len(json.dumps(value)) > RECORD_CHARS:
        return {}
    return value


def _usage(value: object) -> CellUsage:
    """Return the `used` of an execute reply; without figures that are malformed."""
    found = value if isinstance(value, dict) else {}
    cpu_s = found.get("cpu_s")
    known = isinstance(cpu_s, float) and math.isfinite(cpu_s) and cpu_s >= 0
    return CellUsage(
        cpu_s if known else None,
        whole_number(found.get("peak_bytes")),
        whole_number(found.get("memory_bytes")) or 0,
        whole_number(found.get("before_bytes")) or 0,
        whole_number(found.get("cleared_bytes")) or 0,
        tuple(_holders(found.get("holders"))),
    )


def _holders(value: object) -> Iterator[tuple[str, int]]:
    for each in value[:MOST_HOLDERS] if isinstance(value, list) else ():
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], str):
            yield each[0][:NAME_CHARS], whole_number(each[1]) or 0
