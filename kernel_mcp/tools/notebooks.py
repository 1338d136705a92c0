"""The tools for notebooks as documents: open, read, edit and run them."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import anyio
from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import Field

from kernel_mcp.errors import InputError
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.notebooks.document import (
    NotebookCell,
    NotebookDocument,
    code_cell,
    text_cell,
)
from kernel_mcp.notebooks.jsontext import lines, unlike
from kernel_mcp.notebooks.notebook_file import NotebookFile
from kernel_mcp.notebooks.views import AnswerBudget, Outline, full_cell, outline
from kernel_mcp.output.images import Picture
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import PICTURE_BYTES
from kernel_mcp.output.text import weight
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.notebook_sinks import NotebookTarget
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, SessionArg, Toolbox, WaitArg, Whole
from kernel_mcp.tools.arguments import UNFENCED, without_fence
from kernel_mcp.tools.asking import followed, may_ask
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.cells import check_code, check_seconds
from kernel_mcp.tools.hints import DESTROYS, READS, REPEATS, RUNS
from kernel_mcp.tools.notebook_sessions import resolve
from kernel_mcp.tools.results import (
    NoticeContent,
    answer,
    notice_block,
    notice_result,
    with_notices,
)

LEAST_CHARS = 500
"""Characters that a cell's output may have, at the least, in an answer about many cells."""
MOST_NAMED = 20
MOST_CELLS = 50
"""Most cells that one answer shows whole."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool, settings = box.tool, services.settings
    most = settings.max_output

    @tool(REPEATS, "Open a notebook", computes=True)
    async def open_notebook(path: str, ctx: AnyContext, session: SessionArg = "") -> CallToolResult:
        """Append what execute runs from now on to an .ipynb, new or not; an empty path ends it."""
        _, found = await resolve(box, services, ctx, session, path)
        if not path:
            before = found.notebooks.path
            await found.bind(None)
            return notice_result(f"{before!r} is closed." if before else "No notebook was open.")
        book, made, document = await anyio.to_thread.run_sync(_opened, found, path)
        await found.bind(book)
        folder = book.path.rpartition("/")[0]
        runs = f", and runs in {folder!r}, its folder" if folder else ""
        shown = outline(document.cells, 1, most)
        found.notebooks.read(book.path, document.cells[: shown.last])
        words = (
            f"{book.path!r} {'was made and ' if made else ''}is open: what session {found.handle} "
            f"executes is appended to it with its outputs{runs}. Its own cells were not run"
        )
        return _outlined(shown, words, document.language)

    @tool(READS, "Read a notebook", computes=True)
    async def read_notebook(
        path: str,
        ctx: AnyContext,
        session: SessionArg = "",
        ids: Annotated[list[str], Field(description="Cells to show whole")] = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
        first: Annotated[Whole, Field(description="Outline from this number")] = 1,
    ) -> CallToolResult:
        """Outline an .ipynb, a line per cell; or show cells whole."""
        if first < 1:
            raise InputError(f"first={first} is not usable: cells count from 1.")
        _, found = await box.resolve(ctx, session)
        return await anyio.to_thread.run_sync(_read, found, path, ids, first, most)

    @tool(DESTROYS, "Edit a notebook", computes=True)
    async def edit_notebook(
        path: str,
        op: Literal["insert", "replace", "delete", "move"],
        ctx: AnyContext,
        session: SessionArg = "",
        cell: Annotated[str, Field(description="Its id; for insert the one before")] = "",
        source: str = "",
        kind: Literal["code", "markdown", "raw"] = "code",
        after: Annotated[str, Field(description="For move; none: to the start")] = "",
    ) -> CallToolResult:
        """Insert, replace, delete or move a cell; refused if it changed since it was read."""
        _, found = await box.resolve(ctx, session)
        if op == "move":
            return await anyio.to_thread.run_sync(_move, found, path, cell, after)
        if after and (cell or op != "insert"):
            raise InputError(f"after is for move; for {op} pass `cell`.")
        name = cell or after
        return await anyio.to_thread.run_sync(_edit, found, path, op, name, source, kind)

    @tool(RUNS, "Run cells of a notebook")
    async def run_cells(
        path: str,
        cells: Annotated[str | list[str], Field(description='Ids, "all" or "to ID"')],
        ctx: AnyContext,
        session: SessionArg = "",
        wait: WaitArg = settings.wait_s,
    ) -> CallToolResult:
        """Run cells of an .ipynb in its folder and write their outputs into it.

        Stops at the first error, or after `wait` seconds.
        """
        check_seconds("wait", wait, least=0)
        caller, found = await resolve(box, services, ctx, session, path)
        services.manager.check_cells(caller)
        book, chosen, skipped = await anyio.to_thread.run_sync(_chosen, found, path, cells)
        told = [f"Skipped, as tagged `skip-execution`: {_named(skipped)}"] if skipped else []
        if not chosen:
            return notice_result(
                "; ".join(["Nothing was run: none of these cells has code to run", *told])
            )
        run = _Run(services, found, book, chosen, caller.response, told)
        return await run.through(wait, ctx)


def _opened(session: Session, path: str) -> tuple[NotebookFile, bool, NotebookDocument]:
    book = session.notebooks.book(path)
    made = book.create()
    document = book.read()
    book.check_language(document)
    book.check_writable()
    return book, made, document


def _outlined(shown: Outline, words: str, language: str) -> CallToolResult:
    text = "\n".join(shown.lines)
    count = f"{shown.total} cell{'' if shown.total == 1 else 's'}"
    more = ""
    if shown.last < shown.total:
        more = f"; read on with read_notebook(path, first={shown.last + 1})"
    content: list[ContentBlock] = [TextContent(text=text)] if text else []
    of = f" of {language}" if language else ""
    return CallToolResult(content=[*content, notice_block(f"{words}. {count}{of}{more}.")])


def _read(session: Session, path: str, ids: Sequence[str], first: int, most: int) -> CallToolResult:
    book = session.notebooks.book(path)
    document = book.read()
    if not ids:
        if first > max(1, len(document.cells)):
            raise InputError(f"{book.path!r} has {len(document.cells)} cells: first={first}.")
        shown = outline(document.cells, first, most)
        session.notebooks.read(book.path, document.cells[first - 1 : shown.last])
        return _outlined(shown, f"{book.path!r}", document.language)
    content: list[ContentBlock] = []
    room = AnswerBudget(most)
    for name in ids[:MOST_CELLS]:
        place = document.place(name)
        cell = document.cells[place]
        content.append(notice_block(_heading(cell, place)))
        content += [_block(part) for part in full_cell(cell, room) if part]
        session.notebooks.read(book.path, [cell])
    if len(ids) > MOST_CELLS:
        content.append(notice_block(f"{len(ids) - MOST_CELLS} more cells are not shown: ask again"))
    return CallToolResult(content=content)


def _block(part: str | Picture) -> ContentBlock:
    if isinstance(part, str):
        return TextContent(text=part)
    return ImageContent(data=base64.b64encode(part.data).decode(), mime_type=part.mime)


def _heading(cell: NotebookCell, place: int) -> str:
    count = f", run as [{cell.count}]" if cell.count is not None else ""
    outputs = f", {len(cell.outputs)} outputs below" if cell.outputs else ""
    return f"Cell {cell.id}: {cell.kind}, number {place + 1}{count}{outputs}"


def _edit(
    session: Session, path: str, op: str, name: str, source: str, kind: str
) -> CallToolResult:
    book = session.notebooks.book(path)
    if op != "insert" and not name:
        raise InputError(f"cell is missing: pass the id of the one to {op}.")
    if op == "delete" and source:
        raise InputError("source is for insert and replace; delete takes none.")

    code = source

    def work(document: NotebookDocument) -> tuple[str, NotebookDocument]:
        nonlocal code
        code = without_fence(source, {(document.language or PYTHON.language).lower()})
        if op == "insert":
            place = session.notebooks.unchanged(book.path, document, name) + 1 if name else 0
            made = unlike(secrets.token_hex(4), (each.id for each in document.cells))
            new = (
                code_cell(made, code, [], None) if kind == "code" else text_cell(made, kind, source)
            )
            return document.insert(place, new), document
        place = session.notebooks.unchanged(book.path, document, name)
        if op == "delete":
            document.remove(place)
            return name, document
        own = document.cells[place].kind
        if kind not in ("code", own):
            raise InputError(
                f"Nothing was done: cell {name!r} is of kind {own!r} and stays that. To make it "
                f"{kind}, delete it and insert another."
            )
        values: dict[str, Any] = {"source": lines(code if own == "code" else source)}
        if own == "code":
            values |= {"execution_count": None, "outputs": []}
        return document.change(place, values), document

    made, document = book.change(work)
    done = {"insert": "inserted", "replace": "replaced", "delete": "deleted"}[op]
    place = document.find(made)
    if place is not None:
        session.notebooks.read(book.path, [document.cells[place]])
    where = "" if place is None else f" It is number {place + 1}."
    cleared = " Its outputs are gone." if op == "replace" else ""
    if op == "replace" and made != name:
        cleared += f" Its id was {name}: the format of this notebook stores none."
    told = notice_result(
        f"Cell {made} of {book.path!r} is {done}.{where}{cleared} Nothing was run."
    )
    if code is not source and place is not None and document.cells[place].kind == "code":
        told.content.append(notice_block(UNFENCED.format("source")))
    return told


def _move(session: Session, path: str, name: str, after: str) -> CallToolResult:
    book = session.notebooks.book(path)
    if not name:
        raise InputError("cell is missing: pass the id of the one to move.")
    if name == after:
        raise InputError("`cell` and `after` are the same cell: nothing was moved.")

    def work(document: NotebookDocument) -> int:
        place = session.notebooks.unchanged(book.path, document, name)
        behind = document.place(after) if after else -1
        to = behind + 1 if behind < place else behind
        document.move(place, to)
        return to

    place = book.change(work)
    where = f"behind cell {after}" if after else "to the start"
    return notice_result(
        f"Cell {name} of {book.path!r} is moved {where}. It is number {place + 1}."
    )


def _chosen(
    session: Session, path: str, cells: str | list[str]
) -> tuple[NotebookFile, list[NotebookCell], list[str]]:
    """Return the notebook, the cells to run, and the ids of those that are tagged to be skipped."""
    book = session.notebooks.book(path)
    document = book.read()
    book.check_language(document)
    book.check_writable()
    if cells == "all":
        found = list(document.cells)
    elif isinstance(cells, str) and cells.startswith("to "):
        found = document.cells[: document.place(cells[3:].strip()) + 1]
    else:
        names = [cells] if isinstance(cells, str) else cells
        if not names:
            raise InputError("There is nothing to run: pass ids of cells, all, or to ID.")
        found = [document.cells[document.place(name)] for name in names]
    found = [each for each in found if each.kind == "code" and each.source.strip()]
    skipped = [each.id for each in found if each.is_skipped]
    found = [each for each in found if not each.is_skipped]
    for each in found:
        check_code(each.source)
    return book, found, skipped


class _Run:
    """Runs cells of a notebook one after the other, and makes one answer about all."""

    def __init__(
        self,
        services: ToolContext,
        session: Session,
        book: NotebookFile,
        chosen: Sequence[NotebookCell],
        response: ResponseContext,
        told: Sequence[str],
    ) -> None:
        """`told` are notices that the answer begins its own with."""
        self._notices = told
        self._services = services
        self._session = session
        self._book = book
        self._left = list(chosen)
        self._response = response
        self._content: list[ContentBlock] = []
        self._characters = services.settings.max_output
        self._picture_bytes = PICTURE_BYTES
        self._hidden: list[str] = []

    async def through(self, wait_s: float, call: Call) -> CallToolResult:
        """Run the cells for `wait_s` seconds, or to the first failure, and return the answer.

        An error in a cell that is tagged to raise one is no failure.
        """
        failed, report = False, call.progress
        meta: dict[str, Any] = {}
        while self._left:
            one = self._left.pop(0)
            if report is not None:
                await report(f"Running cell {one.id}, {len(self._left)} after it")
            shown, cell, wait_s = await self._run(one, wait_s, call)
            self._content += [
                notice_block(f"Cell {one.id}"),
                *self._fitting(one.id, cell, shown.content),
            ]
            meta, failed = shown.meta or {}, bool(shown.is_error)
            expected = cell.status is Status.ERROR and one.may_raise
            failed = failed and not expected
            if cell.status is not Status.OK and not expected:
                break
        return CallToolResult(
            content=with_notices(self._content, self._rest()), is_error=failed, _meta=meta or None
        )

    def _fitting(
        self, name: str, cell: Cell, content: Sequence[ContentBlock]
    ) -> Iterator[ContentBlock]:
        """Yield the blocks of a cell for which the answer has room.

        Notices always have, and so has text of a cell that has not ended well. A cell of which
        something was left out is noted in `_hidden`.
        """
        crowded, hidden = self._characters <= 0 and cell.status is Status.OK, False
        for block in content:
            if isinstance(block, ImageContent):
                size = len(block.data) // 4 * 3
                fits = size <= self._picture_bytes
                self._picture_bytes -= size if fits else 0
            else:
                fits = isinstance(block, NoticeContent) or not crowded
            if isinstance(block, TextContent):
                self._characters -= weight(block.text)
            hidden = hidden or not fits
            if fits:
                yield block
        self._hidden += [name] * hidden

    async def _run(
        self, one: NotebookCell, wait_s: float, call: Call
    ) -> tuple[CallToolResult, Cell, float]:
        """Run one cell; return its answer, the cell, and the seconds that are left."""
        session = self._session
        cell = session.submit(one.source, session.timeout_s)
        cell.who = call.caller.who
        may_ask(session, cell, call, self._services.settings)
        session.notebooks.place(cell, NotebookTarget(self._book, one.id, one.print))
        room = max(LEAST_CHARS, self._characters)
        settings = replace(self._services.settings, max_output=room)
        with session.queue.attending(cell):
            try:
                wait_s = await followed(session, cell, wait_s, call)
            except anyio.get_cancelled_exc_class():
                session.queue.abandon(cell)
                raise
            shown = await answer(session, cell, self._response, since=Position(), settings=settings)
            return shown, cell, wait_s

    def _rest(self) -> list[str]:
        """Return notices of outputs that are not shown, and of cells that were not run."""
        told = [*self._notices]
        if self._hidden:
            told.append(
                f"Not shown, as an answer holds no more: outputs of {_named(self._hidden)}. They "
                "are in the notebook: read_notebook with these ids shows them"
            )
        if self._left:
            names = _named([each.id for each in self._left])
            told.append(f"Not run: {names}. Call run_cells for them when you are ready")
        return told


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
