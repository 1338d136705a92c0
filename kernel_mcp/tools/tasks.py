"""Calls that outlive their requests, as MCP tasks (SEP-2663).

A call becomes a task if its client declares tasks on that request and the call has not ended after
`GRACE_S`. A task of `execute` or `wait` follows a cell. Its id names session and cell, so each
server that has the session can answer it: also after a restart, and behind each front of a fleet.
Tasks of other tools are jobs. A task whose code asks the person something requires input.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, cast
from urllib.parse import quote

import anyio
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolRequestParams,
    CallToolResult,
    RequestParams,
    TextContent,
)

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.output.text import PREFIX
from kernel_mcp.sessions.cell import FOLLOWED_S, Phase, Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.sessions.questions import Answer, Question
from kernel_mcp.tools.asking import Putter, answer_of, owner_of, question_in
from kernel_mcp.tools.calls import LASTING_KEY, OF_VIEW, Call
from kernel_mcp.tools.cells import MAX_SECONDS
from kernel_mcp.tools.jobs import (
    IDENTIFIER,
    IN_MEMORY,
    VERSIONS,
    Job,
    Jobs,
    declared,
    deliver,
    last_line,
)
from kernel_mcp.tools.results import CELL_KEY, refusal
from kernel_mcp.tools.task_ids import CellTask, sealed
from kernel_mcp.units import limit_duration

OF_CELLS = frozenset({"execute", "wait"})
GRACE_S = 5.0
"""Seconds until a call becomes a task, if its argument `wait` is not shorter."""
POLLS = ((15.0, 1000), (60.0, 2000))
"""Ages in seconds, and milliseconds between two polls up to them."""
SLOWEST_POLL_MS = 5000
MOST_FOLLOWED = 1000
UNKNOWN = "Task not found: it is unknown, or of another principal or server."
SESSION_GONE = (
    "The cell of this task is not there: its session was closed, has expired, is used by another "
    "server, or the server ended before the cell began."
)
JOB_GONE = (
    "{} has no result: the server was started again before its end, or the result was kept for an "
    "hour and is gone. What it does may have been done in part. Call it again if it is needed."
)
CANCELLED = {
    "run_cells": "cancelled: the next answer of the session names the cells that have ended",
    "run_script": "cancelled: the next answer of the default session names what it has put out",
    "install": "cancelled: list_packages shows what is installed",
    "verify": "cancelled: nothing was changed",
}
"""Where to find what a cancelled call has done, by tool; a task without a result says this."""
_DOING = {
    Phase.QUEUE: "waiting for other cells",
    Phase.START: "the kernel is starting",
    Phase.INSTALL: "packages are being installed",
}


class TaskParams(RequestParams):
    """Parameters of `tasks/get` and `tasks/cancel`."""

    task_id: str


class UpdateParams(TaskParams):
    """Parameters of `tasks/update`."""

    input_responses: dict[str, Any]


class Tasks(Extension):
    """Answers calls by tasks, and the methods of tasks."""

    identifier = IDENTIFIER

    def __init__(
        self,
        jobs: Jobs,
        caller: Callable[[Context[Any, Any]], Caller],
        putter: Putter,
        *,
        alone: bool = True,
    ) -> None:
        """Unless it is `alone`, polls may reach another server, which has none of the `jobs`."""
        self._calls = jobs.calls
        self._tools = OF_CELLS | IN_MEMORY if alone else OF_CELLS
        self._jobs = jobs
        self._putter = putter
        self._caller = caller
        self._polled: dict[tuple[str, str, int], tuple[float, frozenset[object]]] = {}
        """Time of the last poll, and names of the session, by principal, session and cell."""

    def methods(self) -> Sequence[MethodBinding]:
        """See `Extension`."""
        return [
            MethodBinding("tasks/get", TaskParams, self._get, VERSIONS),
            MethodBinding("tasks/update", UpdateParams, self._update, VERSIONS),
            MethodBinding("tasks/cancel", TaskParams, self._cancel, VERSIONS),
        ]

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        """Answer a call by its result, or by a task if it takes long."""
        of_tasks = params.name in self._tools and declared(ctx)
        if not of_tasks or OF_VIEW in (ctx.meta or {}):
            return await call_next(ctx)
        caller = self._caller_of(ctx)
        arguments, grace_s = _shortened(params.arguments or {})
        if params.name in IN_MEMORY:
            if not self._jobs.has_room(caller.principal):
                return await call_next(ctx)
            return await self._start_job(params.name, arguments, caller, ctx, grace_s)
        if params.name == "wait" and self._is_followed(caller.principal, arguments):
            return await call_next(ctx)  # its end is delivered anyway
        key, receipt = await self._jobs.key(), PendingReceipt()
        if grace_s is not None:
            arguments["wait"] = grace_s
        answer = await self._ask(params.name, arguments, caller, receipt, ctx)
        outcome, lasting = _outcome(answer), (answer.meta or {}).pop(LASTING_KEY, "")
        question_in(answer)  # the first poll puts it
        if outcome is None or not _is_running(outcome):
            deliver(receipt, caller)
            return answer
        receipt.lose()
        task = CellTask(str(outcome["session"]), lasting, int(outcome["cell"]), _now_ms())
        self._note_poll(caller.principal, task, arguments.get("session", ""))
        return {
            "resultType": "task",
            **_fields(task.id(key, caller.principal), "working", task.created, _doing(answer)),
        }

    async def _start_job(
        self,
        tool: str,
        arguments: dict[str, Any],
        caller: Caller,
        ctx: ServerRequestContext[Any, Any],
        grace_s: float | None,
    ) -> HandlerResult:
        if tool in ("run_cells", "verify") and grace_s is not None:
            arguments["wait"] = MAX_SECONDS
        call = Call(caller, request_id=str(ctx.request_id), task=True, asks=self._putter.modes(ctx))
        job = await self._jobs.begin(tool, arguments, call)
        try:
            with anyio.move_on_after(GRACE_S if grace_s is None else grace_s):
                await job.settle(until_asked=True)
        except anyio.get_cancelled_exc_class():
            self._jobs.cancel(job)
            raise
        if job.answer is None:
            return {"resultType": "task", **_job_fields(job)}
        self._jobs.drop(job)
        deliver(job.receipt, caller)
        return job.answer

    # Cells.

    async def _ask(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        caller: Caller,
        receipt: PendingReceipt,
        ctx: ServerRequestContext[Any, Any],
        given: Answer | None = None,
    ) -> CallToolResult:
        """Call a tool for a task. What its answer reports is confirmed by `receipt`."""
        own = replace(caller, response=ResponseContext(receipt))
        modes = self._putter.modes(ctx)
        call = Call(own, None, str(ctx.request_id), task=True, asks=modes, answer=given)
        return await self._calls.call(tool, arguments, call)

    async def _state(
        self, name: str, task: CellTask, caller: Caller, ctx: ServerRequestContext[Any, Any]
    ) -> dict[str, Any]:
        """Return the state of the task of a cell."""
        arguments = {"session": task.session, "cell": task.cell, "wait": 0}
        for _ in range(2):
            receipt = PendingReceipt()
            answer = await self._ask("wait", arguments, caller, receipt, ctx)
            (answer.meta or {}).pop(LASTING_KEY, "")
            outcome, question = _outcome(answer), question_in(answer)
            if outcome is None:
                receipt.lose()
                if await self._restored(task, caller):
                    continue
                break
            self._note_poll(caller.principal, task)
            if _is_running(outcome):
                receipt.lose()
                state = _fields(name, "working", task.created, _doing(answer))
                if question is not None:
                    place = (self._calls, caller, task.session, task.cell)
                    state |= _asking(question, await self._putter.of_cell(*place, question))
                return state
            self._putter.close(owner_of(caller, task.session, task.cell))
            self._polled.pop((caller.principal, task.session, task.cell), None)
            deliver(receipt, caller)
            return _fields(name, "completed", task.created, "", answer)
        gone = refusal(KernelMcpError(SESSION_GONE))
        return _fields(name, "completed", task.created, "", gone)

    async def _restored(self, task: CellTask, caller: Caller) -> bool:
        """Restore the session of a task if it is persisted; return True if it is the same one."""
        if not task.lasting:
            return False
        try:
            record, _ = await self._calls.read(
                f"kernel://{quote(task.lasting)}/cells/{task.cell}.json", caller
            )
            return bool(json.loads(record)["session"] == task.session)
        except KernelMcpError:
            return False

    def _note_poll(self, principal: str, task: CellTask, named: object = None) -> None:
        """Note that a client follows a task, whose session was `named` so by its call."""
        key = (principal, task.session, task.cell)
        _, names = self._polled.pop(key, (0.0, frozenset[object]()))
        names |= {task.session, task.lasting or task.session, named}
        self._polled[key] = (time.monotonic(), names)
        if len(self._polled) > MOST_FOLLOWED:
            del self._polled[next(iter(self._polled))]

    def _is_followed(self, principal: str, arguments: Mapping[str, Any]) -> bool:
        """Return True if a client of the principal follows a task of the cell that is named."""
        cell, since = arguments.get("cell", 0), time.monotonic() - FOLLOWED_S
        session = arguments.get("session", "")
        if not isinstance(session, str):
            return False
        return any(
            owner == principal and cell in (0, number) and session in names and polled > since
            for (owner, _, number), (polled, names) in self._polled.items()
        )

    # Methods.

    async def _get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        caller = self._asking(ctx)
        if (job := self._jobs.find(params.task_id, caller.principal)) is not None:
            if job.answer is not None:
                self._putter.close(job.id)
                deliver(job.receipt, caller)
            state = _job_fields(job)
            if (question := job.question) is not None and self._putter.modes(ctx):
                give = partial(job.give, question.key)
                put = await self._putter.request(job.principal, job.id, question, give)
                state |= _asking(question, put)
            return {"resultType": "complete", **state}
        task = await self._lasting_task(params.task_id, caller)
        if isinstance(task, CellTask):
            state = await self._state(params.task_id, task, caller, ctx)
        else:
            gone = refusal(KernelMcpError(JOB_GONE.format(task)))
            state = _fields(params.task_id, "completed", _now_ms(), "", gone)
        return {"resultType": "complete", **state}

    async def _update(
        self, ctx: ServerRequestContext[Any, Any], params: UpdateParams
    ) -> HandlerResult:
        """Hand answers to the code that asked; those to no open question are dropped."""
        caller = self._asking(ctx)
        job = self._jobs.find(params.task_id, caller.principal)
        task = None if job is not None else await self._lasting_task(params.task_id, caller)
        for key, response in params.input_responses.items():
            answer = answer_of(key, response)
            if job is not None:
                job.take(answer)
            elif isinstance(task, CellTask) and key.startswith(f"{task.cell}-"):
                receipt = PendingReceipt()
                arguments = {"session": task.session, "cell": task.cell, "wait": 0}
                await self._ask("wait", arguments, caller, receipt, ctx, answer)
                receipt.lose()
        return {"resultType": "complete"}

    async def _cancel(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        caller = self._asking(ctx)
        job = self._jobs.find(params.task_id, caller.principal)
        if job is not None:
            job.scope.cancel()
            return {"resultType": "complete"}
        task = await self._lasting_task(params.task_id, caller)
        if isinstance(task, CellTask):
            receipt = PendingReceipt()
            arguments = {"session": task.session, "cell": task.cell}
            await self._ask("interrupt", arguments, caller, receipt, ctx)
            receipt.lose()
        return {"resultType": "complete"}

    async def _lasting_task(self, name: str, caller: Caller) -> CellTask | str:
        """Return the cell of a task that is not in memory, or the tool of one that was.

        Raises MCPError for an id that was not made for this caller.
        """
        key = await self._jobs.key()
        if (found := CellTask.of(name, key, caller.principal)) is not None:
            return found
        tool, _, rest = name.partition(":")
        again = sealed(key, caller.principal, (tool, rest.partition(":")[0]))
        if tool not in IN_MEMORY or not hmac.compare_digest(again.encode(), name.encode()):
            raise MCPError(INVALID_PARAMS, UNKNOWN)
        return tool

    def _asking(self, ctx: ServerRequestContext[Any, Any]) -> Caller:
        """Return the caller of a method of tasks. Raises MCPError unless it declares tasks."""
        if not declared(ctx):
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                f"This method is for clients that declare {IDENTIFIER} on the request.",
                {"requiredCapabilities": {"extensions": {IDENTIFIER: {}}}},
            )
        return self._caller_of(ctx)

    def _caller_of(self, ctx: ServerRequestContext[Any, Any]) -> Caller:
        return self._caller(Context(request_context=ctx, mcp_server=cast(Any, None)))


def _shortened(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Return a copy of arguments, and the seconds until the call becomes a task.

    They are None if the argument `wait` is malformed, which its tool refuses.
    """
    wait = arguments.get("wait")
    try:
        seconds = GRACE_S if wait is None else limit_duration(wait)
    except ValueError:
        return dict(arguments), None
    return dict(arguments), min(seconds, GRACE_S) if seconds >= 0 else None


