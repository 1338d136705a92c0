"""A Jupyter endpoint, through which Jupyter clients of people use a session like a kernel.

JupyterLab and `jupyter console` connect to it. Their code goes through the session's queue like
cells of its agent. The output of every cell is published on iopub, with the request of that cell
as parent. The sockets stay open when a kernel of the session is replaced.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import anyio
import anyio.abc
import zmq
import zmq.asyncio

from kernel_mcp import __version__
from kernel_mcp.barriers import Barrier
from kernel_mcp.endpoints.iopub import IOPub
from kernel_mcp.endpoints.messages import Messages, Request, WireError, failure, shown
from kernel_mcp.endpoints.plain import plain, plain_reply
from kernel_mcp.endpoints.record import as_json, begun_of, history_of, last_of, marked
from kernel_mcp.errors import InputError, KernelMcpError
from kernel_mcp.kernels.message_codec import PROTOCOL_VERSION, header
from kernel_mcp.output.items import Event
from kernel_mcp.output.text import notice, visible
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import PERSON, Cell, Status
from kernel_mcp.sessions.introspection import inquire
from kernel_mcp.sessions.session import Session

SHELL, IOPUB, STDIN, CONTROL, HEARTBEAT = 1, 2, 3, 4, 5
"""Numbers of sockets, which Jupyter appends to the path in a connection file."""
MOST_PATH_BYTES = 107
"""Most bytes of a socket's path, see unix(7)."""
MOST_BYTES = 32 * 1024 * 1024
"""Most bytes of a client's message; a cell has a million characters at most."""
MOST_CODE_CHARS = 1_000_000
LINGER_MS = 100
"""Milliseconds for the last messages to clients when a session ends."""
MEANT_S = 2.0
"""Seconds after the end of a person's cell in which an interrupt still counts for that cell."""
_NOT_HERE = "A session has one kernel, which its server starts and ends"
TOO_LATE = (
    "Nothing was stopped: your cell had ended, and cell {number}, not yours, runs now. Interrupt "
    "again to stop that one"
)
NOT_EVALUATED = "A session evaluates no user expressions: put them into the code of a cell"
LEAVING = ("exit", "exit()", "quit", "quit()")
"""Lines by which people leave `jupyter console`, which sends them to the kernel."""
_LEAVE = {"source": "ask_exit", "keepkernel": True}
_STOPPED = (Status.INTERRUPTED, Status.TIMEOUT, Status.KILLED)


@dataclass(frozen=True, slots=True)
class _Parent:
    """The parent of published messages: a request's header, and metadata about its cell."""

    header: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)


