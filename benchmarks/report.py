"""Results as a table for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Figure, Results, Series

HEADER = ("", "median", "p90", "n", "times better than the floor")
MANY = 5
"""From so many values on a 90th percentile says something."""


def rows(results: Results, figure: Figure) -> list[tuple[str, ...]]:
    """One row a series: subject, median, 90th percentile, number of values, ratio."""
    return [_row(results, figure, series) for series in results.of(figure)]


def table(results: Results) -> str:
    """All figures, for a terminal."""
    blocks = []
    for figure in results.figures:
        lines = rows(results, figure)
        width = max(42, *(len(line[0]) for line in lines))
        block = [f"{figure.title} ({figure.unit})"]
        for subject, median, p90, count, ratio in lines:
            block.append(f"  {subject:{width}}{median:>10}{p90:>10}{count:>6}  {ratio}")
        blocks.append("\n".join(block))
    return f"{'':44}{'median':>10}{'p90':>10}{'n':>6}  times better\n" + "\n\n".join(blocks)


def markdown(results: Results, figures: Sequence[Figure]) -> str:
    """Some figures, one table each."""
    return "\n\n".join(
        f"**{figure.title}** ({figure.unit})\n\n{_table(HEADER, rows(results, figure))}"
        for figure in figures
    )


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ruler, *lines))


def _row(results: Results, figure: Figure, series: Series) -> tuple[str, ...]:
    subject = series.subject
    if series.at:
        subject += f", {series.at} session{'s' if series.at > 1 else ''}"
    if not series.values:
        return (f"{subject}: {series.failure}", "-", "-", "0", "")
    ratio = results.ratio(figure, series)
    p90 = number(series.p90) if len(series.values) >= MANY else ""
    shown = "" if ratio is None else f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"
    if series.failure:
        subject += f" (then: {series.failure})"
    return (subject, number(series.median), p90, str(len(series.values)), shown)


def number(value: float) -> str:
    """A measured value with three digits that mean something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
