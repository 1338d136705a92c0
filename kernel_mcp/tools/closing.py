"""The sentence that closes an answer about a cell: its status, what was lost, what to do next."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Container
from dataclasses import replace

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.policy.missing import advice
from kernel_mcp.sessions.cell import Cell, Phase, Status, StopReason
from kernel_mcp.sessions.losses import FILES_KEPT, lost_names
from kernel_mcp.sessions.session import Session

MOST_SEARCHED = 50
"""Maximum number of folders that are searched for a module."""
# bound: 400 characters
_NO_FILE = re.compile(r"No such file or directory: '([^'\n]{1,300})'")


def closing_line(session: Session, cell: Cell, most_s: float) -> str:
    """Return the sentence on the status of a cell; empty when its output says enough.

    `most_s` is the longest timeout, in seconds, that a call may ask for.
    """
    contents = session.kernel_state.contents
    match cell.status:
        case Status.QUEUED:
            before, running = session.queue.place(cell), session.queue.current
            others = f"{before} other {'cell' if before == 1 else 'cells'}"
            stops = "stop the cell that is running"
            if running is not None and running.author:
                others, stops = f"{others}, of which a {running.author} runs one", "give it up"
            return (
                f"queued: cell {cell.number} begins after {others}. Call wait to follow, interrupt "
                f"to {stops}"
            )
        case Status.RUNNING if not cell.listens:
            step = f" ({cell.steps[-1]})" if cell.steps else ""
            installs = cell.phase is Phase.INSTALL
            doing = "its packages are being installed" if installs else "kernels are being prepared"
            return (
                f"running: {doing}{step}; cell {cell.number} begins then. Call wait to follow, "
                "interrupt to give it up"
            )
        case Status.RUNNING:
            ends = "interrupt to stop it"
            if not session.request.interpreter.offers("interrupt"):
                ends = "reset to end it with its kernel, which its time limit ends too"
            return f"running: cell {cell.number} goes on. Call wait for more output, {ends}"
        case Status.INTERRUPTED:
            return f"interrupted: {_cause(cell)}.{_kept(cell)}"
        case Status.TIMEOUT:
            longer = _longer(cell, most_s)
            return f"timeout: {_cause(cell)} and was interrupted.{_kept(cell)}{longer}"
        case Status.KILLED if cell.rollback:
            return f"killed: {_cause(cell)}. {cell.rollback}"
        case Status.KILLED if cell.stop_reason in (StopReason.RESET, StopReason.CLOSE):
            return f"killed: {_cause(cell)}, and its {contents} are lost"
        case Status.KILLED if _run_since(session, cell):
            return (
                f"killed: {_cause(cell)}. All {contents} made before are lost; {FILES_KEPT}. "
                f"Later cells have run on a fresh kernel.{_lost(cell, made_anew(session, cell))}"
            )
        case Status.KILLED if session.request.interpreter.external:
            return (
                f"killed: {_cause(cell)}. The variables that were there are lost to this session; "
                f"the next cell joins what is there then.{_lost(cell)}"
            )
        case Status.KILLED:
            fresh = "is ready" if session.kernel is not None else "starts with the next cell"
            return (
                f"killed: {_cause(cell)}. All {contents} of this session are lost; {FILES_KEPT}. "
                f"A fresh kernel {fresh}.{_lost(cell)}"
            )
        case Status.ERROR | Status.OK:
            return next_step(session, cell)
        case _:
            return ""


def next_step(session: Session, cell: Cell) -> str:
    """Return advice on a module or program that `cell` lacked; empty if it lacked none."""
    kernel = session.kernel
    if not cell.missing or kernel is None:
        return ""
    return advice(cell.missing, cell.code, kernel.policy, kernel.environment.version)


def place_in_mount(session: Session, cell: Cell) -> str:
    """Return where the file or module is that a cell did not find, if it is there. Blocking."""
    workspace = session.workspace
    if cell.missing.isidentifier():
        found = _modules_below(workspace, cell.missing)
        folders = [place.removesuffix("/__init__.py").rpartition("/")[0] for place in found]
        step = "import it after " + " or ".join(f"sys.path.append({each!r})" for each in folders)
    else:
        failure = next(iter(reversed(cell.log.failures)), None)
        if failure is None or failure.name != "FileNotFoundError":
            return ""
        asked = _NO_FILE.search(failure.value[:400])
        found = workspace.elsewhere(asked[1]) if asked is not None else []
        step = "open it by this path" if len(found) == 1 else "open the one that is meant"
    where = workspace.where(found)
    return f"There is {' and '.join(found)}, {where}: {step}" if found else ""


def _modules_below(workspace: Workspace, name: str) -> list[str]:
    """Return the least deep files from which a module of this name could be imported.

    Folders that could be packages are searched, `MOST_SEARCHED` at most.
    """
    waiting = deque((path, 0) for path in (workspace.path, *workspace.mounted))
    found: dict[str, int] = {}
    for _ in range(MOST_SEARCHED):
        if not waiting or waiting[0][1] > min(found.values(), default=MOST_SEARCHED):
            break
        folder, depth = waiting.popleft()
        with contextlib.suppress(WorkspaceError):
            for entry in workspace.list_files(folder).entries:
                last = entry.path.rpartition("/")[2]
                if entry.kind == "folder" and last.isidentifier():
                    waiting.append((f"{folder}/{last}", depth + 1))
                elif last == f"{name}.py" and entry.kind == "file":
                    found[f"{folder}/{last}"] = depth
                elif last == "__init__.py" and folder.endswith(f"/{name}"):
                    found[f"{folder}/{last}"] = depth - 1
    least = min(found.values(), default=0)
    return [place for place, depth in found.items() if depth == least]


def _longer(cell: Cell, most_s: float) -> str:
    if cell.stop_reason is StopReason.CPU:
        return ""
    if cell.timeout_s >= most_s:
        return " No call may ask for more (--max-timeout): do it in several cells"
    return f" Pass a larger timeout if it needs longer, at most {most_s:g}"


def _cause(cell: Cell) -> str:
    return (cell.outcome.cause if cell.outcome else None) or "stopped"


def _kept(cell: Cell) -> str:
    kept = cell.outcome is None or cell.outcome.state_kept
    return " Variables are kept." if kept and not cell.losses else ""


def _lost(cell: Cell, but: Container[str] = ()) -> str:
    if cell.caused_loss is None or cell.caused_loss.loss is None:
        return ""
    loss = cell.caused_loss.loss
    return lost_names(replace(loss, names=tuple(name for name in loss.names if name not in but)))


def _run_since(session: Session, cell: Cell) -> bool:
    last = session.cells[-1]
    return last.number > cell.number and last.status is not Status.QUEUED


def made_anew(session: Session, cell: Cell) -> frozenset[str]:
    """Return variables that are defined on the fresh kernel after the cell that lost them."""
    if session.kernel is None or not cell.losses or not _run_since(session, cell):
        return frozenset()
    return frozenset(session.kernel.names)