class KernelEndpoint:
    """The endpoint of one session, while `serve` runs."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        context: zmq.asyncio.Context,
        *,
        only_plain: bool = False,
    ) -> None:
        """`open` creates files and sockets in `folder`. Raises InputError if its path is too long.

        With `only_plain` clients receive nothing that a web page could execute.
        """
        self.session = session
        self._plain = only_plain
        name = f"{session.handle}{'-plain' if only_plain else ''}"
        self._place = folder / name
        self.file = folder / f"kernel-{name}.json"
        """The connection file."""
        if len(f"{self._place}-{HEARTBEAT}".encode()) > MOST_PATH_BYTES:
            raise InputError(
                f"The sockets of this session would have paths longer than {MOST_PATH_BYTES} "
                f"bytes, as {self._place} has: start the server with a shorter --state-dir."
            )
        self._context = context
        self._key = secrets.token_hex(32)
        self._messages = Messages(self._key)
        self._sockets: dict[int, zmq.asyncio.Socket] = {}
        self._iopub: IOPub | None = None
        self._asked: dict[Cell, tuple[int, Request]] = {}
        """People's cells that have not ended, with the number of the socket and the request."""
        self._ended_at = -math.inf
        """When a person's cell ended last, by the monotonic clock."""
        self._parents: WeakKeyDictionary[Cell, _Parent] = WeakKeyDictionary()
        self._silent: WeakSet[Cell] = WeakSet()
        self._agent = secrets.token_hex(16)
        self._reported = session.notifications.number
        """Number of the last notice whose loss was reported to a person."""

    async def serve(self) -> None:
        """Answer clients until the session has ended, after `open`."""
        watchers = self.session.queue.watchers
        watchers.append(self)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._echo)
                tasks.start_soon(self._serve, SHELL, tasks)
                tasks.start_soon(self._serve, CONTROL, tasks)
                await self.session.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            watchers.remove(self)
            self._status("dead", _Parent({}))
            self.close()

    def close(self) -> None:
        """Remove sockets and files."""
        if self._iopub is not None:
            self._iopub.close(LINGER_MS)
        for each in self._sockets.values():
            each.close(linger=LINGER_MS)
        for number in range(SHELL, HEARTBEAT + 1):
            Path(f"{self._place}-{number}").unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)

    def open(self) -> None:
        """Create the sockets and the connection file. Raises OSError, ZMQError."""
        for number in (SHELL, STDIN, CONTROL, HEARTBEAT):
            each = self._sockets[number] = self._context.socket(zmq.ROUTER)
            each.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
            each.setsockopt(zmq.ROUTER_HANDOVER, 1)
            each.bind(f"ipc://{self._place}-{number}")
        self._iopub = IOPub(
            zmq.Context(self._context),
            f"ipc://{self._place}-{IOPUB}",
            self._messages,
            self.session.handle,
            self._tell_state,
        )
        facts = {
            "transport": "ipc",
            "ip": str(self._place),
            "shell_port": SHELL,
            "iopub_port": IOPUB,
            "stdin_port": STDIN,
            "control_port": CONTROL,
            "hb_port": HEARTBEAT,
            "key": self._key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": "python3",
            "jupyter_session": self.session.name or self.session.handle,
        }
        self.file.touch(mode=0o600)
        self.file.write_text(json.dumps(facts, indent=2), encoding="utf-8")

    async def record(self) -> dict[str, Any]:
        """Return the session's last cells as notebook cells, without active content. Reads files.

        `left_out` is the number of the others, `seen` that of the last message about these cells.
        """
        cells = self.session.cells
        begun = begun_of(cells)
        if self._iopub is not None:
            self._iopub.flush()
        seen = self._messages.sent
        going = {cell.number: as_json(cell) for cell in begun if not cell.finished.is_set()}
        found = await anyio.to_thread.run_sync(last_of, begun, going)
        if (verified := self.session.verified) is not None:
            found = [marked(each, verified) for each in found]
        return {
            "cells": found,
            "left_out": len(cells) - len(found),
            "seen": seen,
        }

    # Events of cells.

    def begun(self, cell: Cell) -> None:
        """See `Watcher`."""
        with self._barrier():
            self._status("busy", self._parent(cell))
            if cell not in self._silent:
                said = {"code": cell.code, "execution_count": cell.number}
                self._publish("execute_input", said, self._parent(cell))

    def shown(self, cell: Cell, event: Event) -> None:
        """See `Watcher`."""
        if cell not in self._silent:
            with self._barrier():
                event = plain(event) if self._plain else event
                self._publish(*shown(event, cell.number), self._parent(cell))

    def ended(self, cell: Cell) -> None:
        """See `Watcher`."""
        with self._barrier():
            parent, asked = self._parent(cell), self._asked.pop(cell, None)
            if cell.started is None:
                self._status("busy", parent)
            elif cell not in self._silent:
                self._remark(cell, parent)
            if asked is not None:
                self._ended_at = time.monotonic()
                self._reply(*asked, self._outcome(cell, asked[1]))
            self._status("idle", parent)
            if asked is not None and cell.status is not Status.OK:
                self._give_up_after(asked[1])

    def _remark(self, cell: Cell, parent: _Parent) -> None:
        """Publish, as text on stderr, the notices that a tool's answer has beside the output."""
        said = list(cell.notices)
        if cell.author == PERSON:
            losses = self.session.notifications.losses_after(self._reported)
            self._reported = self.session.notifications.number
            said = [*(each.text for each in losses), *said]
        cause = (cell.outcome.cause if cell.outcome is not None else None) or cell.status.value
        if cell.status in _STOPPED:
            said.append(f"{cell.status.value}: {cause}")
        for text in said:
            words = {"name": "stderr", "text": f"{notice(visible(text))}\n"}
            self._publish("stream", words, parent)
        if cell.status in _STOPPED and not cell.log.failures:
            self._publish("error", failure(cell.status.value.title(), cause), parent)

    def _outcome(self, cell: Cell, request: Request) -> dict[str, Any]:
        """Return the content of the execute reply for a cell that has ended."""
        if cell.started is None:
            return {"status": "aborted"}
        count = {"execution_count": cell.number}
        if cell.status is Status.OK:
            return {"status": "ok", **count, **_besides(request)}
        cause = (cell.outcome.cause if cell.outcome is not None else None) or cell.status.value
        last = next(iter(cell.log.failures[-1:]), None)
        how = (
            failure(cell.status.value.title(), cause)
            if last is None
            else failure(last.name, last.value, last.traceback)
        )
        return {"status": "error", **count, **how}

    def _give_up_after(self, failed: Request) -> None:
        """Withdraw the cells that the same client has queued behind one that failed."""
        if failed.content.get("stop_on_error") is False:
            return
        for cell, (_, request) in list(self._asked.items()):
            if request.client == failed.client:
                self.session.queue.withdraw("a cell before it failed", cell)

    def _parent(self, cell: Cell) -> _Parent:
        """Return the request of a cell; one is made up for a cell of the agent."""
        found = self._parents.get(cell)
        if found is None:
            name = f"{self._agent}_{cell.number}"
            head = header("execute_request", name, self._agent, username=cell.author or "agent")
            found = self._parents[cell] = _Parent(head, _about(cell, written=False))
        return found

    # Requests of clients.

    async def _serve(self, number: int, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            frames = await self._sockets[number].recv_multipart()
            with self._barrier():
                try:
                    request = self._messages.read(frames)
                except WireError:
                    continue  # not signed with the key in the connection file
                await self._take(number, request, tasks)

    async def _take(self, number: int, request: Request, tasks: anyio.abc.TaskGroup) -> None:
        if request.kind == "execute_request":
            self._execute(number, request)
            return
        answers: dict[str, Callable[[Request], Any]] = {
            "kernel_info_request": self._info,
            "interrupt_request": self._interrupt,
            "complete_request": self._complete,
            "inspect_request": self._inspect,
            "is_complete_request": self._is_complete,
            "history_request": self._history,
            "comm_info_request": self._comms,
            "shutdown_request": self._refuse,
        }
        if request.kind in answers or request.kind.endswith("_request"):
            tasks.start_soon(self._answer, number, request, answers.get(request.kind, self._lacks))

    async def _answer(
        self, number: int, request: Request, answer: Callable[[Request], Any]
    ) -> None:
        self._status("busy", _Parent(request.header))
        try:
            with self._barrier() as barrier:
                self._reply(number, request, await answer(request))
            if barrier.failure is not None:
                said = failure(type(barrier.failure).__name__, str(barrier.failure))
                self._reply(number, request, {"status": "error", **said})
        finally:
            self._status("idle", _Parent(request.header))

    def _execute(self, number: int, request: Request) -> None:
        code = request.content.get("code")
        problem = ""
        if not isinstance(code, str):
            problem = "the code is not text"
        elif len(code) > MOST_CODE_CHARS:
            problem = f"the code has {len(code):,} characters; a cell takes {MOST_CODE_CHARS:,}"
        elif code.strip() and (self._plain or code.strip() not in LEAVING):
            try:
                cell = self.session.submit(code, self.session.timeout_s, author=PERSON)
            except KernelMcpError as error:
                problem = str(error)
            else:
                self._asked[cell] = number, request
                written = "cellId" in request.metadata  # JupyterLab puts the outputs there
                self._parents[cell] = _Parent(request.header, _about(cell, written=written))
                if request.content.get("silent") is True:
                    self._silent.add(cell)
                return
        said: dict[str, Any] = {"status": "ok", **_besides(request)}
        if problem:
            said = {"status": "error", **failure("InputError", problem)}
        elif str(code).strip():
            said["payload"] = [_LEAVE]
        self._status("busy", _Parent(request.header))
        self._reply(number, request, {**said, "execution_count": len(self.session.cells)})
        self._status("idle", _Parent(request.header))

    async def _info(self, _: Request) -> dict[str, Any]:
        kernel = self.session.kernel
        language = {
            "name": "python",
            "version": kernel.environment.version if kernel is not None else "3",
            "mimetype": "text/x-python",
            "file_extension": ".py",
            "pygments_lexer": "ipython3",
            "codemirror_mode": {"name": "ipython", "version": 3},
            "nbconvert_exporter": "python",
        }
        name = self.session.name or self.session.handle
        return {
            "status": "ok",
            "protocol_version": PROTOCOL_VERSION,
            "implementation": "kernel-mcp",
            "implementation_version": __version__,
            "language_info": language,
            "banner": f"Session {name} of kernel-mcp, which an agent works in, too",
            "help_links": [],
        }

    async def _interrupt(self, request: Request) -> dict[str, Any]:
        """Stop the cells of people that run or wait; the agent's cell only if there are none.

        Shortly after a person's cell has ended nothing is stopped: the interrupt was meant for it.
        """
        queue, own = self.session.queue, list(self._asked)
        running = queue.current
        for cell in own:
            queue.withdraw("a person stopped it before it began", cell)
        if running is not None and not own and time.monotonic() - self._ended_at < MEANT_S:
            said = TOO_LATE.format(number=running.number)
            words = {"name": "stderr", "text": f"{notice(said)}\n"}
            self._publish("stream", words, _Parent(request.header))
        elif running is not None and (running in own or not own):
            if not own:
                running.notice("A person has stopped this cell")
            await self.session.scheduler.interrupt(running)
        return {"status": "ok"}

    async def _complete(self, request: Request) -> dict[str, Any]:
        place = request.content.get("cursor_pos")
        nothing: dict[str, Any] = {
            "matches": [],
            "cursor_start": place,
            "cursor_end": place,
            "metadata": {},
        }
        return await self._of_kernel(request, {"status": "ok", **nothing})

    async def _inspect(self, request: Request) -> dict[str, Any]:
        return await self._of_kernel(
            request, {"status": "ok", "found": False, "data": {}, "metadata": {}}
        )

    async def _is_complete(self, request: Request) -> dict[str, Any]:
        return await self._of_kernel(request, {"status": "unknown"})

    async def _of_kernel(self, request: Request, otherwise: dict[str, Any]) -> dict[str, Any]:
        """Return the kernel's reply; `otherwise` while it is in use, or there is none."""
        found = await inquire(self.session, request.kind, request.content)
        if found is None or found.get("status") in ("error", "aborted"):
            return otherwise
        return plain_reply(request.kind, found) if self._plain else found

    async def _history(self, request: Request) -> dict[str, Any]:
        found = await anyio.to_thread.run_sync(history_of, self.session.cells, request.content)
        return {"status": "ok", "history": found}

    async def _comms(self, _: Request) -> dict[str, Any]:
        return {"status": "ok", "comms": {}}

    async def _refuse(self, request: Request) -> dict[str, Any]:
        words = f"{_NOT_HERE}. Ask its agent for reset or close_session."
        restart = {"restart": request.content.get("restart") is True}
        return {"status": "error", **restart, **failure("Refused", words)}

    async def _lacks(self, request: Request) -> dict[str, Any]:
        words = f"a session does not support {request.kind}"
        return {"status": "error", **failure("NotImplementedError", words)}

    # Sockets.

    async def _echo(self) -> None:
        """Answer heartbeats."""
        socket = self._sockets[HEARTBEAT]
        while True:
            await socket.send_multipart(await socket.recv_multipart())

    def _tell_state(self) -> None:
        """Publish the status of the running cell, for a client that has just subscribed."""
        if (cell := self.session.queue.current) is not None:
            self._status("busy", self._parent(cell))

    def _status(self, state: str, parent: _Parent) -> None:
        self._publish("status", {"execution_state": state}, parent)

    def _publish(self, kind: str, content: dict[str, Any], parent: _Parent) -> None:
        if self._iopub is not None:
            self._iopub.add(kind, content, parent.header, parent.about)

    def _reply(self, number: int, request: Request, content: Mapping[str, Any]) -> None:
        """Send a reply without waiting for the client, after everything published before."""
        if self._iopub is not None:
            self._iopub.flush()
        kind = f"{request.kind.removesuffix('_request')}_reply"
        frames = self._messages.write(kind, content, request.header, request.identities)
        sent = self._sockets[number].send_multipart(frames, flags=zmq.NOBLOCK)
        asyncio.ensure_future(sent).add_done_callback(_seen)

    def _barrier(self) -> Barrier:
        return Barrier("serving the front of a session", self.session.handle)


def _besides(request: Request) -> dict[str, Any]:
    """Return payloads and user expressions for an execute reply: no expression is evaluated."""
    asked = request.content.get("user_expressions")
    refusal = {"status": "error", **failure("NotEvaluated", NOT_EVALUATED)}
    names = asked if isinstance(asked, dict) else ()
    return {"payload": [], "user_expressions": dict.fromkeys(names, refusal)}


def _about(cell: Cell, *, written: bool) -> dict[str, Any]:
    """Return metadata for messages; `written` is True if the client stores the outputs itself."""
    return {"kernel-mcp": {"cell": cell.number, "written": written}}


def _seen(sent: asyncio.Future[Any]) -> None:
    """Retrieve the error of a message that could not be sent, as when an endpoint closes."""
    if not sent.cancelled():
        sent.exception()
