"""All cells of a session. Cells that may still change are in memory, the others on disk."""

from __future__ import annotations

import json
import logging
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, overload

import anyio

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.kernels.run import CellUsage
from kernel_mcp.linux.pipes import checksum
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.output.displays import DisplayIndex
from kernel_mcp.output.outputs import OutputLog, Position
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell, CellOutcome, Phase, Status
from kernel_mcp.sessions.notifications import Loss, Notice
from kernel_mcp.sessions.sharing import totals
from kernel_mcp.telemetry.origin import Origin
from kernel_mcp.units import KIB, MIB

SEGMENT_BYTES = 4 * MIB
"""Size in bytes at which a file is full. Only complete files are removed."""
READ_BYTES = 4 * KIB
"""Bytes of the first read of a row; most rows are shorter."""

_SPAN = 2**32
"""The place of a row is the number of its file times this, plus its offset in the file."""


def _line(text: bytes) -> bytes:
    return checksum(text).encode() + b" " + text + b"\n"


def _text(line: bytes) -> bytes:
    """Return the text of a row. Raises ValueError if its checksum does not match.

    Rows of format 1 (see `manifest`) have no checksum.
    """
    if line[:1] == b"{":
        return line
    given, _, text = line.partition(b" ")
    if given != checksum(text).encode():
        raise ValueError("its checksum is not that of its content")
    return text


class RowFiles:
    """JSON rows in files `cells-<k>.jsonl` of `folder`; no file stays open.

    A line is the checksum of a row, followed by the row. Any thread may read. All methods raise
    OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[int, int] = {}
        self._newest = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes in all files."""
        return sum(self._sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by number."""
        return {str(segment): size for segment, size in self._sizes.items()}

    def restore(self, sizes: Mapping[str, int]) -> None:
        """Use the existing files up to these `sizes`; later rows are overwritten."""
        self._sizes = {int(segment): int(size) for segment, size in sizes.items()}
        self._newest = max(self._sizes, default=0)

    def append(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Append rows and return their places; the next call overwrites rows of a failed one."""
        if self._sizes.get(self._newest, 0) >= SEGMENT_BYTES:
            self._newest += 1
        offset = self._sizes.get(self._newest, 0)
        lines = [_line(json.dumps(row).encode()) for row in rows]
        places = []
        for line in lines:
            places.append(self._newest * _SPAN + offset)
            offset += len(line)
        self._write(b"".join(lines))
        self._sizes[self._newest] = offset
        return places

    def read(self, place: int) -> dict[str, Any]:
        """Return the row at a place. Raises OSError, also for a damaged row."""
        segment, offset = divmod(place, _SPAN)
        fd = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            line = os.pread(fd, READ_BYTES, offset)
            while b"\n" not in line[-READ_BYTES:] and (
                more := os.pread(fd, max(READ_BYTES, len(line)), offset + len(line))
            ):
                line += more
        finally:
            os.close(fd)
        try:
            row: dict[str, Any] = json.loads(_text(line.partition(b"\n")[0]))
        except ValueError as error:
            raise OSError(None, "its row is not whole") from error
        return row

    @property
    def oldest_end(self) -> int | None:
        """The place at which the oldest file ends; None if there is only one file."""
        oldest = min(self._sizes, default=self._newest)
        return None if oldest == self._newest else (oldest + 1) * _SPAN

    def drop_oldest(self) -> None:
        """Remove the oldest file."""
        oldest = min(self._sizes)
        self._path(oldest).unlink(missing_ok=True)
        del self._sizes[oldest]

    def _write(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(self._newest), flags, 0o600)
        try:
            start, done = self._sizes.get(self._newest, 0), 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], start + done)
        finally:
            os.close(fd)

    def _path(self, segment: int) -> Path:
        return self._folder / f"cells-{segment}.jsonl"


BATCH = 16
"""Number of ended cells between two calls of `settle`."""
ROWS_SHARE = 4
"""Rows may take 1 / `ROWS_SHARE` of a record's bytes, files of outputs the rest."""

_STATUSES = tuple(Status)
_ABSENT = 2**64 - 1

logger = logging.getLogger(__name__)


