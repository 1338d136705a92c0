"""What answers say besides what was asked for: the server's notices, told from all other text.

A notice is a content block of its own, and nothing else in an answer can look like one. The answer
of every tool carries what its session has to tell and no delivered answer has told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

from mcp_types import CallToolResult, ContentBlock, ResourceLink, TextContent
from pydantic import BaseModel

from kernel_mcp.errors import KernelMcpError, SessionGone
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import guarded, guarded_lines, notice, visible
from kernel_mcp.sessions.delivery import Receipt, RequestId
from kernel_mcp.sessions.losses import Loss, Notice, Reply
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.sessions.session import Session

CELL_KEY = "kernel-mcp/cell"
LOST_KEY = "kernel-mcp/lost"

M = TypeVar("M", bound=BaseModel)


class Post(Protocol):
    """A transport's word on which answers have been delivered."""

    def expect(self, request: RequestId | None) -> Receipt:
        """The receipt of the answer to a request that has come in."""


class Sessions(Protocol):
    """Finds the session that a call is about."""

    def find(self, caller: Caller, handle: str) -> Session | None:
        """The session, or None where there is none."""


class NoticeContent(TextContent):
    """A block that the server speaks in."""


def spoken(text: str) -> str:
    """A notice as a text of its own, for `said` and for the field `notices` of results."""
    return notice(visible(text))


def said(text: str) -> NoticeContent:
    """A notice as a content block."""
    return NoticeContent(text=spoken(text))


def say(text: str, meta: dict[str, Any] | None = None) -> CallToolResult:
    """A result that is one notice."""
    return CallToolResult(content=[said(text)], _meta=meta or None)


class Teller:
    """Finishes the answers of tools; `post` says which of them have been delivered."""

    def __init__(self, sessions: Sessions, post: Post) -> None:
        self._sessions = sessions
        self._post = post

    def caller(self, request: RequestId | None) -> Caller:
        """Who calls: on stdio one process is one client."""
        return Caller(reply=Reply(self._post.expect(request)))

    def finish(
        self, caller: Caller, handle: str, result: BaseModel, *, about: bool = True
    ) -> BaseModel:
        """`result` with what the session has to tell, and everything else guarded.

        Where the result is not `about` that session its notices say whose they are.
        """
        session = self._sessions.find(caller, handle)
        pending: tuple[Notice, ...] = ()
        if session is not None:
            pending = tuple(n for n in session.ledger.pending if not caller.reply.carries(n))
            caller.reply.carry(session.ledger, pending)
        if isinstance(result, CallToolResult):
            result = _guarded_result(result)
        else:
            result = _guarded_model(result)
        if session is None or not pending:
            return result
        return _with(result, session, pending, about=about)

    def refusal(
        self, caller: Caller, handle: str, error: KernelMcpError, *, about: bool = True
    ) -> BaseModel:
        """The answer that an error is."""
        text = _guarded(clean(str(error)))
        result = CallToolResult(content=[TextContent(text=text)], is_error=True)
        if isinstance(error, SessionGone):
            loss = Loss("the session has ended", error.lost, error.more)
            result.meta = {LOST_KEY: lost_meta(handle, [loss])}
        return self.finish(caller, handle, result, about=about)


def with_notices(content: Sequence[ContentBlock], texts: Iterable[str]) -> list[ContentBlock]:
    """`content` with notices behind what is shown, before links to more of it."""
    place = next((i for i, block in enumerate(content) if isinstance(block, ResourceLink)), None)
    place = len(content) if place is None else place
    return [*content[:place], *map(said, texts), *content[place:]]


def _with(
    result: BaseModel, session: Session, pending: Sequence[Notice], *, about: bool
) -> CallToolResult:
    whose = "" if about else f"Session {session.handle}: "
    texts = [f"{whose}{each.text}" for each in pending]
    losses = [each.loss for each in pending if each.loss is not None]
    if not isinstance(result, CallToolResult):
        if "notices" in type(result).model_fields:
            result = result.model_copy(update={"notices": [spoken(text) for text in texts]})
        result = CallToolResult(
            content=[TextContent(text=result.model_dump_json(indent=2))],
            structured_content=result.model_dump(mode="json"),
        )
    elif (structured := result.structured_content) is not None and "notices" in structured:
        told = [*structured["notices"], *map(spoken, texts)]
        result = result.model_copy(update={"structured_content": {**structured, "notices": told}})
    meta = dict(result.meta or {})
    key = CELL_KEY if about and CELL_KEY in meta else LOST_KEY
    if losses:
        before = cast(dict[str, Any], meta[key]) if key in meta else lost_meta(session.handle, [])
        meta[key] = _marked(before, losses)
    content = with_notices(result.content, texts)
    return result.model_copy(update={"content": content, "meta": meta or None})


def lost_meta(handle: str, losses: Sequence[Loss]) -> dict[str, Any]:
    """The machine-readable part of an answer that is not about a cell."""
    return {
        "session": handle,
        "lost": names_of(losses),
        "lost_omitted": sum(loss.more for loss in losses),
        "state_kept": not losses,
        "cause": losses[0].cause if losses else None,
    }


def _marked(outcome: dict[str, Any], losses: Sequence[Loss]) -> dict[str, Any]:
    """The outcome of a cell, or what stands for it, with losses that came after it began."""
    return {
        **outcome,
        "state_kept": False,
        "lost": list(dict.fromkeys([*outcome["lost"], *names_of(losses)])),
        "lost_omitted": outcome["lost_omitted"] + sum(loss.more for loss in losses),
        "cause": outcome["cause"] or losses[0].cause,
    }


def names_of(losses: Iterable[Loss]) -> list[str]:
    """The names of all that was lost, each once."""
    return list(dict.fromkeys(guarded(name) for loss in losses for name in loss.names))


def _guarded_result(result: CallToolResult) -> CallToolResult:
    content = [_guarded_block(block) for block in result.content]
    structured = result.structured_content
    if structured is not None:
        structured = _guarded_value(structured)
    return result.model_copy(update={"content": content, "structured_content": structured})


def _guarded_block(block: ContentBlock) -> ContentBlock:
    if isinstance(block, TextContent) and not isinstance(block, NoticeContent):
        text = guarded_lines(visible(block.text))
        return block if text is block.text else block.model_copy(update={"text": text})
    if isinstance(block, ResourceLink):
        return block.model_copy(update={"name": _guarded(block.name)})
    return block


def _guarded_model(model: M) -> M:
    text = model.model_dump_json()
    if _guarded(text) is text and not any(mark in text for mark in _ESCAPED_IN_JSON):
        return model
    return type(model).model_validate(_guarded_value(model.model_dump()))


_ESCAPED_IN_JSON = ("\\u00", "\\b", "\\f", "\\r")
"""How JSON writes control characters."""


def _guarded(text: str) -> str:
    """Text of others in which nothing is hidden, and nothing passes for a notice."""
    return guarded(visible(text))


def _guarded_value(value: Any) -> Any:
    """`value` of a result, guarded but for `notices`, which the server alone has written."""
    if isinstance(value, str):
        return _guarded(value)
    if isinstance(value, dict):
        return {
            key: each if key == "notices" else _guarded_value(each) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_guarded_value(each) for each in value]
    return value
