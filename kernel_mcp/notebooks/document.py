"""A Jupyter notebook (nbformat 4) as the text of its file, cell by cell.

A change rewrites only the text of the changed fields. Everything else, such as fields of other
tools, stays byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from kernel_mcp.errors import NotebookError
from kernel_mcp.notebooks import jsontext
from kernel_mcp.notebooks.jsontext import JsonSpan, dumped, joined, lines, members
from kernel_mcp.output.markup import NotJson, utf8
from kernel_mcp.records import dataclass

MOST_BYTES = 50_000_000
"""Most bytes of a notebook that is opened; the limit of files in a workspace."""
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BOM = "\ufeff"
_MINOR = 5
"""The first minor version of nbformat 4 in which cells have ids."""
_NEW = {
    "cells": [],
    "metadata": {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"file_extension": ".py", "name": "python"},
    },
    "nbformat": 4,
    "nbformat_minor": _MINOR,
}


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """A cell of a notebook: its text in the file and its parsed value.

    `id` is the cell's own if `named`. Otherwise it is derived from the content, as the cell has no
    usable one.
    """

    id: str
    text: str
    value: Mapping[str, Any]
    named: bool = True

    @property
    def kind(self) -> str:
        """The cell's type: code, markdown or raw; others are kept as they are."""
        return str(self.value.get("cell_type", ""))

    @property
    def source(self) -> str:
        """Its code or text."""
        return joined(self.value.get("source", ""))

    @property
    def may_raise(self) -> bool:
        """True if it has nbclient's tag for cells that are meant to raise an exception.

        Source: https://nbclient.readthedocs.io/en/latest/client.html
        """
        metadata = self.value.get("metadata")
        tags = metadata.get("tags") if isinstance(metadata, Mapping) else None
        return isinstance(tags, list) and "raises-exception" in tags

    @property
    def outputs(self) -> list[Mapping[str, Any]]:
        """The outputs of a code cell."""
        found = self.value.get("outputs")
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    @property
    def count(self) -> int | None:
        """Execution count of its last run; None for none."""
        found = self.value.get("execution_count")
        return found if isinstance(found, int) else None

    @property
    def print(self) -> str:
        """Fingerprint of its type and source: SHA-256 in hexadecimal digits."""
        return hashlib.sha256(f"{self.kind}\n{self.source}".encode(errors="replace")).hexdigest()