def _outcome(answer: CallToolResult) -> Mapping[str, Any] | None:
    """Return the outcome of the cell that an answer is about; None for another answer."""
    found = (answer.meta or {}).get(CELL_KEY)
    return found if isinstance(found, Mapping) else None


def _is_running(outcome: Mapping[str, Any]) -> bool:
    return outcome.get("status") in (Status.QUEUED.value, Status.RUNNING.value)


def _doing(answer: CallToolResult) -> str:
    """Return the last line of output in an answer about a running cell, else what it waits for."""
    texts = [each.text for each in answer.content if isinstance(each, TextContent)]
    lines = [last_line(text) for text in texts if not text.startswith(PREFIX)]
    phase = (_outcome(answer) or {}).get("phase", "")
    return next(filter(None, reversed(lines)), "") or _DOING.get(phase, "")


def _asking(question: Question, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a task that requires input which differ from one that works."""
    return {"status": "input_required", "inputRequests": {question.key: request}}


def _job_fields(job: Job) -> dict[str, Any]:
    """Return the state of a job as the fields of a task."""
    if not job.done.is_set():
        return _fields(job.id, "working", job.created, job.message)
    if job.answer is None:
        return _fields(job.id, "cancelled", job.created, CANCELLED[job.tool])
    return _fields(job.id, "completed", job.created, "", job.answer)


def _fields(
    name: str,
    status: str,
    created: int,
    message: str,
    answer: CallToolResult | None = None,
) -> dict[str, Any]:
    """Return the fields of a task, as they are sent to clients."""
    now = _now_ms()
    age_s = (now - created) / 1000
    found: dict[str, Any] = {
        "taskId": name,
        "status": status,
        "createdAt": _iso(created),
        "lastUpdatedAt": _iso(now),
        "ttlMs": None,
        "pollIntervalMs": next((ms for most, ms in POLLS if age_s < most), SLOWEST_POLL_MS),
    }
    if message:
        found["statusMessage"] = message
    if answer is not None:
        found["result"] = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _iso(milliseconds: int) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
