"""The result of a verification."""

from __future__ import annotations

from enum import Enum

from kernel_mcp.records import dataclass
from kernel_mcp.verification.comparison import Difference
from kernel_mcp.verification.replay import Repeated, Run
from kernel_mcp.verification.steps import Step


class Verdict(str, Enum):
    """The verdict on cells; it says nothing on whether their answers are right."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    FRAGILE = "fragile"
    """It differs, and is equal with the original's hash seed and order of folders."""
    FAILED = "failed"
    """It did not run to the end."""


class Cause(str, Enum):
    """The cause of a difference, as far as replays or records have shown it."""

    NONE = ""
    UNKNOWN = "unknown"
    EDITED = "edited"
    DELETED = "deleted"
    ORDER = "order"
    REPEATED = "repeated"
    EARLIER_KERNEL = "earlier_kernel"
    FILE_CHANGED = "file_changed"
    FILE_MISSING = "file_missing"
    GENERATOR = "generator"
    ENTROPY = "entropy"
    CLOCK = "clock"
    THREADS = "threads"
    HASH_SEED = "hash_seed"
    FOLDER_ORDER = "folder_order"
    NETWORK = "network"
    READ_ONLY = "read_only"
    TOOLS = "tools"
    ENVIRONMENT = "environment"
    TIME_LIMIT = "time_limit"
    NEVER_DEFINED = "never_defined"


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell: `note` says why it was not compared, empty if it was."""

    name: str
    same: bool
    difference: Difference | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict, its cause, the cell concerned ("" for none), and all of it in words.

    `seed` is the fingerprint of the first replay's hash seed, `receipt` says where the receipt is.
    """

    verdict: Verdict
    text: str
    cause: Cause = Cause.NONE
    cell: str = ""
    cells: tuple[CellResult, ...] = ()
    seconds: float = 0.0
    seed: int = 0
    receipt: str = ""


def results_of(steps: list[Step], run: Run) -> tuple[CellResult, ...]:
    """Return the results of all steps, those that a replay did not reach included."""
    done = {id(each.step): each for each in run.cells}
    return tuple(_result(step, done.get(id(step))) for step in steps)


def _result(step: Step, done: Repeated | None) -> CellResult:
    if step.omitted:
        return CellResult(step.name, False, note=f"not repeated: {step.omitted}")
    if done is None:
        return CellResult(step.name, False, note="not reached")
    if step.outputs is None:
        return CellResult(step.name, False, note="not compared")
    found = done.difference
    return CellResult(step.name, found is None and not done.broke, found)


def counted(results: tuple[CellResult, ...]) -> tuple[int, int]:
    """Return how many cells were the same, and of how many."""
    return sum(each.same for each in results), len(results)


def notes(results: tuple[CellResult, ...]) -> str:
    """Return a sentence on cells that were not compared; empty if all were."""
    left = [f"{each.name} ({each.note})" for each in results if each.note]
    if not left:
        return ""
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f" Left out: {', '.join(left[:3])}{more}."
