"""A running kernel that another client has started and goes on using.

Other clients send requests to it, too. So a cell waits here until their cells have ended, also
those that are queued in the kernel. Then an interrupt never stops a cell of another client, and a
cell that is cancelled before its turn never runs.

A *look* is a request that runs no code; its reply has the kernel's public names. The kernel replies
after all requests that were queued before it, so the reply shows that these have ended.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.attached.endings import RESTARTED, ending_of
from kernel_mcp.attached.interpreter import attached
from kernel_mcp.attached.process import Connected
from kernel_mcp.attached.targets import AttachTarget
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, ChannelListener, KernelChannels
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.kernels.known_names import MOST_NAMES, NAME_CHARS, KnownNames
from kernel_mcp.kernels.message_codec import Message, whole_number
from kernel_mcp.kernels.run import Run
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.notebooks.metadata import language_of
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy
from kernel_mcp.units import MIB

NAMES_S = 1.0
"""Seconds that a new session waits for the names of an idle kernel."""
LONG_S = 0.2
"""Seconds until the notice that a cell waits; a look alone takes less."""
MOST_VALUE_CHARS = 4 * MIB
"""Largest result of an expression; the most names that are accepted have a tenth of that."""
MOST_OTHERS = 1000
"""Most unfinished requests of other clients that are tracked."""
LANGUAGE_CHARS = 40
WAITS = (
    "Another client's cell is running in this kernel: a cell of this session waits here until that "
    "has ended"
)
NOT_RUN = "The cell of this session was not run: another client's was running all the time"
GOES_ON = (
    "The cell has not stopped and goes on in the attached kernel, which is not ended from here: it "
    "may still change variables, and later cells wait for its end"
)
SENT = (
    "The cell waits in the attached kernel behind another client's and cannot be taken back: it "
    "runs when that one has ended"
)
BETWEEN = "Variables of an attached kernel can be listed between cells alone: call wait, then this."

_KEY = "kernel_mcp"
_HIDDEN = 'b.getattr(b.globals().get("get_ipython", b.list)(), "user_ns_hidden", ())'


def _expression(value: str) -> str:
    """Return an expression whose result `_value` decodes: `value` as JSON in hexadecimal digits.

    In `value` builtins are attributes of `b`, as users name variables `list` and `type`.
    """
    return f'(lambda b: b.__import__("json").dumps({value}).encode().hex())(__import__("builtins"))'


NAMES = _expression(
    '(lambda names: [b.__import__("os").getpid(), '
    f"[name for name in names if b.len(name) <= {NAME_CHARS}][:{MOST_NAMES}], b.len(names)])"
    '([name for name in b.list(b.globals()) if b.type(name) is b.str and name[:1] != "_" '
    f"and name not in {_HIDDEN}])"
)
"""Expression evaluated after each cell: the process id, the public names, and their number."""


def _description() -> str:
    """Return the expression that describes variables, with the code of this server's kernels."""
    source = files("kernel_specs.restricted").joinpath("variables.py").read_text("utf-8")
    return _expression(
        f"(lambda space: (b.exec({source!r}, space), "
        f'space["describe"](b.globals(), {_HIDDEN}))[1])({{"__name__": "builtins"}})'
    )


