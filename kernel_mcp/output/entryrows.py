"""The entries of a transcript as JSON values, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernel_mcp.output.bundles import Part
from kernel_mcp.output.events import Failure
from kernel_mcp.output.items import DisplayItem, FailureItem
from kernel_mcp.output.transcript import Failed, Segment, Shown


def row_of(entry: Segment | Shown | Failed) -> list[Any]:
    """An entry of a cell that has ended; values in files stay there."""
    if isinstance(entry, Segment):
        return ["text", entry.name, entry.start, entry.end]
    if isinstance(entry, Failed):
        failure = entry.item.failure
        return ["failure", entry.tick, failure.name, failure.value, failure.traceback]
    item = entry.item
    parts = [_part_row(part) for part in item.parts]
    shown = [item.cell, item.number, parts, item.metadata, item.result]
    return ["display", entry.tick, entry.display_id, shown]


def entry_from(row: list[Any], folder: Path) -> Segment | Shown | Failed:
    """The entry that gave this row; its files are in `folder`."""
    kind, *rest = row
    if kind == "text":
        return Segment(*rest)
    if kind == "failure":
        tick, name, value, traceback = rest
        return Failed(tick, FailureItem(Failure(name, value, tuple(traceback))))
    tick, display_id, (cell, number, parts, metadata, result) = rest
    kept = tuple(_part(part, folder) for part in parts)
    return Shown(tick, DisplayItem(cell, number, kept, metadata, result), display_id)


def _part_row(part: Part) -> list[Any]:
    file = None if part.path is None else part.path.name
    return [part.mime, part.size, part.text, file, part.structured, part.problem]


def _part(row: list[Any], folder: Path) -> Part:
    mime, size, text, file, structured, problem = row
    return Part(mime, size, text, file and folder / file, structured, problem)
