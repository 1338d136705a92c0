"""Results as a table for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Figure, Results, Series

HEADER = ("", "median", "p90", "p99", "n", "times better than the floor")
MANY = 5
"""From so many values on a 90th percentile says something."""
VERY_MANY = 100
"""The same of a 99th."""


def rows(results: Results, figure: Figure) -> list[tuple[str, ...]]:
    """One row a series: subject, median, 90th and 99th percentile, number of values, ratio."""
    return [_row(results, figure, series) for series in results.of(figure) if series.values]


def remarks(results: Results, figure: Figure) -> list[str]:
    """Why there are not all the rows and values that there should be."""
    return [f"{_name(series)}: {series.failure}" for series in results.of(figure) if series.failure]


def table(results: Results) -> str:
    """All figures, for a terminal."""
    blocks = [f"{'':44}{'median':>10}{'p90':>10}{'p99':>10}{'n':>6}  times better"]
    for figure in results.figures:
        block = [f"{figure.title} ({figure.unit})"]
        for subject, median, p90, p99, count, ratio in rows(results, figure):
            line = f"  {subject:42}{median:>10}{p90:>10}{p99:>10}{count:>6}  {ratio}"
            block.append(line.rstrip())
        blocks.append("\n".join([*block, *(f"  {it}" for it in remarks(results, figure))]))
    return "\n\n".join(blocks)


def markdown(results: Results, figures: Sequence[Figure]) -> str:
    """Some figures, one table each."""
    blocks = []
    for figure in figures:
        blocks.append(f"**{figure.title}** ({figure.unit})")
        if lines := rows(results, figure):
            blocks.append(_table(HEADER, lines))
        blocks.extend(remarks(results, figure))
    return "\n\n".join(blocks)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ruler, *lines))


def _row(results: Results, figure: Figure, series: Series) -> tuple[str, ...]:
    ratio = results.ratio(figure, series)
    p90 = number(series.p90) if len(series.values) >= MANY else ""
    p99 = number(series.p99) if len(series.values) >= VERY_MANY else ""
    shown = "" if ratio is None else times(ratio)
    return (_name(series), number(series.median), p90, p99, str(len(series.values)), shown)


def _name(series: Series) -> str:
    if not series.at:
        return series.subject
    return f"{series.subject}, {series.at} session{'s' if series.at > 1 else ''}"


def times(ratio: float) -> str:
    """A ratio with two digits that mean something."""
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"


def number(value: float) -> str:
    """A measured value with three digits that mean something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
