"""Answers for the model, made of cells, notices and errors.

A notice of the server is a content block of its own, and nothing else in an answer can look like
one. The answer of every tool carries the notices of its session that were not delivered yet.
"""

from __future__ import annotations

import json
import operator
import weakref
from collections.abc import Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from mcp_types import CallToolResult, ContentBlock, ImageContent, ResourceLink, TextContent
from pydantic import BaseModel

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import KernelMcpError, SessionGone
from kernel_mcp.output.items import Item
from kernel_mcp.output.outputs import OutputLog, Position
from kernel_mcp.output.render import (
    PICTURE_BYTES,
    STREAMS,
    Budget,
    Rendered,
    mime_types,
    render,
)
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Masks, cut, escaped, escaped_lines, notice, visible
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell, CellOutcome, Phase, Status
from kernel_mcp.sessions.notifications import Loss, Notice, ResponseContext
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.closing import closing_line, made_anew, place_in_mount

CELL_KEY = "kernel-mcp/cell"
LOST_KEY = "kernel-mcp/lost"
ERROR_CHARS = 10_000
"""An answer that is an error, links included: Claude Code 2.1.197 cuts the middle out of longer
ones (measured), and leaves out their pictures."""
FAILED_OUTPUT_CHARS = 7500
"""Characters of output in such an answer; the rest is for notices and links."""
_HANDLES = ("session", "status", "phase", "state")
"""Fields with which clients work, and which are never masked."""
_PROTOCOL_KEYS = (*_HANDLES, "cell_type", "output_type", "name", "mimetype")
"""The same fields of documents, notebooks among them."""
OMISSION_CHARS = 60
"""Characters for the line that replaces omitted text."""

M = TypeVar("M", bound=BaseModel)


class NoticeContent(TextContent):
    """A content block with a notice of the server."""


def notice_text(text: str) -> str:
    """Return a notice with its prefix, as in the field `notices` of results."""
    return notice(visible(text))


def notice_block(text: str) -> NoticeContent:
    """Return a notice as a content block."""
    return NoticeContent(text=notice_text(text))


def notice_result(text: str, meta: dict[str, Any] | None = None) -> CallToolResult:
    """Return an answer that is one notice."""
    return CallToolResult(content=[notice_block(text)], _meta=meta or None)


