"""Detect by CPU clocks if processes of a kernel have run since they were last listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from threading import Lock

from kernel_mcp.linux.proc import processor_ns
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class _Listed:
    """One list of processes, with the CPU time of each before it was made, in nanoseconds.

    `spent_ns` is the CPU time of all processes until then. If `settled`, any process that is not in
    the list was started by one of the list. `changes` counts the lists that differed from the one
    before them.
    """

    clocks: Mapping[int, int] = field(default_factory=dict)
    spent_ns: int = 0
    settled: bool = False
    changes: int = 0


class Activity:
    """CPU time of a kernel's processes, measured in some microseconds for each. Thread-safe.

    Listing processes takes a millisecond in /proc. That is necessary only after a known process has
    run: no other one can have started a process or allocated memory.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[int]],
        clock: Callable[[int], int | None] = processor_ns,
    ) -> None:
        """`processes` returns the process ids, and blocks. `clock` returns the CPU time of one."""
        self._processes = processes
        self._clock = clock
        self._listed = _Listed()
        self._lock = Lock()

    def processes(self) -> list[int]:
        """Return the process ids, and measure from now on. Blocks."""
        with self._lock:
            before = self._listed
            clocks = {pid: self._clock(pid) for pid in before.clocks}  # first: they may fork now
            found = list(dict.fromkeys(self._processes()))
            fresh = {pid: self._clock(pid) for pid in found if pid not in clocks}
            spent = sum(
                max(0, now - before.clocks.get(pid, 0))
                for pid, now in (clocks | fresh).items()
                if now is not None
            )
            now = {pid: (clocks | fresh)[pid] for pid in found}
            self._listed = _Listed(
                {pid: ns for pid, ns in now.items() if ns is not None},
                before.spent_ns + spent,
                settled=not fresh and None not in now.values(),
                changes=before.changes + (now.keys() != before.clocks.keys()),
            )
            return found

    def changed(self) -> None:
        """Note that there may be processes which no known process has started."""
        with self._lock:
            before = self._listed
            self._listed = _Listed(before.clocks, before.spent_ns, changes=before.changes + 1)

    def since(self) -> int | None:
        """Return the CPU time of the listed processes since the list, in nanoseconds.

        None if processes may run that are not in the list: call `processes`.
        """
        listed = self._listed
        if not listed.settled:
            return None
        used = 0
        for pid, then in listed.clocks.items():
            now = self._clock(pid)
            if now is None or now < then:  # it has ended, and the id may be another process's now
                return None
            used += now - then
        return used

    def mark(self) -> tuple[int, int] | None:
        """Return a value for `since_mark`; None if processes may run that are not in the list."""
        listed, used = self._listed, self.since()
        return None if used is None else (listed.changes, listed.spent_ns + used)

    def since_mark(self, mark: tuple[int, int] | None) -> int | None:
        """Return the CPU nanoseconds of the processes since `mark`, however often they were listed.

        None if there are others now, or if it is not known.
        """
        now = self.mark()
        return None if now is None or mark is None or now[0] != mark[0] else now[1] - mark[1]

    def cpu_s(self) -> float | None:
        """Return the CPU seconds of all processes that were ever listed; None without clocks."""
        if self._clock(0) is None:
            return None
        listed, used = self._listed, 0
        for pid, then in listed.clocks.items():
            now = self._clock(pid)
            used += max(0, now - then) if now is not None else 0
        return (listed.spent_ns + used) / 1e9
