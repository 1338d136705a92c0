"""A session's cells as a Jupyter notebook (nbformat 4.5), written as text, cell by cell.

Its size, and the number and depth of its JSON values, are bounded, so that readers can open it. A
remark replaces everything that does not fit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Any

from kernel_mcp.errors import NotebookError
from kernel_mcp.notebooks.metadata import PYTHON_METADATA
from kernel_mcp.output.bundles import FOR_VIEWS, Representation
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.items import DisplayItem, FailureItem, GapItem, Item, StreamName, TextItem
from kernel_mcp.output.markup import JSON_DEPTH, NotJson, Shape, checked, compact, slices, string
from kernel_mcp.output.text import omission
from kernel_mcp.sessions.boundaries import Boundaries
from kernel_mcp.sessions.cell import Cell

NOTEBOOK_MIME = "application/x-ipynb+json"
FILE_BYTES = 48_000_000
"""Maximum bytes of a notebook that is written as a file; `write_file` accepts 50 MiB."""
RESOURCE_BYTES = 16_000_000
"""Maximum bytes of a notebook as a resource, of which the SDK makes several copies."""
CELL_BYTES = 16_000_000
"""Maximum bytes of one cell that is written to a notebook of the workspace."""
STREAM_CHARS = 500_000
"""Maximum characters of a cell's streams in the notebook, from their start and their end."""
OWN = "kernel-mcp"
"""Key in the metadata of an output for what this server adds to it."""
TEXT_CHARS = 1000
"""Maximum characters of a figure's own text."""
JSON_VALUES = 1_000_000
"""Maximum number of values in all JSON displays together: readers create an object for each."""

_END_BYTES = 2048
"""Bytes reserved for the end of the file, which lists the cells that were left out."""
_JSON = re.compile(r"application/(.*\+)?json")
_FULL = "the notebook is full"


def notebook(
    cells: Sequence[Cell],
    most: int = FILE_BYTES,
    *,
    undone: Container[int] = (),
    metadata: Mapping[str, Any] = PYTHON_METADATA,
    session: str = "",
) -> bytes:
    """Return the cells as an .ipynb file of at most `most` bytes. Blocking: run it in a thread.

    Cells whose numbers are in `undone` are tagged as undone. `metadata` are those of the notebook,
    `session` is the handle. A markdown cell says where the variables of earlier cells were lost.
    """
    written = BytesIO()
    for piece in notebook_pieces(cells, most, undone=undone, metadata=metadata, session=session):
        written.write(piece)
    return written.getvalue()


def cell_as_json(cell: Cell, most: int = CELL_BYTES, session: str = "") -> dict[str, Any]:
    """Return a cell as a JSON object, with outputs of at most half of `most` bytes. Blocking.

    Raises NotebookError if its code is longer than `most` bytes.
    """
    pieces = _Writer(most, (), session).cell(cell)
    if pieces is None:
        raise NotebookError(f"its code has more than {most:,} bytes.")
    made: dict[str, Any] = json.loads(b"".join(pieces))
    return made


def notebook_pieces(
    cells: Sequence[Cell],
    most: int = sys.maxsize,
    *,
    undone: Container[int] = (),
    metadata: Mapping[str, Any] = PYTHON_METADATA,
    session: str = "",
    shown: Callable[[bytes], bytes] = bytes,
) -> Iterator[bytes]:
    """Yield the file of `notebook` cell by cell; `shown` transforms each cell's JSON. Blocking."""
    yield b'{"cells":[\n'
    writer = _Writer(most - _END_BYTES, undone, session)
    boundaries = Boundaries(undone)
    count, written = len(cells), 0
    for cell in islice(cells, count):
        pieces = writer.cell(cell)
        if pieces is None:
            break
        yield b",\n" if written else b""
        if lost := boundaries.before(cell):
            yield shown(_text(f"boundary-{cell.number}", f"**{lost}**")) + b",\n"
        yield shown(b"".join(pieces))
        written += 1
    if written < count:
        yield b",\n" if written else b""
        yield _left_out(written + 1, count)
    yield b"],\n"
    yield b'"metadata":%b,' % compact(dict(metadata))
    yield b'"nbformat":4,"nbformat_minor":5}\n'


def _left_out(first: int, last: int) -> bytes:
    text = f"[cells {first:,} to {last:,} left out: {_FULL}]"
    return _text("left-out", text)


def _text(name: str, text: str) -> bytes:
    return compact({"cell_type": "markdown", "id": name, "metadata": {}, "source": text})


