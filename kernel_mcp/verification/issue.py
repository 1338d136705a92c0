"""Issue the receipt of a verification, and keep it with its session and beside its notebook."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Collection, Sequence
from typing import cast

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.output.markup import utf8
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.verified import Verified
from kernel_mcp.verification.files import digests_of, opened
from kernel_mcp.verification.receipt import (
    MARK,
    CellResult,
    Receipt,
    ReceiptCell,
    ReceiptFile,
    Result,
    code_hash,
    receipt_path,
)
from kernel_mcp.verification.report import CellResult as Compared
from kernel_mcp.verification.report import Report, Verdict
from kernel_mcp.verification.steps import Step

_HEAD_BYTES = 4096
"""Bytes of a file in which the mark of a receipt is looked for."""
_RESULTS: dict[Verdict, Result] = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.DIFFERS: "differs",
    Verdict.FRAGILE: "fragile",
    Verdict.FAILED: "does not run",
}


def issue(
    session: Session, path: str, steps: Sequence[Step], report: Report, doors: Collection[str]
) -> str:
    """Make the receipt, keep it, and return a sentence on its place. Blocking.

    Without a notebook (`path`) it is in exports of the session alone.
    """
    receipt = receipt_of(session.workspace, steps, report, doors)
    data = receipt.as_json()
    results = zip(steps, receipt.cells, strict=True)
    session.verified = Verified({step.number: cell.result for step, cell in results}, data)
    if not path:
        return ""
    place = receipt_path(path)
    if _is_other(session.workspace, place):
        return f" No receipt was written: {place!r} is a file of another kind."
    try:
        size = session.workspace.write_file(place, data)
    except WorkspaceError as error:
        return f" No receipt was written: {error}"
    session.events.wrote(place, size, data)
    return f" Receipt: {place!r}."


def _is_other(workspace: Workspace, place: str) -> bool:
    """Return True if there is a file that is no receipt. Blocking."""
    try:
        found = workspace.open_file(place)
    except WorkspaceError:
        return False  # none is there, or writing it is refused with the reason
    with contextlib.closing(found):
        return MARK not in found.read(0, _HEAD_BYTES)


def receipt_of(
    workspace: Workspace, steps: Sequence[Step], report: Report, doors: Collection[str]
) -> Receipt:
    """Return the receipt of a verification; `report.cells` are the results of `steps`."""
    cells = tuple(
        ReceiptCell(
            cell=number, code=code_hash(step.source), result=_result(compared, report.verdict)
        )
        for number, (step, compared) in enumerate(zip(steps, report.cells, strict=True), 1)
    )
    made = _RESULTS[report.verdict]
    if made == "reproduced" and any(each.result == "not repeated" for each in cells):
        made = "incomplete"
    seen: dict[str, tuple[set[int], bool]] = {}
    for number, step in enumerate(steps, 1):
        for path, mode, _ in opened(step):
            if mode != "d" and path.isprintable():
                by, written = seen.get(path, (set(), False))
                seen[path] = by | {number}, written or "w" in mode
    digests = digests_of(workspace, sorted(seen))
    files = {
        written: tuple(
            ReceiptFile(path=path, sha256=digests[path], cells=tuple(sorted(by)))
            for path, (by, changes) in sorted(seen.items())
            if path in digests and changes is written
        )
        for written in (False, True)
    }
    records = [step.record for step in steps if step.record]
    last = records[-1] if records else {}
    words = utf8(report.text).decode()[:200]
    return Receipt(
        made=round(time.time(), 3),
        result=made,
        python=str(last.get("python", ""))[:200],
        platform=f"{sys.platform}-{platform.machine()}",
        environment=str(last.get("env", ""))[:200],
        hash_seeds=(_number(last.get("seed")), report.seed),
        doors=tuple(sorted(doors)),
        cells=cells,
        inputs=files[False],
        outputs=files[True],
        differences=() if report.verdict is Verdict.REPRODUCED else (words,),
    )


def _result(compared: Compared, verdict: Verdict) -> CellResult:
    if compared.note:
        return "skipped" if compared.note == "not compared" else "not repeated"
    if compared.same:
        return "same"
    if compared.difference is None:
        return "failed"
    return "fragile" if verdict is Verdict.FRAGILE else "differs"


def _number(value: object) -> int:
    is_seed = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
    return cast("int", value) if is_seed else 0
