"""The notebooks of a session: targets of its cells, and notebook cells as last read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.errors import NotebookError, WorkspaceError
from kernel_mcp.files.paths import GUEST_ROOT
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.events import SessionEvents
from kernel_mcp.sessions.history import History

if TYPE_CHECKING:  # imported at the first use, as most sessions have no notebook
    from kernel_mcp.notebooks.document import NotebookCell, NotebookDocument
    from kernel_mcp.notebooks.notebook_file import NotebookFile

MOST_WRITTEN = 10_000
"""Maximum number of cells whose targets a session remembers; the oldest are forgotten."""
UNDONE = "undone"
"""Tag of notebook cells whose effects on variables were undone."""
MOST_KNOWN = 100_000
"""Maximum number of notebook cells whose read state a session remembers, of all notebooks."""


@dataclass(frozen=True, slots=True)
class NotebookTarget:
    """The target of a cell: the notebook cell `id`, or a new one at the end if that is empty.

    `print` is the fingerprint of the notebook cell's source at the start of the run.
    """

    book: NotebookFile
    id: str
    print: str


class NotebookSinks:
    """The notebooks of one session: targets of its cells, and notebook cells as last read."""

    def __init__(
        self, workspace: Workspace, handle: str, events: SessionEvents, cells: History
    ) -> None:
        self._cells = cells
        self.bound: NotebookFile | None = None
        """The open notebook, to which cells are appended once they have ended."""
        self._workspace = workspace
        self._events = events
        self._handle = handle
        self._places: dict[int, NotebookTarget] = {}
        self._written: dict[int, NotebookTarget] = {}
        self._unsaved: list[Cell] = []
        self._saving = anyio.Lock()
        self._known: dict[str, dict[str, str]] = {}

    @property
    def path(self) -> str:
        """Path of the open notebook; empty for none."""
        return "" if self.bound is None else self.bound.path

    @property
    def lasting_path(self) -> str:
        """Absolute path of the open notebook, for servers on which sessions begin elsewhere."""
        begin = self._workspace.start or GUEST_ROOT
        return self.path and os.path.normpath(os.path.join(begin, self.path))  # noqa: PTH118

    def book(self, path: str) -> NotebookFile:
        """Return the notebook at a path, whose file need not exist. Blocking.

        Raises WorkspaceError, NotebookError.
        """
        from kernel_mcp.notebooks.notebook_file import NotebookFile

        return NotebookFile(self._workspace, path, self._events.wrote, self._cells.notebook)

    def place(self, cell: Cell, place: NotebookTarget) -> None:
        """Write the outputs of `cell` into the notebook cell `place` once `cell` has ended."""
        self._places[cell.number] = place
        cell.notebook = place.book.path
        self._unsaved.append(cell)

    def begins(self, cell: Cell) -> None:
        """Choose the open notebook, if any, for a cell that begins to run without a target."""
        if cell.number not in self._places and self.bound is not None:
            self._places[cell.number] = NotebookTarget(self.bound, "", "")
            cell.notebook = self.bound.path
            self._unsaved.append(cell)

    async def save(self) -> None:
        """Write cells that have ended into their notebooks; a failure is a notice of its cell."""
        if not self._unsaved:
            return
        async with self._saving:
            for cell in [each for each in self._unsaved if each.finished.is_set()]:
                place = self._places.pop(cell.number)
                self._unsaved.remove(cell)
                if cell.started is None:
                    continue
                reason = ""
                doing = f"writing cell {cell.number} into a notebook"
                with Barrier(doing, self._handle) as barrier:
                    try:
                        with anyio.CancelScope(shield=True):
                            name = await anyio.to_thread.run_sync(
                                partial(_write, cell, place, self._handle)
                            )
                        self._written[cell.number] = NotebookTarget(place.book, name, "")
                    except (NotebookError, WorkspaceError) as error:
                        reason = str(error)
                if barrier.failure is not None:
                    reason = reason_of(barrier.failure)
                if reason:
                    cell.notice(f"Cell {cell.number} is not in {place.book.path!r}: {reason}")
            for number in list(self._written)[:-MOST_WRITTEN]:
                del self._written[number]

    async def undone(self, numbers: Iterable[int]) -> list[str]:
        """Tag undone cells in their notebooks, and return a sentence for each notebook."""
        places = [self._written.pop(each) for each in numbers if each in self._written]
        told: list[str] = []
        for path in dict.fromkeys(place.book.path for place in places):
            there = [place for place in places if place.book.path == path]
            names = [place.id for place in there]
            doing = "tagging cells of a notebook"
            reason = ""
            with Barrier(doing, self._handle) as barrier:
                try:
                    async with self._saving:
                        with anyio.CancelScope(shield=True):
                            await anyio.to_thread.run_sync(partial(_tag, there[0].book, names))
                except (NotebookError, WorkspaceError) as error:
                    reason = str(error)
            if barrier.failure is not None:
                reason = reason_of(barrier.failure)
            told.append(
                f"They are not tagged in {path!r}: {reason}"
                if reason
                else f"In {path!r} they are tagged `{UNDONE}`."
            )
        return told

    def read(self, path: str, cells: Iterable[NotebookCell]) -> None:
        """Remember the state of notebook cells that were shown to the caller."""
        known = self._known.setdefault(path, {})
        known.update((cell.id, cell.print) for cell in cells)
        if sum(map(len, self._known.values())) > MOST_KNOWN:
            self._known = {path: known}

    def unchanged(self, path: str, document: NotebookDocument, name: str) -> int:
        """Return the index of a notebook cell that has not changed since it was read.

        Raises NotebookError if it was changed, or not read in this session.
        """
        found = document.place(name)
        known = self._known.get(path, {}).get(name)
        if known is None:
            raise NotebookError(
                f"Cell {name!r} of {path!r} was not read in this session. Read it with "
                f"read_notebook(path, ids=[{name!r}]) first."
            )
        if known != document.cells[found].print:
            raise NotebookError(
                f"Nothing was done: cell {name!r} of {path!r} was changed since it was read. Read "
                "it again with read_notebook, and decide then."
            )
        return found


def _tag(book: NotebookFile, names: Iterable[str]) -> None:
    """Tag cells as undone, except removed ones. Raises NotebookError, WorkspaceError, OSError."""

    def tag(document: NotebookDocument) -> None:
        for found in [place for place in map(document.find, names) if place is not None]:
            metadata, tags = _tags(document.cells[found])
            if UNDONE not in tags:
                document.change(found, {"metadata": {**metadata, "tags": [*tags, UNDONE]}})

    book.change(tag)


def _tags(cell: NotebookCell) -> tuple[Mapping[str, Any], list[Any]]:
    """Return the metadata of a cell and its tags; empty if they are missing or malformed."""
    metadata = cell.value.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    tags = metadata.get("tags")
    return metadata, tags if isinstance(tags, list) else []


def _write(cell: Cell, place: NotebookTarget, session: str) -> str:
    """Write a cell that has ended into its notebook, and return its id there.

    Raises NotebookError, WorkspaceError, OSError.
    """
    from kernel_mcp.notebooks.document import code_cell
    from kernel_mcp.notebooks.jsontext import unlike
    from kernel_mcp.sessions.notebook_export import OWN, cell_as_json

    written = cell_as_json(cell)
    outputs = [_by_lines(each) for each in written["outputs"]]
    count = written["execution_count"]
    own = {OWN: {"session": session, "cell": cell.number}}

    def add(document: NotebookDocument) -> str:
        place.book.check_language(document)
        name = unlike(secrets.token_hex(4), (each.id for each in document.cells))
        end = len(document.cells)
        return document.insert(end, code_cell(name, cell.recorded, outputs, count, own))

    def update(document: NotebookDocument) -> str:
        found = document.find(place.id)
        if found is None or document.cells[found].print != place.print:
            raise NotebookError(
                f"cell {place.id!r} was {'removed' if found is None else 'changed'} while it ran. "
                "What it has put out is in the answer only."
            )
        metadata, tags = _tags(document.cells[found])
        metadata = {**metadata, **own}
        if UNDONE in tags:
            metadata["tags"] = [each for each in tags if each != UNDONE]
        values = {"execution_count": count, "outputs": outputs, "metadata": metadata}
        document.change(found, values)
        return place.id

    return place.book.change(update if place.id else add)


def _by_lines(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return an output in the format of notebook files: texts as lists of lines."""
    from kernel_mcp.notebooks.jsontext import lines

    made = dict(output)
    if isinstance(made.get("text"), str):
        made["text"] = lines(made["text"])
    if isinstance(made.get("data"), dict):
        made["data"] = {
            mime: lines(value) if isinstance(value, str) and _is_text(mime) else value
            for mime, value in made["data"].items()
        }
    return made


def _is_text(mime: str) -> bool:
    return mime.startswith("text/") or mime in ("image/svg+xml", "application/javascript")