async def answer(
    session: Session,
    cell: Cell,
    response: ResponseContext,
    *,
    since: Position,
    settings: Settings,
    closing: str | None = None,
) -> CallToolResult:
    """Return the answer about a cell: its output after `since`, its notices, and its status.

    Output that other cells have put out since their end follows. `closing` is the sentence on the
    status, None for the usual one, empty for none. All of it counts as delivered once `response`
    is. It is an error if the cell has not ended well, unless there are pictures.
    """
    ended, unreported = cell.finished.is_set(), cell.unreported_losses
    if ended:
        await session.notebooks.save()
    items, position = cell.log.since(since), cell.log.position()
    if closing is None:
        closing = closing_line(session, cell, settings.max_timeout_s)
        mounted = bool(session.workspace.mounted)
        if cell.status is Status.ERROR and (mounted or cell.missing.isidentifier()):
            closing = await anyio.to_thread.run_sync(place_in_mount, session, cell) or closing
    remarks = len(cell.notices)
    notices = [*(each.text for each in unreported), *cell.notices, *([closing] if closing else [])]
    own = cell.caused_loss if cell.error is None else None
    included = [*unreported, *([own] if own is not None else [])]
    late = _late_outputs(session, response, but=cell)

    async def show(characters: int) -> tuple[Rendered, list[ContentBlock]]:
        after = await _show_late(late, session.handle, characters // 2)
        if cell.error is not None:
            return Rendered([TextContent(text=str(cell.error))], 0, mime_types(items)), after
        budget = Budget(characters - _length(after), PICTURE_BYTES // (2 if late else 1))
        silence = "(no output)" if ended else ""
        handle, number = session.handle, cell.number
        shown = await render(items, session=handle, cell=number, budget=budget, silence=silence)
        return shown, after

    rendered, after = await show(settings.max_output)
    content = [*rendered.content, *after]
    failed = cell.error is not None or (ended and cell.status is not Status.OK)
    failed = failed and not _has_picture(content)
    if failed and settings.max_output > FAILED_OUTPUT_CHARS < _length(content):
        rendered, after = await show(FAILED_OUTPUT_CHARS)
        content = [*rendered.content, *after]
    content.sort(key=lambda block: isinstance(block, ResourceLink))
    response.attach(session.notifications, included)
    if own is not None:
        response.receipt.then(lambda: session.notifications.mark_reported_by_cell(own))
    if ended:
        cell.telling = True
        session.queue.news.retract(cell)
    response.receipt.then(
        lambda: cell.delivered(ended=ended, to=position, notices=remarks, losses=unreported),
        partial(_mark_undelivered, weakref.ref(session), cell.number, since)
        if ended and not cell.author
        else None,
    )
    meta = cell.meta(session.handle, omitted=rendered.omitted, outputs=rendered.mime_types)
    anew = made_anew(session, cell)
    meta["lost"] = [name for name in meta["lost"] if name not in anew]
    return CallToolResult(
        content=with_notices(content, notices),
        is_error=failed,
        _meta={CELL_KEY: meta},
    )


@dataclass(frozen=True, slots=True)
class _LateOutput:
    """Output of a cell since its end that no delivered answer has had."""

    cell: Cell
    items: list[Item]


async def late_output(
    session: Session, response: ResponseContext, characters: int
) -> list[ContentBlock]:
    """Return what cells have put out since their end; it is delivered with `response`."""
    return await _show_late(_late_outputs(session, response), session.handle, characters)


def _late_outputs(
    session: Session, response: ResponseContext, *, but: Cell | None = None
) -> list[_LateOutput]:
    """Return the late output of all cells except `but`; it is delivered with `response`."""
    found = []
    for cell in session.cells.late:
        if cell is but or not response.claim(cell):
            continue
        since, to = cell.late_since, cell.log.position()
        found.append(_LateOutput(cell, cell.log.since(since)))
        response.receipt.then(
            partial(cell.tell_late, to), partial(setattr, cell, "late_since", since)
        )
    return found


async def _show_late(
    late: Sequence[_LateOutput], handle: str, characters: int
) -> list[ContentBlock]:
    """Return late output as content blocks, each cell's after a notice."""
    blocks: list[ContentBlock] = []
    for each in late:
        number, budget = each.cell.number, Budget(characters // len(late), PICTURE_BYTES // 2)
        shown = await render(each.items, session=handle, cell=number, budget=budget, silence="")
        if shown.content:
            who = f"Since its end, cell {number}" if number else "Background code"
            blocks += [notice_block(f"{who} has put out:"), *shown.content]
    return blocks


def _mark_undelivered(answered: weakref.ref[Session], number: int, since: Position) -> None:
    """Note that the answer never arrived which reported a cell's end and its output `since`."""
    if (session := answered()) is not None:
        cell = session.cells[number - 1]
        cell.reported = since
        cell.end_reported, cell.telling, cell.called = False, False, True
        session.queue.news.ended(cell)


def finished(
    result: BaseModel, session: Session | None, response: ResponseContext, *, about: bool = True
) -> CallToolResult:
    """Return `result` with the pending notices of its session; everything else is escaped.

    If the result is not `about` that session, its notices name it.
    """
    pending: tuple[Notice, ...] = ()
    if session is not None:
        pending = tuple(n for n in session.notifications.pending if not response.includes(n))
        response.attach(session.notifications, pending)
    if isinstance(result, CallToolResult):
        done = _guarded_result(result)
    else:
        done = _add_notices(_guarded_model(result), [])
    if session is not None and pending:
        done = with_pending(done, session, pending, about=about)
    remarks = [*response.remarks]
    if about and session is not None and (remark := session.request.interpreter.remark):
        remarks.append(remark)
    if remarks:
        done = _add_notices(done, remarks)
    if response.preamble:
        done = _with_preamble(done, response.preamble)
    return shortened(done) if done.is_error else done


def linked(result: CallToolResult, handle: str, address: str) -> CallToolResult:
    """Return `result` with the HTTP address of its session, if it names resources of that."""
    texts = (each.text for each in result.content if isinstance(each, TextContent))
    links = any(isinstance(each, ResourceLink) for each in result.content)
    if not links and not (result.is_error and any("kernel://" in text for text in texts)):
        return result
    way = f"kernel://{handle}/… is {address}/… over HTTP, with your token."
    return with_remarks(result, [way])


def not_begun(error: KernelMcpError, phase: Phase) -> CallToolResult:
    """Return the answer for an error that kept a script from running in this phase."""
    cell = Cell(0, "", 0.0, OutputLog(Path(), 0))
    cell.phase = phase
    cell.finish(CellOutcome(Status.ERROR, cause=str(error)), 0.0)
    outcome = {**cell.meta("", omitted=0, outputs=[]), "cell": None}
    result = refusal(error)
    result.meta = {CELL_KEY: {**outcome, **dict.fromkeys(STREAMS, "")}}
    return result


def with_remarks(result: CallToolResult, remarks: Sequence[str]) -> CallToolResult:
    """Return a complete answer with remarks of the server as notices."""
    if not remarks:
        return result
    result = _add_notices(result, remarks)
    return shortened(result) if result.is_error else result


def masked(result: CallToolResult, masks: Masks) -> CallToolResult:
    """Return a complete answer in which values that `masks` hide are masked.

    Fields in `_HANDLES` are left as they are, and so are the addresses of links.
    """
    structured = result.structured_content
    content: list[ContentBlock] = []
    for block in result.content:
        if isinstance(block, TextContent):
            document = structured is not None and not isinstance(block, NoticeContent)
            hide = partial(masked_document, but=_HANDLES, indent=2) if document else Masks.masked
            block = block.model_copy(update={"text": hide(masks, block.text)})
        elif isinstance(block, ResourceLink):
            block = block.model_copy(update={"name": masks.masked(block.name)})
        content.append(block)
    changes = {
        "content": content,
        "structured_content": masks.anywhere(structured, _HANDLES),
        "meta": masks.anywhere(result.meta, _HANDLES),
    }
    return result.model_copy(update=changes)


def masked_document(
    masks: Masks, text: str, *, but: Container[str] = _PROTOCOL_KEYS, indent: int = 1
) -> str:
    """Return JSON of this server with hidden values masked; keys and fields in `but` stay."""
    shown = masks.masked(text)
    if shown == text:
        return text
    try:
        value = masks.anywhere(json.loads(text), but)
    except (ValueError, RecursionError):
        return shown
    return json.dumps(value, indent=indent, ensure_ascii=False)


def refusal(error: KernelMcpError) -> CallToolResult:
    """Return the answer for an error."""
    text = _guarded(clean(str(error)))
    result = CallToolResult(content=[TextContent(text=text)], is_error=True)
    if isinstance(error, SessionGone):
        loss = Loss("the session has ended", error.lost, error.more)
        result.meta = {LOST_KEY: lost_meta(error.handle, [loss])}
    return result


def shortened(result: CallToolResult, most: int = ERROR_CHARS) -> CallToolResult:
    """Return an answer cut to `most` characters: the longest texts are cut first, notices never."""
    content = list(result.content)
    surplus = _length(content) - most
    texts = [block for block in content if isinstance(block, TextContent)]
    texts = [block for block in texts if not isinstance(block, NoticeContent)]
    for block in sorted(texts, key=lambda block: -len(block.text)):
        if surplus > 0:
            room = max(0, len(block.text) - surplus - OMISSION_CHARS)
            shorter = cut(block.text, room // 2, room - room // 2).joined()
            surplus -= len(block.text) - len(shorter)
            content[content.index(block)] = block.model_copy(update={"text": shorter})
    return result.model_copy(update={"content": content})


def bounded(result: CallToolResult, most: int) -> CallToolResult:
    """Return an answer of at most `most` characters, without a structured part if it was longer."""
    structured = result.structured_content
    if _length(result.content) + (len(json.dumps(structured)) if structured else 0) <= most:
        return result
    if structured:
        longer = f"This answer was longer than {most:,} characters: its structured part is left out"
        content = with_notices(result.content, [longer])
        result = result.model_copy(update={"content": content, "structured_content": None})
    return shortened(result, most)


def _has_picture(content: Iterable[ContentBlock]) -> bool:
    return any(isinstance(block, ImageContent) for block in content)


def _length(content: Iterable[ContentBlock]) -> int:
    """Return the characters of content blocks when Claude Code joins them to one text."""
    total = 0
    for block in content:
        if isinstance(block, TextContent):
            total += len(block.text) + 1
        elif isinstance(block, ResourceLink):
            total += len(f"[Resource link: {block.name}] {block.uri}\n")
    return total


def with_notices(content: Sequence[ContentBlock], texts: Iterable[str]) -> list[ContentBlock]:
    """Return `content` with notices after the output and before links to more of it."""
    place = next((i for i, block in enumerate(content) if isinstance(block, ResourceLink)), None)
    place = len(content) if place is None else place
    return [*content[:place], *map(notice_block, texts), *content[place:]]


def with_pending(
    result: BaseModel, session: Session, pending: Sequence[Notice], *, about: bool = True
) -> CallToolResult:
    """Return `result` with notices of a session, and their losses in its `_meta`."""
    whose = "" if about else f"Session {session.handle}: "
    texts = [f"{whose}{each.text}" for each in pending]
    losses = [each.loss for each in pending if each.loss is not None]
    result = _add_notices(result, texts)
    meta = dict(result.meta or {})
    key = CELL_KEY if about and CELL_KEY in meta else LOST_KEY
    if losses:
        before = cast(dict[str, Any], meta[key]) if key in meta else lost_meta(session.handle, [])
        meta[key] = _marked(before, losses)
    return result.model_copy(update={"meta": meta or None})


def _add_notices(result: BaseModel, texts: Sequence[str]) -> CallToolResult:
    """Return `result` with notices, once in its text and once in its structured part."""
    if not isinstance(result, CallToolResult):
        text = result.model_dump_json(indent=2, exclude={"notices"}, exclude_none=True)
        if "notices" in type(result).model_fields:
            result = result.model_copy(update={"notices": [notice_text(text) for text in texts]})
        result = CallToolResult(
            content=[TextContent(text=text)],
            structured_content=result.model_dump(mode="json", exclude_none=True),
        )
    elif (structured := result.structured_content) is not None and "notices" in structured:
        notices = [*structured["notices"], *map(notice_text, texts)]
        result = result.model_copy(
            update={"structured_content": {**structured, "notices": notices}}
        )
    content = with_notices(result.content, texts)
    return result.model_copy(update={"content": content})


def _with_preamble(result: CallToolResult, preamble: str) -> CallToolResult:
    """Return `result` with `preamble` as the first words of its text and its structured part."""
    structured = result.structured_content
    if structured is not None and "notices" in structured:
        structured = {**structured, "notices": [preamble, *structured["notices"]]}
    content = [NoticeContent(text=preamble), *result.content]
    return result.model_copy(update={"content": content, "structured_content": structured})


def lost_meta(handle: str, losses: Sequence[Loss]) -> dict[str, Any]:
    """Return the machine-readable losses of an answer that is not about a cell."""
    return {
        "session": handle,
        "lost": names_of(losses),
        "lost_omitted": sum(loss.more for loss in losses),
        "state_kept": not losses,
        "cause": losses[0].cause if losses else None,
    }


def _marked(outcome: dict[str, Any], losses: Sequence[Loss]) -> dict[str, Any]:
    """Return the outcome of a cell, with further losses added."""
    return {
        **outcome,
        "state_kept": False,
        "lost": list(dict.fromkeys([*outcome["lost"], *names_of(losses)])),
        "lost_omitted": outcome["lost_omitted"] + sum(loss.more for loss in losses),
        "cause": outcome["cause"] or losses[0].cause,
    }


def names_of(losses: Iterable[Loss]) -> list[str]:
    """Return the names of all lost variables, each once."""
    return list(dict.fromkeys(escaped(name) for loss in losses for name in loss.names))


def _guarded_result(result: CallToolResult) -> CallToolResult:
    content = [_guarded_block(block) for block in result.content]
    structured = result.structured_content
    if structured is None and all(map(operator.is_, content, result.content)):
        return result
    if structured is not None:
        structured = _guarded_value(structured)
    return result.model_copy(update={"content": content, "structured_content": structured})


def _guarded_block(block: ContentBlock) -> ContentBlock:
    if isinstance(block, TextContent) and not isinstance(block, NoticeContent):
        text = escaped_lines(visible(block.text))
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
"""Escapes by which JSON writes control characters."""


def _guarded(text: str) -> str:
    """Return text with control characters and notice markers escaped."""
    return escaped(visible(text))


def _guarded_value(value: Any) -> Any:
    """Return `value` with its texts escaped, except `notices`, which only the server writes."""
    if isinstance(value, str):
        return _guarded(value)
    if isinstance(value, dict):
        return {
            key: each if key == "notices" else _guarded_value(each) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_guarded_value(each) for each in value]
    return value
