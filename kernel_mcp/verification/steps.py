"""The cells that a verification repeats, with what was recorded of them when they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeAlias

from kernel_mcp.errors import InputError
from kernel_mcp.notebooks.document import NotebookCell, NotebookDocument
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell, Phase, Status
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.notebook_export import cell_as_json
from kernel_mcp.verification.names import flow_of

Output: TypeAlias = Mapping[str, Any]
"""An output of a notebook's cell, as JSON values."""
SKIP_TAG = "skip-verify"
"""Tag of notebook cells that are run, and whose outputs are not compared."""
CUT_SHORT = (Status.INTERRUPTED, Status.TIMEOUT, Status.KILLED)
"""Ends of cells that are not repeated: where they stopped is chance."""


@dataclass(frozen=True, slots=True)
class Step:
    """A cell to repeat.

    name        as answers call it, such as "cell 5"
    number      its number in the log of its session; 0 if unknown
    outputs     what it put out; None if that is not compared
    failed      True if it ended with an error
    duration_s  seconds that it took; 0 if unknown
    omitted     why it is not run; empty if it is
    record      what its kernel recorded of it; empty for nothing
    """

    name: str
    source: str
    number: int = 0
    outputs: tuple[Output, ...] | None = None
    failed: bool = False
    may_raise: bool = False
    duration_s: float = 0.0
    omitted: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Log:
    """The cells of a session as they ran, in the order of their numbers, without undone ones.

    `fresh` are the numbers of the cells before which all variables were lost, or never made.
    """

    steps: tuple[Step, ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """Number of the first cell of the last kernel."""
        return max(self.fresh, default=1)

    def of(self, number: int) -> Step | None:
        """Return the cell with a number; None if there is none."""
        return next((each for each in self.steps if each.number == number), None)

    def until(self, number: int) -> list[Step]:
        """Return the cells, up to `number`, of the kernel that ran it, which were not cut short."""
        first = max((each for each in self.fresh if each <= number), default=1)
        return [each for each in self.steps if first <= each.number <= number and not each.omitted]


def log_of(cells: History) -> Log:
    """Return the log of a session. Blocking: it reads files."""
    ran = [
        each
        for each in cells
        if each.phase is Phase.RUN and each.outcome is not None and each.number not in cells.undone
    ]
    fresh = [each.number for each in ran if each.began_as_of == 0]
    return Log(tuple(map(_of_log, ran)), tuple(fresh))


def _of_log(cell: Cell) -> Step:
    made = cell_as_json(cell)
    return Step(
        f"In[{cell.number}]",
        cell.recorded,
        cell.number,
        tuple(made["outputs"]),
        failed=cell.status is Status.ERROR,
        duration_s=cell.duration_s,
        omitted=_cut_short(cell.status.value),
        record=cell.record,
    )


def _cut_short(status: str) -> str:
    return f"it ended as {status}" if status in {each.value for each in CUT_SHORT} else ""


def steps_of_log(log: Log) -> list[Step]:
    """Return the cells of a session's present kernel, to repeat them as they stand."""
    return [each for each in log.steps if each.number >= log.first]


def steps_of(document: NotebookDocument, log: Log, cells: str = "all") -> list[Step]:
    """Return the code cells of a notebook in its order, with their records from the log.

    `cells` is "all" or "to ID". Raises InputError for other values.
    """
    if cells != "all" and not cells.startswith("to "):
        raise InputError(f"cells={cells!r} is not usable: pass all, or to ID.")
    last = len(document.cells)
    if cells != "all":
        last = document.place(cells[3:].strip()) + 1
    known = log if recorded_in(document.cells, log) else Log()
    found = [
        _of_notebook(place, each, known)
        for place, each in enumerate(document.cells[:last], start=1)
        if each.kind == "code" and each.source.strip() and not each.is_skipped
    ]
    return _numbered(found, known)


def _numbered(steps: Sequence[Step], log: Log) -> list[Step]:
    """Return the steps, those without a number with that of the cell of the log in their place.

    Editors that remove the outputs of a changed cell remove its execution count, too.
    """
    there = {each.number for each in steps}
    made: list[Step] = []
    before = 0
    for place, step in enumerate(steps):
        found = step
        if not step.number:
            later = (each.number for each in steps[place:] if each.number > before)
            until = next(later, log.steps[-1].number + 1 if log.steps else 0)
            fits = [
                each
                for each in log.steps
                if before < each.number < until and each.number not in there and not each.omitted
            ]
            like = [each for each in fits if _alike(each.source, step.source)]
            if like:
                found = replace(step, number=like[-1].number)
        made.append(found)
        before = max(before, found.number)
    return made


def _alike(one: str, other: str) -> bool:
    """Return True if one code is a change of the other: they bind the same, or share a line."""
    if flow_of(one).binds & flow_of(other).binds:
        return True
    lines = ({each.strip() for each in code.splitlines() if each.strip()} for code in (one, other))
    return bool(next(lines) & next(lines))


def recorded_in(cells: Sequence[NotebookCell], log: Log) -> bool:
    """Return True if the execution counts of most cells are numbers of this log."""
    run = [each for each in cells if each.kind == "code" and each.count is not None]
    found = 0
    for each in run:
        logged = log.of(each.count or 0)
        found += logged is not None and logged.source == each.source
    return 2 * found > len(run)


def _of_notebook(place: int, cell: NotebookCell, log: Log) -> Step:
    number = cell.count or 0
    logged = log.of(number)
    remarks = cell.value.get("metadata")
    own = remarks.get("kernel-mcp") if isinstance(remarks, Mapping) else None
    status = str(own.get("status", "")) if isinstance(own, Mapping) else ""
    errors = [each for each in cell.outputs if each.get("output_type") == "error"]
    cut = _cut_short(status) or ("" if logged is None else logged.omitted)
    if any(each.get("ename") == "KeyboardInterrupt" for each in errors):
        cut = cut or _cut_short(Status.INTERRUPTED.value)
    compared = cell.count is not None or bool(cell.outputs)
    return Step(
        f"cell {place}",
        cell.source,
        number,
        tuple(cell.outputs) if compared and not cell.has(SKIP_TAG) else None,
        failed=bool(errors),
        may_raise=cell.may_raise,
        duration_s=0.0 if logged is None else logged.duration_s,
        omitted=cut,
        record={} if logged is None else logged.record,
    )


def outputs_of(cell: Cell) -> tuple[Output, ...]:
    """Return the outputs of a cell as those of a notebook. Blocking."""
    return tuple(cell_as_json(cell)["outputs"])
