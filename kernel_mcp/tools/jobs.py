"""Calls of tools that go on without the requests that began them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
from mcp.server.context import ServerRequestContext
from mcp_types import CallToolResult

from kernel_mcp.barriers import Barrier, explained, log_failure
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.sessions.questions import Answer, Question
from kernel_mcp.tools.calls import Call, SessionCalls
from kernel_mcp.tools.results import refusal
from kernel_mcp.tools.task_ids import sealed

IDENTIFIER = "io.modelcontextprotocol/tasks"
VERSIONS = frozenset({"2026-07-28"})
"""Protocol versions with this extension; the tasks of 2025-11-25 are another one."""
IN_MEMORY = frozenset({"run_cells", "run_script", "install", "verify"})
"""Tools whose calls are jobs; those of `execute` and `wait` are known by their cells."""
MOST_JOBS = 16
"""Jobs of one principal that run or whose results are kept."""
KEPT_S = 3600.0
STATUS_CHARS = 200
KEY_BYTES = 32


class Job:
    """A call in memory that may outlive its request. `receipt` is that of its answer."""

    def __init__(self, tool: str, principal: str, key: bytes) -> None:
        """`key` seals its id, by which later servers know that they do not have it."""
        self.id = sealed(key, principal, (tool, secrets.token_hex(8)))
        self.tool = tool
        self.principal = principal
        self.created = time.time_ns() // 1_000_000
        self.receipt = PendingReceipt()
        self.message = ""
        self.answer: CallToolResult | None = None
        self.done = anyio.Event()
        self.ended_at = 0.0
        self.scope = anyio.CancelScope()
        self.rounds = 0
        """Number of questions that its client was asked within one call."""
        self.question: Question | None = None
        """The open question, unless the client has opened its page."""
        self._open: Question | None = None
        self._asked = anyio.Event()
        self._response: Answer | None = None
        self._answered = anyio.Event()

    async def tell(self, text: str) -> None:
        """Set the status message to the last line of a progress report."""
        self.message = last_line(text) or self.message

    async def ask(self, question: Question) -> Answer:
        """Keep a question open until `take` has its answer, which is returned."""
        self.question = self._open = question
        self._response, self._answered = None, anyio.Event()
        self._asked.set()
        try:
            while self._response is None:
                await self._answered.wait()
            return self._response
        finally:
            self.question, self._open = None, None
            if self._asked.is_set():  # else a call waits for it already
                self._asked = anyio.Event()

    def take(self, answer: Answer) -> None:
        """Take an answer; one to no open question is dropped."""
        if self._open is None or self._open.key != answer.key:
            return
        self.question, self._asked = None, anyio.Event()
        if answer.settles(self._open):
            self._open, self._response = None, answer
            self._answered.set()

    async def give(self, key: str, value: str) -> bool:
        """Take what was typed on the page of a secret; return False if nothing waits for it."""
        waits = self._open is not None and self._open.key == key
        self.take(Answer(key, "accept", value, typed=True))
        return waits

    async def settle(self, *, until_asked: bool) -> None:
        """Wait for the end of the call, or also for a question of its code."""
        async with anyio.create_task_group() as tasks:

            async def wait_for(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait_for, self.done)
            if until_asked:
                tasks.start_soon(wait_for, self._asked)

    async def run(self, calls: SessionCalls, arguments: Mapping[str, Any], call: Call) -> None:
        """Call the tool. Raises nothing, and is not cancelled but by `scope`."""
        try:
            with self.scope:
                self.answer = await calls.call(self.tool, arguments, call)
        except Exception as error:  # noqa: BLE001  # logged, and told to the client
            log_failure(error, f"answering {self.tool}")
            self.answer = refusal(explained(error, f"answering {self.tool}"))
        finally:
            if self.answer is None:
                self.receipt.lose()
            self.ended_at = time.monotonic()
            self.done.set()


class Jobs:
    """The jobs of a server, with their results for `KEPT_S` after their end."""

    def __init__(self, calls: SessionCalls, key: Callable[[], bytes]) -> None:
        """`key` returns the secret that seals ids; it must be that of earlier servers."""
        self.calls = calls
        self._read_key = key
        self._known_key = b""
        self._jobs: dict[str, Job] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def key(self) -> bytes:
        """Return the key of ids, which is read once.

        If it cannot be read or made, as on a full disk, ids are valid until the server ends.
        """
        if not self._known_key:
            with Barrier("reading the key of tasks"):
                self._known_key = await anyio.to_thread.run_sync(self._read_key)
            self._known_key = self._known_key or secrets.token_bytes(KEY_BYTES)
        return self._known_key

    def has_room(self, principal: str) -> bool:
        """Return True if the principal may begin another; drops those that are no longer kept."""
        oldest = time.monotonic() - KEPT_S
        self._jobs = {
            name: job
            for name, job in self._jobs.items()
            if not job.done.is_set() or job.ended_at > oldest
        }
        return sum(job.principal == principal for job in self._jobs.values()) < MOST_JOBS

    async def begin(self, tool: str, arguments: Mapping[str, Any], call: Call) -> Job:
        """Begin a call in the background; its answer reports to the job's receipt."""
        job = Job(tool, call.caller.principal, await self.key())
        own = replace(call.caller, response=ResponseContext(job.receipt))
        call = replace(call, caller=own, progress=job.tell, ask=job.ask if call.asks else None)
        self._jobs[job.id] = job
        running = asyncio.get_running_loop().create_task(job.run(self.calls, arguments, call))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return job

    def find(self, name: str, principal: str) -> Job | None:
        """Return a job of the principal; None for none."""
        found = self._jobs.get(name)
        return found if found is not None and found.principal == principal else None

    def drop(self, job: Job) -> None:
        """Forget a job whose answer is given to the request that began it."""
        self._jobs.pop(job.id, None)

    def cancel(self, job: Job) -> None:
        """Give up a job, and forget it."""
        job.scope.cancel()
        self.drop(job)


def last_line(text: str) -> str:
    """Return the last line of `text` that is not blank, made safe and short; empty for none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1])[:STATUS_CHARS] if lines else ""


def declared(ctx: ServerRequestContext[Any, Any]) -> bool:
    """Return True if the client declares tasks on this request; nothing else counts."""
    found = ctx.session.client_capabilities
    return (
        ctx.protocol_version in VERSIONS
        and found is not None
        and IDENTIFIER in (found.extensions or {})
    )


def deliver(receipt: PendingReceipt, caller: Caller) -> None:
    """Confirm `receipt` once the answer to the caller's request was delivered."""
    caller.response.receipt.then(receipt.confirm, receipt.lose, receipt.cancel)
