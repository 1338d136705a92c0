"""Repeat cells in a kernel of its own, on a copy of the workspace, with the doors closed."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio

from kernel_mcp.errors import InputError
from kernel_mcp.launch.base import Replay
from kernel_mcp.output.items import Failure
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.storage import SCRIPT
from kernel_mcp.units import GIB
from kernel_mcp.verification.clock import Run as Timing
from kernel_mcp.verification.comparison import Difference, first_difference
from kernel_mcp.verification.steps import Output, Step, outputs_of

FACTOR, SLACK_S = 3.0, 5.0
"""A repeated cell is stopped after `FACTOR` times its recorded time and `SLACK_S` seconds."""
MOST_BYTES = GIB
MOST_FILES = 20_000
"""Bounds of the copy of a workspace."""

Report = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A repeated cell: its outputs, how it ended, and the exception that ended it, if any.

    `missing` is what it lacked, as named by `policy.missing`.
    """

    step: Step
    outputs: tuple[Output, ...]
    status: Status
    failure: Failure | None = None
    timing: Timing = Timing(0.0, 0.0)
    record: dict[str, Any] = field(default_factory=dict)
    missing: str = ""

    @property
    def difference(self) -> Difference | None:
        """The difference from the original; None if there is none, or nothing to compare."""
        if self.step.outputs is None:
            return None
        before = timing_of(self.step.record, self.step.duration_s, self.timing.began)
        return first_difference(self.step.outputs, self.outputs, before, self.timing)

    @property
    def broke(self) -> bool:
        """True if it did not end as the original did."""
        as_then = self.status is Status.OK or (
            self.status is Status.ERROR and (self.step.failed or self.step.may_raise)
        )
        return not as_then


def timing_of(record: Mapping[str, Any], duration_s: float, otherwise: float) -> Timing:
    """Return when a cell ran, by its record; `otherwise` is its Unix time if that is unknown."""
    began, pid = record.get("time"), record.get("pid")
    known = float(began) if isinstance(began, (int, float)) else otherwise
    return Timing(known, known + duration_s, pid if isinstance(pid, int) else None)


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: the cells in order, up to the first that did not end as the original did."""

    cells: tuple[Repeated, ...]

    @property
    def broken(self) -> Repeated | None:
        """The cell that ended the replay too early; None for none."""
        return self.cells[-1] if self.cells and self.cells[-1].broke else None

    @property
    def first_difference(self) -> int | None:
        """The place of the first cell that differs from its original; None for none."""
        found = (place for place, cell in enumerate(self.cells) if cell.difference is not None)
        broken = len(self.cells) - 1 if self.broken is not None else None
        return next(found, broken)

    @property
    def equal(self) -> bool:
        """True if every cell gave what its original gave."""
        return self.first_difference is None

    def agrees(self, other: Run) -> bool:
        """Return True if two replays of the same cells gave the same."""
        return len(self.cells) == len(other.cells) and all(
            ours.status is theirs.status
            and first_difference(ours.outputs, theirs.outputs, ours.timing, theirs.timing) is None
            for ours, theirs in zip(self.cells, other.cells, strict=True)
        )


class Repeats(Protocol):
    """Repeats cells."""

    async def __call__(self, steps: Sequence[Step], how: Replay) -> Run:
        """Return what the cells gave. Raises KernelMcpError if no kernel can be started."""


@dataclass(frozen=True, slots=True)
class Replayer:
    """Repeats cells of one session in sessions of their own, which end with each replay.

    notebook  path of the notebook in whose folder cells run; empty for none
    made      paths of the workspace, relative to it, that cells have made: they are not copied,
              nor the content of folders among them
    """

    manager: SessionManager
    caller: Caller
    session: Session
    notebook: str
    opened: frozenset[str]
    report: Report
    made: Collection[str] = ()

    async def __call__(self, steps: Sequence[Step], how: Replay) -> Run:
        """Repeat the cells. Raises KernelMcpError if there is no room or no kernel for them."""
        asked = self.session.request
        how = replace(how, layer=asked.layer, opened=self.opened)
        other = await self.manager.create(
            self.caller,
            name=SCRIPT,
            packages=asked.packages,
            python=asked.python,
            limits=asked.limits,
            timeout_s=self.session.timeout_s,
            network=asked.network if "network" in self.opened else (),
            replay=how,
        )
        try:
            with other.needed():
                copying = partial(
                    copy_tree, self.session.workspace.root, other.workspace.root, self.made
                )
                await anyio.to_thread.run_sync(copying)
                return await self._through(other, steps)
        finally:
            with anyio.CancelScope(shield=True):
                await self.manager.close(other)
                self.manager.tombstones.mark_delivered(other.handle)

    async def _through(self, other: Session, steps: Sequence[Step]) -> Run:
        done: list[Repeated] = []
        todo = [each for each in steps if not each.omitted]
        for place, step in enumerate(todo, start=1):
            await self.report(f"Repeating {step.name}, {place} of {len(todo)}")
            cell = await self._one(other, step)
            outputs = await anyio.to_thread.run_sync(outputs_of, cell)
            failures = cell.log.failures
            timing = timing_of(cell.record, cell.duration_s, time.time() - cell.duration_s)
            failure = failures[-1] if failures else None
            done.append(
                Repeated(
                    step, outputs, cell.status, failure, timing, dict(cell.record), cell.missing
                )
            )
            if done[-1].broke:
                break
        return Run(tuple(done))

    async def _one(self, other: Session, step: Step) -> Cell:
        limit_s = FACTOR * step.duration_s + SLACK_S if step.duration_s else other.timeout_s
        cell = other.submit(step.source, limit_s)
        cell.notebook = self.notebook
        with other.queue.attending(cell):
            try:
                await other.scheduler.follow(cell, float("inf"), None)
            except anyio.get_cancelled_exc_class():
                cell.stop(StopReason.CANCEL)
                raise
        return cell


def copy_tree(source: Path, target: Path, made: Collection[str] = ()) -> None:
    """Copy files, folders and symlinks, without the paths in `made`. Blocking.

    Symlinks are not followed; sockets and devices are left out. Raises InputError for a workspace
    beyond `MOST_BYTES` or `MOST_FILES`, OSError.
    """
    count = size = 0
    for folder, names, files, fd in os.fwalk(source, follow_symlinks=False):
        names[:] = [each for each in names if _below(source, folder, each) not in made]
        for name in (*names, *files):
            path = _below(source, folder, name)
            if path in made:
                continue
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            count += 1
            size += info.st_size if stat.S_ISREG(info.st_mode) else 0
            if count > MOST_FILES or size > MOST_BYTES:
                raise InputError(
                    f"The workspace is too large to be copied for a replay: it has more than "
                    f"{MOST_FILES:,} files or {MOST_BYTES // GIB} GiB. Move data into a mount, or "
                    "remove what the cells do not read."
                )
            _copy_entry(name, fd, target / path, info)


def _below(source: Path, folder: str, name: str) -> str:
    return os.path.relpath(os.path.join(folder, name), source)  # noqa: PTH118  # as records have it


def _copy_entry(name: str, fd: int, target: Path, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        target.mkdir(exist_ok=True)
    elif stat.S_ISLNK(info.st_mode):
        target.symlink_to(os.readlink(name, dir_fd=fd))
    elif stat.S_ISREG(info.st_mode):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=fd), "rb") as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
        target.chmod(stat.S_IMODE(info.st_mode) & 0o777)