class _Writer:
    """Writes cells within `most` bytes, of which outputs get half."""

    def __init__(self, most: int, undone: Container[int], session: str = "") -> None:
        self._undone = undone
        self._session = session
        self._left = most
        self._outputs_left = most // 2
        self._values_left = JSON_VALUES

    def cell(self, cell: Cell) -> list[bytes] | None:
        """Return a code cell with its outputs; None if it does not fit."""
        outcome = cell.outcome
        count = cell.execution_count
        outputs = self._outputs(cell, count)
        cause = outcome.cause if outcome else None
        remarks: dict[str, Any] = {
            "status": cell.status.value,
            "cause": cause,
            "author": cell.author,
        }
        if self._session:
            remarks |= {"session": self._session, "cell": cell.number}
        tags = {"tags": ["undone"]} if cell.number in self._undone else {}
        head = {
            "id": f"cell-{cell.number}",
            "cell_type": "code",
            "metadata": {"kernel-mcp": {k: v for k, v in remarks.items() if v}, **tags},
            "execution_count": count,
        }
        pieces = [compact(head)[:-1], b',"source":', *string([cell.recorded]), b',"outputs":[']
        for place, output in enumerate(outputs):
            pieces.append(b",\n" if place else b"\n")
            pieces += output
        pieces.append(b"]}")
        self._left -= sum(map(len, pieces)) + 2
        return pieces if self._left >= 0 else None

    def _outputs(self, cell: Cell, count: int | None) -> list[list[bytes]]:
        outputs: list[list[bytes]] = []
        stream: StreamName = "stdout"
        missing = 0
        for item in cell.log.since(limit=max(0, min(STREAM_CHARS, self._outputs_left))):
            if isinstance(item, TextItem):
                stream = item.name
            if isinstance(item, DisplayItem) and item.cell != cell.number:
                continue
            output = or_fallback(
                partial(self._output, item, stream, count),
                lambda why: self._kept(_stream("stderr", [f"{why}\n"])),
            )
            if output is None:
                missing += 1
            else:
                outputs.append(output)
        if missing:
            words = f"[{missing} more outputs of this cell left out: {_FULL}]\n"
            outputs.append(_stream("stderr", [words]))
        return outputs

    def _output(self, item: Item, stream: StreamName, count: int | None) -> list[bytes] | None:
        """Return an output; None if nothing of it fits."""
        if isinstance(item, DisplayItem):
            return self._display(item, count)
        if isinstance(item, TextItem):
            return self._kept(_stream(stream, slices(item.text)))
        if isinstance(item, GapItem):
            return self._kept(_stream(stream, [f"\n{omission(item.characters)}\n"]))
        if isinstance(item, FailureItem):
            return self._kept(_error(item))
        return self._kept(_stream("stderr", [f"{item.text}\n"]))

    def _display(self, item: DisplayItem, count: int | None) -> list[bytes] | None:
        kinds: dict[str, list[bytes]] = {}
        missing: list[str] = []
        own = _own_text(item.metadata)
        for part in item.parts:
            if part.mime in kinds or part.mime in FOR_VIEWS:
                continue
            is_text = part.mime == "text/plain" and own
            value = [*string([own])] if is_text else self._value(part)
            if isinstance(value, str):
                missing.append(f"[{part.mime} left out: {value}]")
            else:
                kinds[part.mime] = value
        if missing and not kinds and self._outputs_left <= _END_BYTES:
            return None
        if missing:
            kinds.setdefault("text/plain", [compact("\n".join(missing))])
        pieces = [b'{"output_type":"display_data"']
        if item.result:
            pieces = [b'{"output_type":"execute_result","execution_count":', compact(count)]
        remarks = {OWN: {"left_out": missing}} if missing else {}
        metadata = {name: each for name, each in item.metadata.items() if name != OWN or not own}
        pieces += [b',"metadata":', compact({**metadata, **remarks}), b',"data":{']
        for place, (mime, value) in enumerate(kinds.items()):
            pieces += [b"," if place else b"", compact(mime), b":", *value]
        pieces.append(b"}}")
        self._outputs_left -= 200 + sum(map(len, missing))
        return pieces

    def _value(self, part: Representation) -> list[bytes] | str:
        """Return the value of a part as the schema requires, or the reason why it has none.

        JSON types have JSON values, other types have text.
        """
        if part.problem:
            return part.problem
        try:
            if part.structured and _JSON.fullmatch(part.mime):
                pieces = self._json(part)
            else:
                pieces = self._kept(string(part.pieces()))
        except NotJson as error:
            return str(error)
        except OSError as error:
            return f"the server could not read it ({error.strerror})"
        return _FULL if pieces is None else pieces

    def _json(self, part: Representation) -> list[bytes] | None:
        """Return the checked JSON of a part; None if it does not fit. Raises NotJson, OSError.

        The values of a refused part count towards `JSON_VALUES` too.
        """
        shape = Shape()
        try:
            return self._kept(checked(part.raw(), shape, self._values_left, JSON_DEPTH))
        finally:
            self._values_left = max(0, self._values_left - shape.values)

    def _kept(self, pieces: Iterable[bytes]) -> list[bytes] | None:
        """Return all pieces; None if they do not fit."""
        kept: list[bytes] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > self._outputs_left:
                return None
            kept.append(piece)
        self._outputs_left -= size
        return kept


def _own_text(metadata: Mapping[str, Any]) -> str:
    """Return the text by which matplotlib describes a figure; empty for other displays.

    The answer to the agent has a description of the data instead.
    """
    own = metadata.get(OWN)
    text = own.get("text") if isinstance(own, dict) else ""
    return text if isinstance(text, str) and len(text) <= TEXT_CHARS else ""


def _stream(name: StreamName, text: Iterable[str]) -> list[bytes]:
    head = b'{"output_type":"stream","name":%b,"text":' % compact(name)
    return [head, *string(text), b"}"]


def _error(item: FailureItem) -> list[bytes]:
    failure = item.failure
    return [
        compact(
            {
                "output_type": "error",
                "ename": failure.name,
                "evalue": failure.value,
                "traceback": list(failure.traceback),
            }
        )
    ]