class History(Sequence[Cell]):
    """The cells of a session in order, number n at index n - 1.

    The newest cell stays in memory. So does one of which something was not reported, whose output
    may still arrive, or whose displays an update can reach. Any other is a row on disk, read at
    each access, and some 20 bytes in memory. Any thread may read.
    """

    def __init__(self, folder: Path, displays: DisplayIndex[OutputLog]) -> None:
        self._folder = folder
        self._displays = displays
        self._rows = RowFiles(folder)
        self._live: dict[int, Cell] = {}
        self._places = array("Q")
        self._file_bytes = array("Q")
        """Bytes of the output files of each cell on disk; 0 once they have been removed."""
        self._filed_bytes = 0
        self._statuses = bytearray()
        self._ended = 0
        self.undone: set[int] = set()
        """Numbers of cells that were undone."""
        self.notebook = PYTHON.notebook
        """The fields `kernelspec` and `language_info` of notebooks with these cells."""
        self._emptied = 0
        """The output files of cells up to this number have been removed."""
        self._begin = 0
        """The first place whose row has not been removed."""
        self._troubled = False
        nothing = OutputLog(folder, 0)
        self.before = Cell.ended(0, "", nothing, CellOutcome(Status.OK), 0.0)
        """In place of a cell: what tasks have put out since an undo or branch, before a cell."""

    def begin_again(self) -> Cell:
        """Return `before` for a kernel from a checkpoint, without output that was reported."""
        if self.before.late_since is None:
            self.before.log.evict("")
        return self.before

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Cell: ...
    @overload
    def __getitem__(self, index: slice) -> list[Cell]: ...
    def __getitem__(self, index: int | slice) -> Cell | list[Cell]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        number = range(1, len(self) + 1)[index]
        cell = self._live.get(number)
        return self._restored(number) if cell is None else cell

    @property
    def unreported(self) -> list[Cell]:
        """The cells whose end no delivered answer has reported, oldest first."""
        return [cell for cell in self._live.values() if not cell.end_reported]

    @property
    def late(self) -> list[Cell]:
        """Reported cells whose output since their end no delivered answer has had, oldest first."""
        found = [self.before, *self._live.values()]
        return [cell for cell in found if cell.end_reported and cell.late_since is not None]

    @property
    def in_memory(self) -> int:
        """Number of cells that are not on disk."""
        return len(self._live)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files: rows and outputs."""
        return self._rows.disk_bytes + self._output_bytes()

    def append(self, cell: Cell) -> None:
        """Add the cell that is next in number."""
        self._places.append(_ABSENT)
        self._file_bytes.append(0)
        self._statuses.append(0)
        self._live[cell.number] = cell

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON values.

        It contains the rows of cells in memory, and the places of the other rows in the folder. The
        first unfinished cell and all later ones are left out.
        """
        done = next((n - 1 for n, cell in self._live.items() if cell.outcome is None), len(self))
        live = {number: cell for number, cell in self._live.items() if number <= done}
        return {
            "places": self._places[:done].tolist(),
            "bytes": self._file_bytes[:done].tolist(),
            "statuses": list(self._statuses[:done]),
            "begin": self._begin,
            "emptied": min(self._emptied, done),
            "undone": sorted(self.undone),
            "rows": self._rows.sizes,
            "live": {
                str(number): [_STATUSES.index(cell.status), cell.log.disk_bytes, _row(cell)]
                for number, cell in live.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the cells of an earlier history in this folder. Blocking.

        Outputs of later cells are removed. Raises OSError, and ValueError for a malformed `state`.
        """
        try:
            places, sizes = array("Q", state["places"]), array("Q", state["bytes"])
            statuses = bytearray(state["statuses"])
            live = [(int(number), *each) for number, each in state["live"].items()]
            self._rows.restore(state["rows"])
            for number, status, size, _ in live:
                statuses[number - 1], sizes[number - 1] = status, size
            for (number, *_), place in zip(
                live, self._rows.append([row for *_, row in live]) if live else (), strict=True
            ):
                places[number - 1] = place
            if not len(places) == len(sizes) == len(statuses):
                raise ValueError("its counts differ")
            if any(status >= len(_STATUSES) for status in statuses):
                raise ValueError("it has a status that is none")
            self._begin, self._emptied = int(state["begin"]), int(state["emptied"])
            self.undone = set(map(int, state.get("undone", ())))
            self._places, self._file_bytes, self._statuses = places, sizes, statuses
            self._filed_bytes = sum(sizes)
            for number, *_, row in live:
                if row.get("late"):  # stays in memory until it is told
                    self._live[number] = self._restored(number)
                    self._filed_bytes -= sizes[number - 1]
                    places[number - 1], sizes[number - 1] = _ABSENT, 0
        except (KeyError, IndexError, TypeError, OverflowError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        for path in self._folder.glob("[0-9]*"):
            number = re.match("[0-9]+", path.name)
            if number is not None and int(number[0]) > len(places):
                path.unlink(missing_ok=True)  # output of a later cell

    def ended(self, cell: Cell, limit: int) -> None:
        """Count an ended cell; every `BATCH` cells move some to disk. Keep within `limit` bytes."""
        self._ended += 1
        if self._ended % BATCH == 0:
            self.settle()
        if cell.log.disk_bytes or self._ended % BATCH == 0:
            self.make_room(limit, before=cell.number)

    def settle(self, *, kernel_gone: bool = False) -> None:
        """Move cells to disk that can no longer change, and whose end was reported.

        The newest cell stays. So does the last one that receives output, unless the kernel is gone.
        If the write fails, all stay in memory, and a warning is logged.
        """
        if kernel_gone:
            self._displays.clear()
        listening = [number for number, cell in self._live.items() if cell.listens]
        stay = {len(self), *([] if kernel_gone else listening[-1:])}
        done = [
            cell
            for number, cell in self._live.items()
            if cell.end_reported
            and cell.late_since is None
            and cell.finished.is_set()
            and number not in stay
            and not self._displays.holds(cell.log)
        ]
        if not done:
            return
        try:
            places = self._rows.append([_row(cell) for cell in done])
        except OSError as error:
            if not self._troubled:
                logger.warning("cells stay in memory, as their record cannot be written: %s", error)
            self._troubled = True
            return
        self._troubled = False
        for cell, place in zip(done, places, strict=True):
            self._statuses[cell.number - 1] = _STATUSES.index(cell.status)
            self._file_bytes[cell.number - 1] = cell.log.disk_bytes
            self._filed_bytes += cell.log.disk_bytes
            self._places[cell.number - 1] = place
            del self._live[cell.number]

    def make_room(self, limit: int, *, before: int = 0) -> None:
        """Remove the oldest rows and outputs until the record has at most `limit` bytes.

        Cells in memory are not removed. Outputs from cell `before` on stay too; the default is the
        newest cell.
        """
        rows = limit // ROWS_SHARE
        while self._rows.disk_bytes > rows and (end := self._rows.oldest_end) is not None:
            for index, place in enumerate(self._places):
                if place < end and self._file_bytes[index]:
                    self._remove_outputs(index + 1)
            self._begin = end
            try:
                self._rows.drop_oldest()
            except OSError as error:
                logger.warning("a part of a session's record cannot be removed: %s", error)
                return
        while self._output_bytes() > limit - rows and self._emptied + 1 < (before or len(self)):
            number = self._emptied + 1
            cell = self._live.get(number)
            if cell is not None and not cell.log.closed:
                return
            self._remove_outputs(number)
            self._emptied = number

    def _remove_outputs(self, number: int) -> None:
        if number in self._live:
            if self._live[number].log.disk_bytes:
                self._live[number].log.evict()
        elif self._file_bytes[number - 1]:
            self._restored(number).log.evict()
            self._filed_bytes -= self._file_bytes[number - 1]
            self._file_bytes[number - 1] = 0

    def _output_bytes(self) -> int:
        return self._filed_bytes + sum(cell.log.disk_bytes for cell in self._live.values())

    def _restored(self, number: int) -> Cell:
        """Return a cell from its row; without a row it has only the status and a remark."""
        place, filed = self._places[number - 1], self._file_bytes[number - 1]
        outcome = CellOutcome(_STATUSES[self._statuses[number - 1]])
        log = OutputLog(self._folder, number)
        row = None
        if place < self._begin:
            log.evict()
        else:
            try:
                row = self._rows.read(place)
            except OSError as error:
                why = error.strerror or "it is damaged"
                log.evict(f"[… what was recorded of this cell cannot be read: {why} …]")
            else:
                log = OutputLog.restored(self._folder, number, row["log"])
                if log.disk_bytes and not filed:
                    log.evict()
        if row is None:
            return Cell.ended(number, "", log, outcome, 0.0)
        outcome = CellOutcome(outcome.status, *row["outcome"])
        cell = Cell.ended(number, row["code"], log, outcome, row["duration_s"])
        cell.phase, cell.numbered = Phase(row["phase"]), row["numbered"]
        cell.state_as_of, cell.author = row["state_as_of"], row.get("author", "")
        cell.began_as_of, cell.lost_before = row.get("began_as_of"), row.get("lost_before", "")
        cell.usage = CellUsage(*row.get("used", ()))
        cell.record = row.get("record", {})
        cell.origin = Origin(program=row.get("client", ""))
        if late := row.get("late"):
            generation, characters, tick, (out, err) = late
            cell.late_since = Position(generation, characters, tick, (out, err))
        losses = [Loss(cause, tuple(names), more) for cause, names, more in row["losses"]]
        cell.before = [Notice(0, "", loss) for loss in losses]
        return cell


def _row(cell: Cell) -> dict[str, Any]:
    outcome = cell.outcome
    assert outcome is not None
    return {
        "cell": cell.number,
        "code": cell.recorded,
        "author": cell.author,
        "client": cell.origin.program,
        "outcome": [outcome.state_kept, outcome.cause, outcome.exit_code],
        "phase": cell.phase.value,
        "numbered": cell.numbered,
        "state_as_of": cell.state_as_of,
        "began_as_of": cell.began_as_of,
        "lost_before": cell.lost_before,
        "late": None if cell.late_since is None else astuple(cell.late_since),
        "losses": [[loss.cause, loss.names, loss.more] for loss in cell.losses],
        "duration_s": cell.duration_s,
        "used": [cell.usage.cpu_s, cell.usage.peak_bytes],
        "record": cell.record,
        "log": cell.log.row(),
    }


# Closed sessions, such as those of scripts: their cells stay readable for `KEPT_S` seconds.

KEPT_S = 600.0
MOST_KEPT = 50
"""Maximum number of records of one owner; the oldest are removed first."""
KEPT_BYTES = 512 * MIB
"""Maximum bytes of all records on disk. The oldest of the owner with the most bytes are removed
first."""


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    cells: History
    until: float


class ClosedRecords:
    """Records of closed sessions in `folder`, by handle; `clock` is that of sessions."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._spawn = spawn
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def find(self, owner: str, handle: str) -> History | None:
        """Return the cells of this owner's closed session; None once they have expired."""
        kept = self._kept.get(handle)
        if kept is None or kept.owner != owner or kept.until <= self._clock():
            return None
        return kept.cells

    async def keep(self, owner: str, handle: str, cells: History) -> None:
        """Keep cells for `KEPT_S` seconds, and remove records beyond the bounds."""
        cells.settle(kernel_gone=True)
        if not self._kept:
            self._spawn(self._expire)
        self._kept[handle] = _Kept(owner, cells, self._clock() + KEPT_S)
        while len(own := self._of(owner)) > MOST_KEPT:
            await self._remove(own[0])
        while sum((held := self._bytes()).values()) > KEPT_BYTES:
            await self._remove(self._of(max(held, key=lambda each: held[each]))[0])

    async def _expire(self) -> None:
        while self._kept:
            await anyio.sleep(max(0.0, next(iter(self._kept.values())).until - self._clock()))
            while self._kept and next(iter(self._kept.values())).until <= self._clock():
                await self._remove(next(iter(self._kept)))

    async def _remove(self, handle: str) -> None:
        if self._kept.pop(handle, None) is None:
            return
        with Barrier("removing the record of a closed session", handle):
            await run_in_thread(remove_tree, self._folder / handle)

    def _of(self, owner: str) -> list[str]:
        return [handle for handle, kept in self._kept.items() if kept.owner == owner]

    def _bytes(self) -> dict[str, int]:
        """Return the bytes on disk of each owner's records."""
        return totals((kept.owner, kept.cells.disk_bytes) for kept in self._kept.values())
