"""A Jupyter notebook (nbformat 4) as the text of its file, cell by cell.

A change rewrites only the text of the changed fields. Everything else, such as fields of other
tools, stays byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kernel_mcp.errors import NotebookError
from kernel_mcp.notebooks import jsontext
from kernel_mcp.notebooks.jsontext import JsonSpan, dumped, joined, lines, members
from kernel_mcp.notebooks.metadata import PYTHON_METADATA, language_of, object_of
from kernel_mcp.output.markup import NotJson, utf8
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass

MOST_BYTES = 50_000_000
"""Most bytes of a notebook that is opened; the limit of files in a workspace."""
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OURS, _THEIRS = "<<<<<<< ", ">>>>>>> "
"""Beginnings of the lines by which Git marks a merge conflict."""
# bound: 400 characters, the longest reason of `NotJson`
_CHARACTER = re.compile(r"character ([\d,]{1,12})")
_BOM = "\ufeff"
_MINOR = 5
"""The first minor version of nbformat 4 in which cells have ids."""


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
        return self.has("raises-exception")

    @property
    def is_skipped(self) -> bool:
        """True if it has nbclient's tag for cells that are not run."""
        return self.has("skip-execution")

    def has(self, tag: str) -> bool:
        """Return True if it has a tag."""
        metadata = self.value.get("metadata")
        tags = metadata.get("tags") if isinstance(metadata, Mapping) else None
        return isinstance(tags, list) and tag in tags

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
        self._taken: set[str] = set()
        self._same: dict[str, int] = {}
        """Numbers of cells by the fingerprints of their sources, for derived ids."""
        for place, each in enumerate(found):
            if not isinstance(each.value, dict):
                raise NotJson(f"cell {place + 1} is no object")
            self.cells.append(self._cell(text[each.start : each.end], each.value, place))

    @classmethod
    def read(cls, path: str, data: bytes) -> NotebookDocument:
        """Return the notebook in the bytes of a file. Raises NotebookError."""
        try:
            return cls(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 at byte {error.start:,}"
        except NotJson as error:
            found = _conflict(data) or _by_line(str(error), data)
            reason = found if data.strip() else "it is empty"
        raise NotebookError(f"{path!r} is no notebook that can be read: {reason}.")

    @classmethod
    def new(cls, metadata: Mapping[str, Any] = PYTHON_METADATA) -> NotebookDocument:
        """Return a notebook without cells."""
        own = {"cells": [], "metadata": dict(metadata)}
        made = {**own, "nbformat": 4, "nbformat_minor": _MINOR}
        return cls(json.dumps(made, indent=1, sort_keys=True) + "\n")

    @property
    def has_ids(self) -> bool:
        """True if its format stores the ids of cells, as 4.5 does."""
        return bool(self._known.get("nbformat_minor", 0) >= _MINOR)

    @property
    def language(self) -> str:
        """Name of the language of its code, such as Python or R; empty if the file names none."""
        return language_of(self._known.get("metadata"))

    @property
    def kernel(self) -> object:
        """Name of the kernel spec that the file names; None for none."""
        return object_of(object_of(self._known.get("metadata")).get("kernelspec")).get("name")

    def is_of(self, metadata: Mapping[str, Any]) -> bool:
        """Return True if it names the language of this metadata, or none."""
        return self.language in ("", language_of(metadata))

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

    def insert(self, place: int, value: Mapping[str, Any]) -> str:
        """Insert a new cell before index `place`, which is the number of cells for the end.

        Return its id, which is another than in `value` if the format stores none. Raises
        NotebookError if the notebook would be too large to be read again.
        """
        self.name_all()
        if not self.has_ids:
            value = {name: each for name, each in value.items() if name != "id"}
        text = dumped(value, self._indent, self._indent * 2, self._newline)
        self._count("", text)
        made = self._cell(text, value, place)
        self.cells.insert(place, made)
        usual = next((lead for lead in self._leads if lead), "")
        self._leads.insert(
            place, usual or (self._newline + self._indent * 2 if self._indent else "")
        )
        return made.id

    def move(self, place: int, to: int) -> None:
        """Move the cell at index `place`, so that it is at index `to` afterwards."""
        self.name_all()
        self.cells.insert(to, self.cells.pop(place))

    def change(self, place: int, values: Mapping[str, Any]) -> str:
        """Replace fields of the cell at index `place`; the text of all others stays.

        Return its id, which is another if the format stores none and the source was replaced.
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
        now = NotebookCell(cell.id, text, {**cell.value, **values}, cell.named)
        if not cell.named and now.print != cell.print:
            now = self._cell(text, now.value, place)
        self.cells[place] = now
        return now.id

    def remove(self, place: int) -> None:
        """Remove the cell at index `place`."""
        self.name_all()
        self._count(self.cells.pop(place).text, "")
        lead = self._leads.pop(place)
        if place == 0 and self._leads:
            self._leads[0] = lead

    def name_all(self) -> None:
        """Write an id into every cell without one, if the format stores ids."""
        for place, cell in enumerate(self.cells if self.has_ids else ()):
            if not cell.named:
                text = jsontext.changed(cell.text, {"id": json.dumps(cell.id)})
                self.cells[place] = NotebookCell(cell.id, text, {**cell.value, "id": cell.id})

    def _cell(self, text: str, value: Mapping[str, Any], place: int) -> NotebookCell:
        """Return a cell whose id no other has; it is derived if the cell has no usable one.

        A derived id depends on the source alone if the format stores none, so that it stays when
        outputs change or cells are moved.
        """
        own, taken = value.get("id"), self._taken
        if self.has_ids and isinstance(own, str) and _ID.fullmatch(own) and own not in taken:
            taken.add(own)
            return NotebookCell(own, text, value)
        seed = f"{place}\n{text}"
        if not self.has_ids:
            source = NotebookCell("", text, value).print
            self._same[source] = self._same.get(source, 0) + 1
            seed = f"{source}\n{self._same[source]}"
        made = hashlib.sha256(seed.encode(errors="replace")).hexdigest()[:8]
        cell = NotebookCell(jsontext.unlike(made, taken), text, value, named=False)
        taken.add(cell.id)
        return cell

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

    def _check_version(self) -> None:
        version, minor = self._known.get("nbformat"), self._known.get("nbformat_minor", 0)
        if version != 4 or not isinstance(minor, int):
            raise NotJson(
                f"it has format {version!r} and only 4 can be opened; convert it first, for "
                "example with `jupyter nbconvert --to notebook --nbformat 4`"
            )


def code_cell(
    name: str,
    source: str,
    outputs: Sequence[Any],
    count: int | None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a new code cell, with its fields in the order in which Jupyter writes them."""
    return {
        "cell_type": "code",
        "execution_count": count,
        "id": name,
        "metadata": dict(metadata),
        "outputs": list(outputs),
        "source": lines(source),
    }


def text_cell(name: str, kind: str, source: str) -> dict[str, Any]:
    """Return a new cell of another type, such as markdown."""
    return {"cell_type": kind, "id": name, "metadata": {}, "source": lines(source)}


def _conflict(data: bytes) -> str:
    """Return a sentence on the first merge conflict in a file; empty for none."""
    lines = data.decode("utf-8", "replace").split("\n")
    marked = ((number, each) for number, each in enumerate(lines, 1) if each.startswith(_OURS))
    first = next(marked, None)
    if first is None:
        return ""
    number, ours = first
    theirs = next((each for each in lines[number:] if each.startswith(_THEIRS)), "")
    sides = " and ".join(repr(one_line(each.strip(), 80)) for each in (ours, theirs) if each)
    return (
        f"it has a merge conflict that is not resolved, which begins in line {number:,} ({sides}). "
        "Keep one side of each, and remove the markers"
    )


def _by_line(reason: str, data: bytes) -> str:
    """Return a reason with the line in addition to the position in the text that it names."""
    found = _CHARACTER.search(reason)
    if found is None:
        return reason
    text = data.decode("utf-8", "replace").removeprefix(_BOM)
    at = min(int(found[1].replace(",", "")), len(text))
    line = text.count("\n", 0, at) + 1
    shown = one_line(text[:at].rpartition("\n")[2] + text[at:].partition("\n")[0], 60).strip()
    of = f" ({shown})" if shown else ""
    return f"{reason[: found.start()]}line {line:,}{of}{reason[found.end() :]}"


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
