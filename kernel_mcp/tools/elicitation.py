"""Questions of code, put to clients that take no tasks.

2026-07-28       the answer to the call is the question; the client repeats the call with its
                 answer, which joins the cell or the job: code never runs twice
handshake era    a request to the client while its call is open
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp.server.request_state import InvalidRequestState, RequestStateSecurity
from mcp_types import CallToolResult, InputRequiredResult

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import InputError
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.sessions.questions import Answer, Question
from kernel_mcp.tools.asking import WAITS, Putter, answer_of, owner_of, question_in
from kernel_mcp.tools.calls import CONVERTED, Call
from kernel_mcp.tools.jobs import KEY_BYTES, VERSIONS, Job, Jobs, declared, deliver
from kernel_mcp.tools.results import CELL_KEY, notice_block, refusal

CELLS = frozenset({"execute", "wait"})
RUNS = frozenset({"run_cells", "run_script"})
"""Tools whose calls are jobs."""
STATE_S = 7 * 24 * 3600.0
"""Seconds for which the state of an asked client is valid: longer than a person may think."""
MOST_ROUNDS = 8
"""Questions of one call; the client of the SDK gives up after 10 (`input_required_max_rounds`)."""
ASKS_ON = WAITS + ": call wait, which has it asked"
GONE = (
    "The call that asked this has no result here: it has ended, or the server was started again. "
    "Look with wait what became of the cell before you run the code again."
)


class SealedState:
    """A codec for states that clients carry. The SDK's own, which encrypts, takes 1 MB."""

    def __init__(self, key: Callable[[], bytes]) -> None:
        """`key` is called once, at the first use; if it fails, states end with the server."""
        self._read_key = key
        self._key = b""

    def seal(self, payload: bytes) -> str:
        """Return the payload with its authentication code, as text."""
        return f"{base64.urlsafe_b64encode(payload).decode()}.{self._mac(payload)}"

    def unseal(self, token: str) -> bytes:
        """Return the payload. Raises InvalidRequestState."""
        text, _, mac = token.rpartition(".")
        try:
            payload = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestState("malformed") from error
        if not hmac.compare_digest(self._mac(payload).encode(), mac.encode()):
            raise InvalidRequestState("another server's, or changed")
        return payload

    def _mac(self, payload: bytes) -> str:
        if not self._key:
            with Barrier("reading the key of states"):
                self._key = self._read_key()
            self._key = self._key or secrets.token_bytes(KEY_BYTES)
        return hmac.new(self._key, b"state:" + payload, "sha256").hexdigest()


def state_security(key: Callable[[], bytes]) -> RequestStateSecurity:
    """Return the policy by which the SDK binds states to calls, principals and times."""
    return RequestStateSecurity(codec=SealedState(key), ttl=STATE_S)


