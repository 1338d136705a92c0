"""A session's cells as a Jupyter notebook (nbformat 4.5)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

from kernel_mcp.output.bundles import Part
from kernel_mcp.output.items import DisplayItem, FailureItem, GapItem, Item, StreamName, TextItem
from kernel_mcp.output.text import omission

NOTEBOOK_MIME = "application/x-ipynb+json"
STREAM_CHARS = 500_000
"""Text of one cell's streams at either end that goes into the notebook."""
DATA_CHARS = 64_000_000
"""Display data of the whole notebook; later displays are named but left out."""

_JSON = re.compile(r"application/(.*\+)?json")


class OutputRecord(Protocol):
    """The log of a cell's output."""

    def since(self, position: None = None, limit: int = ...) -> Sequence[Item]:
        """All of it, with at most `limit` characters of text at either end."""


class OutcomeRecord(Protocol):
    """How a cell ended."""

    @property
    def execution_count(self) -> int | None:
        """IPython's number for it, None when it never ran."""

    @property
    def cause(self) -> str | None:
        """Why it ended early, if it did."""


class CellRecord(Protocol):
    """What the notebook needs of a cell."""

    @property
    def number(self) -> int:
        """Its number in the session, from 1."""

    @property
    def code(self) -> str:
        """Its source."""

    @property
    def status(self) -> Enum:
        """Where it stands; the value is the word."""

    @property
    def outcome(self) -> OutcomeRecord | None:
        """How it ended, None as long as it has not."""

    @property
    def log(self) -> OutputRecord:
        """Its output."""


class NotebookSource(Protocol):
    """Something with cells: a session."""

    @property
    def cells(self) -> Sequence[CellRecord]:
        """All cells in order."""


def notebook_json(source: NotebookSource) -> str:
    """The notebook as the text of an .ipynb file; takes a moment, so use a thread."""
    nbformat: Any = import_module("nbformat")  # slow to import, and only needed here
    writer = _Writer()
    notebook = nbformat.from_dict(
        {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                "language_info": {"name": "python", "file_extension": ".py"},
            },
            "cells": [writer.cell(cell) for cell in list(source.cells)],
        }
    )
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook, version=4)
    # half a surrogate pair, which UTF-8 cannot carry, becomes an escape that JSON knows
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


class _Writer:
    """Turns cells into nbformat's dictionaries within one budget of data."""

    def __init__(self) -> None:
        self._left = DATA_CHARS

    def cell(self, cell: CellRecord) -> dict[str, Any]:
        """One code cell with its outputs."""
        outcome = cell.outcome
        count = outcome.execution_count if outcome else None
        remarks = {"status": str(cell.status.value), "cause": outcome.cause if outcome else None}
        outputs: list[dict[str, Any]] = []
        stream: StreamName = "stdout"
        for item in cell.log.since(limit=STREAM_CHARS):
            if isinstance(item, TextItem):
                stream = item.name
                outputs.append(_stream(stream, item.text))
            elif isinstance(item, GapItem):
                outputs.append(_stream(stream, f"\n{omission(item.characters)}\n"))
            elif isinstance(item, DisplayItem):
                if item.cell == cell.number:
                    outputs.append(self._display(item, count))
            elif isinstance(item, FailureItem):
                outputs.append(_error(item))
            else:
                outputs.append(_stream("stderr", f"{item.text}\n"))
        return {
            "id": f"cell-{cell.number}",
            "cell_type": "code",
            "metadata": {"kernel-mcp": {k: v for k, v in remarks.items() if v}},
            "execution_count": count,
            "source": cell.code,
            "outputs": outputs,
        }

    def _display(self, item: DisplayItem, count: int | None) -> dict[str, Any]:
        data: dict[str, Any] = {}
        missing: list[str] = []
        for part in item.parts:
            if part.problem or part.size > self._left:
                missing.append(f"[{part.mime} left out: {part.problem or 'the notebook is full'}]")
                continue
            self._left -= part.size
            data[part.mime] = _value(part)
        if missing:
            data.setdefault("text/plain", "\n".join(missing))
        output: dict[str, Any] = {
            "output_type": "display_data",
            "data": data,
            "metadata": item.metadata,
        }
        if item.result:
            output["output_type"] = "execute_result"
            output["execution_count"] = count
        return output


def _stream(name: StreamName, text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def _error(item: FailureItem) -> dict[str, Any]:
    failure = item.failure
    return {
        "output_type": "error",
        "ename": failure.name,
        "evalue": failure.value,
        "traceback": list(failure.traceback),
    }


def _value(part: Part) -> Any:
    """A value as the schema wants it: objects for JSON types only."""
    return part.value() if _JSON.fullmatch(part.mime) else part.read()