class NotebookDocument:
    """One notebook; `cells` are in order."""

    def __init__(self, text: str, path: str = "") -> None:
        """Parse `text`; `path` is for errors. Raises NotJson if it is no notebook of format 4."""
        self._path = path
        self._mark = text[: text.startswith(_BOM)]
        text = text[len(self._mark) :]
        self._values = jsontext.bounded(text)
        top, end = members(text, apart="cells")
        if text[end:].strip():
            raise NotJson("something follows its end")
        known = {span.name: span for span in top}
        if len(known) < len(top):
            raise NotJson("a field of it stands there twice")
        self._known = {name: span.value for name, span in known.items() if name != "cells"}
        self._check_version()
        span = known.get("cells")
        if span is None or not isinstance(span.value, list):
            raise NotJson("it has no list `cells`")
        found = span.value
        self._indent = _indent(text, top)
        self._newline = "\r\n" if "\r\n" in text[: text.find('"')] else "\n"
        self._head = text[: span.start + 1]
        self._tail = text[span.end - 1 :]
        self._leads = [text[a:b] for a, b in _gaps(text, span.start + 1, found)]
        self._closing = text[found[-1].end : span.end - 1] if found else ""
        if not found:
            self._closing = f"{self._newline}{self._indent}" if self._indent else ""
        self.cells: list[NotebookCell] = []
        taken: set[str] = set()
        for place, each in enumerate(found):
            if not isinstance(each.value, dict):
                raise NotJson(f"cell {place + 1} is no object")
            cell = _cell(text[each.start : each.end], each.value, place, taken)
            taken.add(cell.id)
            self.cells.append(cell)

    @classmethod
    def read(cls, path: str, data: bytes) -> NotebookDocument:
        """Return the notebook in the bytes of a file. Raises NotebookError."""
        try:
            return cls(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 at byte {error.start:,}"
        except NotJson as error:
            reason = str(error)
        raise NotebookError(f"{path!r} is no notebook that can be read: {reason}.")

    @classmethod
    def new(cls) -> NotebookDocument:
        """Return a notebook without cells."""
        return cls(json.dumps(_NEW, indent=1) + "\n")

    def bytes(self) -> bytes:
        """Return the content of its file."""
        body = ",".join(
            lead + cell.text for lead, cell in zip(self._leads, self.cells, strict=True)
        )
        closing = self._closing if self.cells else ""
        return utf8(f"{self._mark}{self._head}{body}{closing}{self._tail}")

    def find(self, name: str) -> int | None:
        """Return the index of the cell with this id; None without one."""
        return next((place for place, cell in enumerate(self.cells) if cell.id == name), None)

    def place(self, name: str) -> int:
        """Return the index of the cell with this id. Raises NotebookError without one."""
        place = self.find(name)
        if place is None:
            raise NotebookError(
                f"{self._path!r} has no cell {name!r}, and nothing was done. Call read_notebook "
                "without ids for those it has."
            )
        return place

    def insert(self, place: int, value: Mapping[str, Any]) -> None:
        """Insert a new cell before index `place`, which is the number of cells for the end.

        Raises NotebookError if the notebook would be too large to be read again.
        """
        self.name_all()
        text = dumped(value, self._indent, self._indent * 2, self._newline)
        self._count("", text)
        self.cells.insert(place, NotebookCell(str(value["id"]), text, value))
        usual = next((lead for lead in self._leads if lead), "")
        self._leads.insert(
            place, usual or (self._newline + self._indent * 2 if self._indent else "")
        )

    def change(self, place: int, values: Mapping[str, Any]) -> None:
        """Replace fields of the cell at index `place`; the text of all others stays.

        Raises NotebookError as `insert`.
        """
        self.name_all()
        cell = self.cells[place]
        margin = self._indent * 3
        texts = {
            name: dumped(value, self._indent, margin, self._newline)
            for name, value in values.items()
        }
        text = jsontext.changed(cell.text, texts)
        self._count(cell.text, text)
        self.cells[place] = NotebookCell(cell.id, text, {**cell.value, **values})

    def remove(self, place: int) -> None:
        """Remove the cell at index `place`."""
        self.name_all()
        self._count(self.cells.pop(place).text, "")
        lead = self._leads.pop(place)
        if place == 0 and self._leads:
            self._leads[0] = lead

    def name_all(self) -> None:
        """Write an id into every cell without one, and raise the minor version of the format."""
        for place, cell in enumerate(self.cells):
            if not cell.named:
                text = jsontext.changed(cell.text, {"id": json.dumps(cell.id)})
                self.cells[place] = NotebookCell(cell.id, text, {**cell.value, "id": cell.id})
        if self._known.get("nbformat_minor", 0) < _MINOR:
            self._known["nbformat_minor"] = _MINOR
            self._upgrade()

    def _count(self, before: str, after: str) -> None:
        """Count the JSON values after a cell's text has changed.

        Raises NotebookError if the notebook would have more than can be read.
        """
        try:
            values = self._values + jsontext.bounded(after) - jsontext.bounded(before)
        except NotJson as error:
            raise NotebookError(f"{self._path!r} was not changed: of the cell, {error}.") from None
        if values > jsontext.MOST_VALUES:
            raise NotebookError(
                f"{self._path!r} was not changed: it would have more than "
                f"{jsontext.MOST_VALUES:,} values. Clear outputs of it, or open another notebook."
            )
        self._values = values

    def _upgrade(self) -> None:
        whole = f"{self._head}{self._tail}"
        self._head, self._tail = _parts(
            jsontext.changed(whole, {"nbformat_minor": str(_MINOR)}),
        )

    def _check_version(self) -> None:
        version, minor = self._known.get("nbformat"), self._known.get("nbformat_minor", 0)
        if version != 4 or not isinstance(minor, int):
            raise NotJson(
                f"it has format {version!r} and only 4 can be opened; convert it first, for "
                "example with `jupyter nbconvert --to notebook --nbformat 4`"
            )


def _cell(text: str, value: Mapping[str, Any], place: int, taken: Set[str]) -> NotebookCell:
    """Return a cell whose id is not in `taken`, the ids of cells before it."""
    own = value.get("id")
    if isinstance(own, str) and _ID.fullmatch(own) and own not in taken:
        return NotebookCell(own, text, value)
    made = hashlib.sha256(f"{place}\n{text}".encode(errors="replace")).hexdigest()[:8]
    return NotebookCell(jsontext.unlike(made, taken), text, value, named=False)


def code_cell(name: str, source: str, outputs: Sequence[Any], count: int | None) -> dict[str, Any]:
    """Return a new code cell, with its fields in the order in which Jupyter writes them."""
    return {
        "cell_type": "code",
        "execution_count": count,
        "id": name,
        "metadata": {},
        "outputs": list(outputs),
        "source": lines(source),
    }


def text_cell(name: str, kind: str, source: str) -> dict[str, Any]:
    """Return a new cell of another type, such as markdown."""
    return {"cell_type": kind, "id": name, "metadata": {}, "source": lines(source)}


def _indent(text: str, top: Sequence[JsonSpan]) -> str:
    """Return the indentation of one level; empty where the whole file is on one line."""
    before = text[: text.find('"')] if top else ""
    return before.rpartition("\n")[2] if "\n" in before else ""


def _gaps(text: str, start: int, found: Sequence[JsonSpan]) -> list[tuple[int, int]]:
    """Return start and end of the white space before each element, after the comma."""
    gaps: list[tuple[int, int]] = []
    for each in found:
        comma = text.find(",", start, each.start) if gaps else -1
        gaps.append((start if comma < 0 else comma + 1, each.start))
        start = each.end
    return gaps


def _parts(text: str) -> tuple[str, str]:
    """Return the text before and after the place for cells, of a notebook without cells."""
    span = next(each for each in members(text)[0] if each.name == "cells")
    return text[: span.start + 1], text[span.end - 1 :]