class Elicitation:
    """Calls tools for clients without tasks, and puts the questions of their code."""

    def __init__(self, jobs: Jobs, putter: Putter, *, alone: bool = True) -> None:
        """`alone` as in `Tasks`."""
        self._tools = CELLS | RUNS if alone else CELLS
        self._jobs = jobs
        self._putter = putter

    async def call(
        self, tool: str, arguments: dict[str, Any], call: Call, context: Context[Any, Any]
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; return its answer, or the question of its code."""
        ctx = context.request_context
        modes = self._putter.modes(ctx)
        if tool not in self._tools or not modes or call.of_view or declared(ctx):
            return await self._jobs.calls.call(tool, arguments, call)
        if ctx.protocol_version not in VERSIONS:
            if CONVERTED in (context.headers or {}):  # it would see the question after its answer
                return await self._jobs.calls.call(tool, arguments, call)
            call = replace(call, asks=modes, ask=partial(self._put, context, call.caller.principal))
            return await self._jobs.calls.call(tool, arguments, call)
        call = replace(call, asks=modes)
        answers = [answer_of(key, each) for key, each in (context.input_responses or {}).items()]
        if tool in RUNS:
            return await self._job(tool, arguments, call, context.request_state, answers)
        return await self._cell(tool, arguments, call, context.request_state, answers)

    async def _cell(
        self,
        tool: str,
        arguments: dict[str, Any],
        call: Call,
        state: str | None,
        answers: list[Answer],
    ) -> CallToolResult | InputRequiredResult:
        caller, receipt, rounds = call.caller, PendingReceipt(), 0
        call = replace(call, caller=replace(caller, response=ResponseContext(receipt)))
        if state is not None:
            known = json.loads(state)
            rounds = int(known["rounds"])
            wait = {"wait": arguments["wait"]} if "wait" in arguments else {}
            call = replace(
                call,
                answer=next((each for each in answers if each.key == known["key"]), None),
                repeats=tool == "execute",
            )
            tool, arguments = "wait", {**wait, "session": known["session"], "cell": known["cell"]}
        answer = await self._jobs.calls.call(tool, arguments, call)
        question = question_in(answer)
        if question is None:
            if state is not None:
                self._putter.close(owner_of(caller, known["session"], known["cell"]))
            deliver(receipt, caller)
            return answer
        if rounds >= MOST_ROUNDS:
            answer.content.append(notice_block(ASKS_ON.format(question.cell)))
            deliver(receipt, caller)
            return answer
        receipt.lose()
        outcome: Mapping[str, Any] = (answer.meta or {})[CELL_KEY]
        session, cell = str(outcome["session"]), int(outcome["cell"])
        request = await self._putter.of_cell(self._jobs.calls, caller, session, cell, question)
        known = {"session": session, "cell": cell, "key": question.key, "rounds": rounds + 1}
        state = json.dumps(known)
        return _asking(question, request, state)

    async def _put(self, context: Context[Any, Any], principal: str, question: Question) -> Answer:
        """Put a question to a client of the handshake era, inside its call."""
        typed, came = [""], anyio.Event()

        async def give(value: str) -> bool:
            typed[0] = value
            came.set()
            return True

        owner = secrets.token_hex(8)  # clients over HTTP have the same request ids
        params = (await self._putter.request(principal, owner, question, give))["params"]
        session, message = context.session, params["message"]
        try:
            if "url" not in params:
                schema = params["requestedSchema"]
                result = await session.elicit_form(message, schema, context.request_id)
                return answer_of(question.key, result)
            result = await session.elicit_url(
                message, params["url"], f"{owner}, {question.key}", context.request_id
            )
            answer = answer_of(question.key, result)
            if answer.settles(question):
                return answer
            await came.wait()
            return replace(answer, value=typed[0], typed=True)
        finally:
            self._putter.close(owner)

    async def _job(
        self,
        tool: str,
        arguments: dict[str, Any],
        call: Call,
        state: str | None,
        answers: list[Answer],
    ) -> CallToolResult | InputRequiredResult:
        job: Job | None
        if state is not None:
            if (job := self._jobs.find(state, call.caller.principal)) is None:
                return refusal(InputError(GONE))
            for each in answers:
                job.take(each)
        elif not self._jobs.has_room(call.caller.principal):
            return await self._jobs.calls.call(tool, arguments, replace(call, asks=frozenset()))
        else:
            job = await self._jobs.begin(tool, arguments, call)
        try:
            await job.settle(until_asked=True)
            while job.rounds >= MOST_ROUNDS and job.question is not None:
                job.take(Answer(job.question.key, "cancel"))  # no other call can ask it
                await job.settle(until_asked=True)
        except anyio.get_cancelled_exc_class():
            self._jobs.cancel(job)
            raise
        job.rounds += 1
        if (question := job.question) is not None and not job.done.is_set():
            give = partial(job.give, question.key)
            request = await self._putter.request(job.principal, job.id, question, give)
            return _asking(question, request, job.id)
        self._jobs.drop(job)
        self._putter.close(job.id)
        deliver(job.receipt, call.caller)
        return job.answer if job.answer is not None else refusal(InputError(GONE))


def _asking(question: Question, request: Mapping[str, Any], state: str) -> InputRequiredResult:
    fields = {"inputRequests": {question.key: request}, "requestState": state}
    return InputRequiredResult.model_validate(fields)