class AttachedKernel(JupyterKernel):
    """A kernel at an `AttachTarget`. Code that other clients run in it goes to `overheard`."""

    info_channel: Channel = "control"  # which answers while a cell runs

    def __init__(
        self,
        handle: KernelProcess,
        start: Connected,
        *,
        place: AttachTarget,
        channels: Callable[[ChannelListener], KernelChannels],
        policy: Policy,
        masks: Masks,
    ) -> None:
        """`channels` connects to the kernel; `start` is that of `handle`."""
        self._start = start
        self._join = channels
        self._foreign_running: dict[str, None] = {}
        """Running requests other than the cell in flight, oldest first."""
        self._waiting_run: tuple[Run, str, dict[str, Any]] | None = None
        self._look = ""
        """Id of the look that is not yet answered; empty for none."""
        self._running_at_look: list[str] = []
        """Requests of others sent before that look: they have ended once it is answered."""
        self._stale = False
        """True if code of others has ended since that look was sent."""
        self._aborted = False
        self._look_answered = anyio.Event()
        self._joined = False
        self._pid: int | None = None
        self._count = 0
        self._names = NAMES
        """Expression that each cell evaluates besides; empty where it is no Python."""
        self.place = str(place)
        environment = KernelEnvironment(Path(), ())
        super().__init__(handle, environment=environment, policy=policy, masks=masks)

    async def ready(self, timeout: float) -> None:
        """Wait until the kernel answers and its output is received. Raises LaunchError."""
        answers = await self.connected(timeout)
        if self.exit is not None:
            raise LaunchError(f"The kernel at {self.place} {self.exit.describe()}.")
        if not answers:
            raise LaunchError(
                f"The kernel at {self.place} did not answer within {timeout:g} s: it may have been "
                "stopped. Look there, and try again."
            )
        self._take_language()
        self._joined = True
        await self._first_names()

    def _take_language(self) -> None:
        version = str(self.language_info.get("version", ""))[:LANGUAGE_CHARS]
        if language_of(self.notebook_metadata) != "Python":
            self._names = ""
        fit = all(part.isdigit() for part in version.split(".")[:2])
        self.environment = replace(self.environment, version=version if fit else "")

    @property
    def joined(self) -> Interpreter:
        """See `Kernel`."""
        return attached(self.place, self.notebook_metadata)

    async def _ask_info(self) -> Mapping[str, Any] | None:
        """See `JupyterKernel`; on both channels in turn, as many answer on one alone."""
        found = await super()._ask_info()
        if found is None:
            self.info_channel = "shell" if self.info_channel == "control" else "control"
        return found

    async def _first_names(self) -> None:
        """Fetch the names of existing variables; give up after `NAMES_S` if a cell is running."""
        self._send_look()
        with anyio.move_on_after(NAMES_S):
            await self._look_answered.wait()

    def _open(self, listener: ChannelListener) -> KernelChannels:
        return self._join(listener)

    def missed(self, run: Run) -> bool:
        """See `Kernel`: a cell that waited here has not run either."""
        waited = self._waiting_run is not None and self._waiting_run[0] is run
        return self.exit is not None and (waited or super().missed(run))

    def interrupt(self, *, alone: bool = False) -> None:
        """Interrupt the running cell of this session; a waiting one is cancelled."""
        run = self.running
        if run is None:
            return
        if self._waiting_run is not None and self._waiting_run[0] is run:
            self._waiting_run = None
            self.tell(NOT_RUN)
            _drop(run)
        elif run.begun and run.status is None:  # else another client's cell may run
            self._channels.interrupt()

    def end_unresponsive(self, run: Run) -> str | None:
        """Leave a cell that does not stop to the external kernel; return a sentence on it."""
        self.interrupt()
        if run.finished.is_set():
            return ""
        self._note(run.msg_id)
        _drop(run)
        return GOES_ON if run.begun else SENT

    async def describe_variables(self, match: str, offset: int, timeout: float) -> dict[str, Any]:
        """See `Kernel`; all variables, whatever `match` and `offset` are."""
        if self.running is not None:
            raise LaunchError(BETWEEN)
        with self.asking("shell", "execute_request", _silent(_description())) as answer:
            with anyio.move_on_after(timeout):
                await answer.done.wait()
        found = None if answer.message is None else _value(answer.message.content)
        if not isinstance(found, dict):
            raise LaunchError(f"The kernel has not described its variables. {BETWEEN}")
        return found

    def _hand_over(self, run: Run, kind: str, content: dict[str, Any]) -> None:
        content["user_expressions"] = {_KEY: self._names} if self._names else {}
        del content["cell_number"]
        run.msg_id = "held"
        if not self._foreign_running and not self._look:
            super()._hand_over(run, kind, content)
            return
        self._waiting_run = (run, kind, content)
        self._send_look()
        self._channels.call_later(LONG_S, lambda: self._notify_wait(run))

    def _notify_wait(self, run: Run) -> None:
        if self._waiting_run is not None and self._waiting_run[0] is run:
            self.tell(WAITS)

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel == "iopub" and self._has_ended(message):
            return
        if message.foreign or message.parent in self._foreign_running:
            if channel == "iopub":
                self._on_foreign_message(message)
            return
        if channel == "shell" and self._look and message.parent == self._look:
            self._on_look(message.content)
            return
        run = self._run
        reply = channel == "shell" and run is not None and message.parent == run.msg_id
        anew = reply and self._is_anew(message.content)
        super()._on_message(channel, message)
        if anew:
            self._start.end(RESTARTED)

    def _has_ended(self, message: Message) -> bool:
        """Return True if a message means that the kernel and its variables are gone; end it then.

        Also for a shutdown or restart that is about to happen.
        """
        why = ending_of(message)
        if why is None or not self._joined:
            return False
        self._start.end(why)
        return True

    def _on_foreign_message(self, message: Message) -> None:
        """Handle a message about a request of another client.

        A request counts as running once its code is published; output alone may come from a thread
        of an earlier cell.
        """
        if message.kind == "status":
            if (
                message.content.get("execution_state") == "idle"
                and message.parent in self._foreign_running
            ):
                del self._foreign_running[message.parent]
                self._stale = True
                self._send_look()
        elif message.kind == "execute_input" and message.asked == "execute_request":
            self._note(message.parent)
            if self._is_anew(message.content):
                self._start.end(RESTARTED)
            if isinstance(code := message.content.get("code"), str):
                self.overheard(code)

    def _send_look(self) -> None:
        """Send a look, unless one is pending."""
        if self._look:
            return
        self._stale, self._running_at_look = False, list(self._foreign_running)
        with contextlib.suppress(LaunchError):  # the end of the kernel is noticed elsewhere
            self._look = self._channels.send("shell", "execute_request", _silent(self._names))

    def _on_look(self, content: Mapping[str, Any]) -> None:
        """Handle the answer to a look: all requests queued before it have ended."""
        self._look = ""
        for request in self._running_at_look:
            self._foreign_running.pop(request, None)
        if not self._take_names(content):
            self._start.end(RESTARTED)
            return
        self._look_answered.set()
        again = content.get("status") == "aborted" and not self._aborted  # a cell before it failed
        self._aborted = again
        if again or self._stale or (self._foreign_running and self._waiting_run is not None):
            self._send_look()
        else:
            self._start_waiting_run()

    def _note(self, request: str) -> None:
        self._foreign_running[request] = None
        if len(self._foreign_running) > MOST_OTHERS:
            del self._foreign_running[next(iter(self._foreign_running))]

    def _start_waiting_run(self) -> None:
        if self._waiting_run is None:
            return
        (run, kind, content), self._waiting_run = self._waiting_run, None
        try:
            super()._hand_over(run, kind, content)
        except LaunchError:  # the end of the kernel is noticed elsewhere
            _drop(run)

    def _is_anew(self, content: Mapping[str, Any]) -> bool:
        """Return True if a message about a cell is that of another process than before.

        A kernel that is no Python shows that by its number of cells alone.
        """
        if self._names:
            return not self._take_names(content)
        before, count = self._count, whole_number(content.get("execution_count"))
        self._count = before if count is None else count
        return self._count < before

    def _take_names(self, content: Mapping[str, Any]) -> bool:
        """Store the result of `NAMES`; return False if the process is another one than before."""
        found = _value(content)
        if not isinstance(found, list) or len(found) != 3:
            return True
        pid, names, count = found
        if self._pid is not None and pid != self._pid:
            return False
        self._pid = pid if isinstance(pid, int) else None
        self.names = KnownNames()
        self.names.apply([names, []])
        self.names.more = max(0, (whole_number(count) or 0) - len([*self.names]))
        return True

    def _on_broken(self, reason: str) -> None:
        if not self._closing:
            self._start.end(f"cannot be reached any more: {one_line(reason)}")


def _silent(expression: str) -> dict[str, Any]:
    """Return the content of a request that evaluates an expression and runs no cell."""
    return {
        "code": "",
        "silent": True,
        "store_history": False,
        "user_expressions": {_KEY: expression} if expression else {},
        "allow_stdin": False,
        "stop_on_error": False,
    }


def _value(content: Mapping[str, Any]) -> object:
    """Return the result of an expression made by `_expression`; None for anything else.

    The content is untrusted.
    """
    try:
        text = content["user_expressions"][_KEY]["data"]["text/plain"]
        if not isinstance(text, str) or len(text) > MOST_VALUE_CHARS:
            return None
        return json.loads(bytes.fromhex(text[1:-1]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _drop(run: Run) -> None:
    """End a run that will get no reply, as aborted."""
    run.on_reply({"status": "aborted"})
    run.end()
