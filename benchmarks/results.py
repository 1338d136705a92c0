"""Measured values, and the figures they belong to."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import anyio
from mcp import MCPError

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

from kernel_mcp.errors import KernelMcpError

ONE_S = 120.0
"""How long one measurement may take before it counts as failed."""


OWN = ("kernel-mcp", "floor")
"""How the names of all subjects begin that are not peers."""


class BenchmarkError(Exception):
    """Something answered otherwise than it has to, so there is nothing to measure."""


FAILURES = (BenchmarkError, KernelMcpError, MCPError, OSError, RuntimeError, TimeoutError)
"""Errors that exclude a subject from a figure, with the reason; any other error is a bug."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is measured. `floor` is the subject that ratios refer to."""

    name: str
    title: str
    floor: str
    unit: str = "ms"
    higher_is_better: bool = False


@dataclass(slots=True)
class Series:
    """All values of one subject for one figure; `at` is the number of sessions, 0 for one.

    `failure` says why there are not as many as there should be.
    """

    subject: str
    at: int = 0
    values: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def median(self) -> float:
        """The middle of the values."""
        return statistics.median(self.values)

    @property
    def p90(self) -> float:
        """The 90th percentile."""
        return self._below(0.9)

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return self._below(0.99)

    def _below(self, part: float) -> float:
        return sorted(self.values)[min(len(self.values) - 1, int(len(self.values) * part))]


class Results:
    """Everything one run has measured, in the order in which it was."""

    def __init__(self) -> None:
        self._series: dict[Figure, dict[tuple[str, int], Series]] = {}
        self.broken: dict[str, str] = {}
        """Groups of figures that could not be measured to their end, with the reason."""

    @property
    def figures(self) -> list[Figure]:
        """Those that have been measured, or tried."""
        return list(self._series)

    def of(self, figure: Figure) -> list[Series]:
        """The series of a figure, by number of sessions and then in their order of appearance."""
        return sorted(self._series.get(figure, {}).values(), key=lambda series: series.at)

    def find(self, name: str, subject: str, at: int = 0) -> Series | None:
        """The series of a subject in the figure `name` if it has values."""
        for figure, group in self._series.items():
            series = group.get((subject, at))
            if figure.name == name and series is not None and series.values:
                return series
        return None

    def add(self, figure: Figure, subject: str, value: float, at: int = 0) -> None:
        """Note one value."""
        self._get(figure, subject, at).values.append(value)

    def fail(self, figure: Figure, subject: str, reason: str, at: int = 0) -> None:
        """Note why a subject has no value."""
        self._get(figure, subject, at).failure = reason

    def ratio(self, figure: Figure, series: Series) -> float | None:
        """How often the floor's median goes into this one, or the other way round.

        Above 1 is always better than the floor. None without a floor.
        """
        floor = self._series[figure].get((figure.floor, series.at))
        if floor is None or series.subject == figure.floor:
            return None
        if not (floor.values and series.values and floor.median and series.median):
            return None
        better = floor.median / series.median
        return 1 / better if figure.higher_is_better else better

    @property
    def failed(self) -> bool:
        """True if something of kernel-mcp or of the floor could not be measured."""
        every = [series for group in self._series.values() for series in group.values()]
        own = [series for series in every if series.subject.startswith(OWN)]
        return bool(self.broken) or any(series.failure for series in own)

    def as_json(self) -> list[dict[str, Any]]:
        """All series with their values, medians and ratios."""
        return [
            {
                "figure": figure.name,
                "title": figure.title,
                "unit": figure.unit,
                "higher_is_better": figure.higher_is_better,
                "subject": series.subject,
                "sessions": series.at,
                "median": series.median if series.values else None,
                "p90": series.p90 if series.values else None,
                "p99": series.p99 if series.values else None,
                "times_better_than_floor": self.ratio(figure, series),
                "values": series.values,
                "failure": series.failure,
            }
            for figure in self._series
            for series in self.of(figure)
        ]

    def _get(self, figure: Figure, subject: str, at: int) -> Series:
        group = self._series.setdefault(figure, {})
        return group.setdefault((subject, at), Series(subject, at))


Measurement = Callable[[], Awaitable[float]]
"""Measures once."""


async def interleave(
    results: Results,
    figure: Figure,
    rounds: int,
    subjects: Mapping[str, Measurement],
    *,
    in_a_row: int = 1,
) -> None:
    """Measure every subject `in_a_row` times a round, in an order that turns round every time."""
    left = dict(subjects)
    for number in range(rounds):
        for subject in list(left)[:: -1 if number % 2 else 1]:
            for _ in range(in_a_row):
                if not await attempt(results, figure, subject, subjects[subject]):
                    del left[subject]
                    break


async def attempt(
    results: Results, figure: Figure, subject: str, measure: Measurement, at: int = 0
) -> bool:
    """Measure once and note the value, or why there is none; whether there is one."""
    value = 0.0

    async def once() -> None:
        nonlocal value
        with anyio.fail_after(ONE_S):
            value = await measure()

    why = await failure(once)
    if why:
        results.fail(figure, subject, why, at)
    else:
        results.add(figure, subject, value, at)
    return not why


async def failure(action: Callable[[], Awaitable[object]]) -> str:
    """Why `action` failed in one of the ways that are no bugs of the benchmark, or nothing."""
    try:
        await action()
    except FAILURES as error:
        return _reason(error)
    except ExceptionGroup as group:
        first = _first_of(group)
        if not isinstance(first, FAILURES):
            raise
        return _reason(first)
    return ""


def _reason(error: BaseException) -> str:
    """An error in a line."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no end within the time allowed"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _first_of(error: BaseException) -> BaseException:
    """The first error in a group of them, which a task group made."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    """How long `action` took in milliseconds."""
    started = perf_counter()
    await action()
    return (perf_counter() - started) * 1000
