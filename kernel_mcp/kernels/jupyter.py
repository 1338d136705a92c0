"""A live kernel that supports only Jupyter's own requests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import anyio

from kernel_mcp.errors import AnswerLate, LaunchError
from kernel_mcp.kernels.channels import Channel
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.kernels.run import CROWDED, Run, Sink
from kernel_mcp.notebooks.metadata import notebook_of
from kernel_mcp.output.text import one_line
from kernel_mcp.units import MIB

AGAIN_S = 0.5
"""Seconds between checks that output is received: messages published before that are lost."""
MANY_MESSAGES = 500
"""Half of those that may wait in a PUB socket, which drops the next ones (ZMQ_SNDHWM)."""
MANY_S = 1.0
"""Seconds within which so many messages mean that some may have been dropped."""
LANGUAGE_FIELDS = ("name", "version", "file_extension", "mimetype")
FIELD_CHARS = 80
MOST_EVALUATED = 4 * MIB
"""Maximum characters of the output of a hidden cell."""
INTERRUPTS = 60
SETTLE_S = 0.5
"""Seconds between interrupts of a hidden cell, which C code ignores for a while."""
UNASKED = "The code asked for a line, had nobody to ask, and got an empty one"
BETWEEN = "This is possible between cells alone: call wait, then this."


class JupyterKernel(Kernel):
    """A kernel that supports only Jupyter's own requests, such as that of another language."""

    extended = False
    info_channel: Channel = "shell"
    """Channel of the requests by which `connected` finds out whether the kernel answers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """See `Kernel`."""
        self.info: Mapping[str, Any] = {}
        """Its `kernel_info_reply`; hostile data."""
        self._output_received = anyio.Event()
        self._hidden = ""
        """Id of the hidden cell that runs; empty for none."""
        self._hidden_begun = False
        self._concealed: set[str] = set()
        """Ids of hidden cells that have not ended, those that are no longer waited for included."""
        self._printed: list[str] = []
        self._hidden_ended = anyio.Event()
        self._counted_at = 0.0
        """Time at which the cell began, or had sent a multiple of `MANY_MESSAGES`."""
        super().__init__(*arguments, **named)

    async def connected(self, timeout: float) -> bool:
        """Wait until the kernel answers and its output is received; return False if it does not.

        Kernels that publish on a PUB socket confirm no subscription.
        """
        with anyio.move_on_after(timeout):
            while self.exit is None and not (self.info and self._output_received.is_set()):
                self.info = await self._ask_info() or self.info
        return bool(self.info) and self._output_received.is_set()

    async def _ask_info(self) -> Mapping[str, Any] | None:
        with self.asking(self.info_channel, "kernel_info_request", {}) as answer:
            with anyio.move_on_after(AGAIN_S):
                await answer.done.wait()
                await self._output_received.wait()
        return None if answer.message is None else answer.message.content

    @property
    def language_info(self) -> dict[str, Any]:
        """The kernel's description of its language; hostile data."""
        found = self.info.get("language_info")
        return found if isinstance(found, dict) else {}

    @property
    def notebook_metadata(self) -> Mapping[str, Any]:
        """See `Kernel`."""
        known = self.language_info
        fields = [each for each in LANGUAGE_FIELDS if isinstance(known.get(each), str)]
        info = {each: one_line(known[each])[:FIELD_CHARS] for each in fields}
        notebook = notebook_of(info.get("name", ""))
        return {**notebook, "language_info": {**notebook["language_info"], **info}}

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """See `Kernel`. Raises LaunchError also for requests that are not Jupyter's."""
        if kind.startswith("kernel_mcp_"):
            raise LaunchError("This kernel supports only Jupyter's own requests.")
        return await super().ask(kind, content, timeout=timeout)

    def _hand_over(self, run: Run, kind: str, content: dict[str, Any]) -> None:
        content["allow_stdin"] = run.asks is not None
        super()._hand_over(run, kind, content)

    def answer(self, key: str, action: str, value: str) -> None:
        """See `Kernel`. Jupyter has no word for no answer: the cell is interrupted then."""
        if action == "accept":
            self._send_line(value)
        else:
            self.interrupt(alone=True)

    def _send_line(self, value: str) -> None:
        with contextlib.suppress(LaunchError):  # the end of the kernel is noticed elsewhere
            self._channels.send("stdin", "input_reply", {"value": value})

    def _on_question(self, message: Message) -> None:
        """Pass a question on, or send an empty line: kernels of R ask even if they may not."""
        if message.kind != "input_request":
            return
        run = self._run
        mine = run is not None and message.parent == run.msg_id
        if run is not None and mine and run.asks is not None:
            self._take_question(run, {**message.content, "key": run.msg_id})
            return
        self._send_line("")
        if run is not None and mine and UNASKED not in run.notices:
            run.notices.append(UNASKED)

    async def begin_script(self, name: str, timeout: float) -> None:
        """See `Kernel`; a script is a cell like others."""

    async def watch(self) -> None:
        """See `Kernel`."""
        await super().watch()
        self._hidden_ended.set()

    async def evaluate(self, code: str, timeout: float) -> Any:
        """Run code that prints JSON, as a cell that nobody sees, and return the value.

        The value is hostile data. Raises LaunchError while a cell runs, or without an answer within
        `timeout` seconds. It is interrupted then, and if this call is cancelled.
        """
        if self.running is not None or self._hidden:
            raise LaunchError(BETWEEN)
        self._printed, self._hidden_ended, self._hidden_begun = [], anyio.Event(), False
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        try:
            with self.asking("shell", "execute_request", content) as answer:
                self._hidden = next(reversed(self._asked))
                self._concealed.add(self._hidden)
                with anyio.move_on_after(timeout) as late:
                    await answer.done.wait()
                    await self._hidden_ended.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop_hidden()
            self._hidden = ""
        if self.exit is not None:
            raise LaunchError("The kernel has ended.")
        if late.cancelled_caught:
            raise AnswerLate(f"The kernel did not answer within {timeout:g} s. {BETWEEN}")
        try:
            return json.loads("".join(self._printed))
        except (ValueError, RecursionError) as reason:
            raise LaunchError("The kernel did not answer as expected.") from reason

    async def _stop_hidden(self) -> None:
        """Interrupt the hidden cell until it ends: kernels may drop a cell that waits meanwhile."""
        for _ in range(INTERRUPTS):
            if not self._hidden_begun or self._hidden_ended.is_set() or self.exit is not None:
                return
            self.interrupt(alone=True)
            with anyio.move_on_after(SETTLE_S):
                await self._hidden_ended.wait()

    def _listen(self, sink: Sink) -> Run:
        self._counted_at = anyio.current_time()
        return super()._listen(sink)

    def _take_output(self, message: Message, run: Run | None) -> None:
        super()._take_output(message, run)
        if run is not None and run.outputs % MANY_MESSAGES == 0:
            since, self._counted_at = self._counted_at, anyio.current_time()
            if self._counted_at - since < MANY_S and CROWDED not in run.notices:
                run.notices.append(CROWDED)

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel == "iopub" and message.parent in self._asked:
            self._output_received.set()
        if channel == "iopub" and message.parent in self._concealed:
            self._on_hidden(message)
            return
        if channel == "stdin":
            self._on_question(message)
            return
        super()._on_message(channel, message)

    def _on_hidden(self, message: Message) -> None:
        text = message.content.get("text")
        idle = message.kind == "status" and message.content.get("execution_state") == "idle"
        if idle:
            self._concealed.discard(message.parent)
        if message.parent != self._hidden:
            return
        self._hidden_begun = True
        if message.kind == "stream" and message.content.get("name") == "stdout":
            if isinstance(text, str) and sum(map(len, self._printed)) < MOST_EVALUATED:
                self._printed.append(text)
        elif idle:
            self._hidden_ended.set()
