"""Questions of code to a person: how tools put them, and how clients are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.context import ServerRequestContext
from mcp_types import CallToolResult
from pydantic import BaseModel

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.settings import Settings
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import PendingReceipt, ResponseContext
from kernel_mcp.sessions.questions import Answer, Mode, Question, Questions
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.calls import ANSWERED_KEY, QUESTION_KEY, Call, SessionCalls
from kernel_mcp.tools.results import notice_block

if TYPE_CHECKING:
    from kernel_mcp.tools.answer_pages import Give, Pages

ACTIONS = ("accept", "decline", "cancel")
FIELD = "answer"
"""The only field of a form."""
SCHEMA = {
    "type": "object",
    "properties": {FIELD: {"type": "string", "title": "Answer"}},
    "required": [FIELD],
}


def schema_of(question: Question) -> dict[str, Any]:
    """Return the schema of a question's form."""
    if not question.choices:
        return SCHEMA
    answer = {"type": "string", "title": "Answer", "enum": [*question.choices]}
    return {**SCHEMA, "properties": {FIELD: answer}}


WAITS = "Cell {} waits until a person has answered a question of its code"


def may_ask(session: Session, cell: Cell, call: Call, settings: Settings) -> None:
    """Let the code of a cell ask the person, if the settings and the client of the call permit.

    To be called before the cell begins.
    """
    if settings.ask and call.asks:
        note = partial(session.events.note, "question")
        cell.questions = Questions(cell, settings.ask[0], call.asks, note)


async def followed(session: Session, cell: Cell, wait_s: float, call: Call) -> float:
    """Follow a cell for `wait_s` seconds, as `CellScheduler.follow`; return those that are left.

    A question of its code ends that, or is put to the person by `call.ask`; while that is open, the
    time rests.
    """
    follow, questions = session.scheduler.follow, cell.questions
    if questions is None or not call.asks:
        return await follow(cell, wait_s, call.progress)
    if call.ask is None:
        return await follow(cell, wait_s, call.progress, questions.ending)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_put, cell, questions, call)
        left_s = await follow(cell, wait_s, call.progress, questions.resting)
        tasks.cancel_scope.cancel()
    return left_s


async def _put(cell: Cell, questions: Questions, call: Call) -> None:
    """Put each question of a cell to the person, until the cell ends."""
    assert call.ask is not None
    changes = 0
    while not cell.finished.is_set():
        question = questions.open
        if question is None:
            changes = await cell.changed(changes)
            continue
        answer = Answer(question.key, "cancel")
        scope = anyio.CancelScope()
        with Barrier("asking the person"), questions.while_open(scope), scope:
            answer = await call.ask(question)
        questions.answer(answer)


def with_question(cell: Cell, call: Call, result: CallToolResult) -> CallToolResult:
    """Return an answer with the open question of its cell, or with a notice of it."""
    if cell.questions is None or cell.questions.open is None:
        return result
    question = cell.questions.to_put
    if question is None or not call.asks or call.ask is not None:
        result.content.append(notice_block(WAITS.format(cell.number)))
        return result
    meta = {**(result.meta or {}), QUESTION_KEY: asdict(question)}
    return result.model_copy(update={"meta": meta})


def question_in(result: CallToolResult) -> Question | None:
    """Remove the question from an answer, and return it; None for none."""
    row = (result.meta or {}).pop(QUESTION_KEY, None)
    return Question(**row) if isinstance(row, dict) else None


class Putter:
    """Turns questions into requests of the protocol, for the clients of one transport."""

    def __init__(self, pages: Callable[[], Pages] | None) -> None:
        """Secrets are asked for on the pages that `pages` makes; without it, they are not."""
        self._make = pages
        self._pages: Pages | None = None

    def modes(self, ctx: ServerRequestContext[Any, Any]) -> frozenset[Mode]:
        """Return the modes in which this client can be asked; an empty object means forms."""
        capabilities = ctx.session.client_capabilities
        found = capabilities.elicitation if capabilities is not None else None
        if found is None:
            return frozenset()
        modes: set[Mode] = {"form"} if found.form is not None or found.url is None else set()
        if found.url is not None and self._make is not None:
            modes.add("url")
        return frozenset(modes)

    async def request(
        self, principal: str, owner: str, question: Question, give: Give
    ) -> dict[str, Any]:
        """Return the request that puts a question to a principal, as JSON.

        `give` takes what is typed on the page of a secret, which `owner` and the key identify.
        """
        params: dict[str, Any] = {"message": question.words}
        if question.secret:
            from kernel_mcp.tools.answer_pages import Asked  # few sessions have a page

            if self._pages is None:
                assert self._make is not None  # other clients do not declare that mode
                self._pages = self._make()
            url = await self._pages.url_of(Asked(principal, owner), question, give)
            params |= {"mode": "url", "url": url}
        else:
            params |= {"mode": "form", "requestedSchema": schema_of(question)}
        return {"method": "elicitation/create", "params": params}

    async def of_cell(
        self, calls: SessionCalls, caller: Caller, session: str, cell: int, question: Question
    ) -> dict[str, Any]:
        """Return the request for a question of a cell; see `request`."""

        async def give(value: str) -> bool:
            own = replace(caller, response=ResponseContext(PendingReceipt()))
            answer = Answer(question.key, "accept", value, typed=True)
            call = Call(own, asks=frozenset({"form", "url"}), answer=answer)
            arguments = {"session": session, "cell": cell, "wait": 0}
            result = await calls.call("wait", arguments, call)
            return bool((result.meta or {}).get(ANSWERED_KEY))

        owner = owner_of(caller, session, cell)
        return await self.request(caller.principal, owner, question, give)

    def close(self, owner: str) -> None:
        """Remove the pages of an owner."""
        if self._pages is not None:
            self._pages.close(owner)


def owner_of(caller: Caller, session: str, cell: int) -> str:
    """Return the owner of the pages of a cell's questions."""
    return f"{caller.principal}/{session}/{cell}"


def answer_of(key: str, response: object) -> Answer:
    """Return the answer in a client's response, which may be anything."""
    if isinstance(response, BaseModel):
        response = response.model_dump()
    if not isinstance(response, Mapping):
        return Answer(key, "cancel")
    action, content = response.get("action"), response.get("content")
    value = content.get(FIELD) if isinstance(content, Mapping) else None
    if action not in ACTIONS:
        return Answer(key, "cancel")
    return Answer(key, action, "" if value is None else str(value))
