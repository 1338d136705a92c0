"""Extract box plots of a matplotlib figure from the artists of pyplot and seaborn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kernel_specs.restricted.display.axes import MOST_SERIES, Unknown, few

MOST_ARTISTS = 8
"""Most lines of one box: itself, two whiskers, two caps, median, mean, outliers."""


@dataclass(frozen=True)
class Box:
    """One box of a box plot; `place` is its position on the other axis, `flat` means horizontal."""

    place: float
    least: float
    low: float
    median: float
    high: float
    most: float
    outliers: Sequence[float]
    flat: bool


def boxes_of(axes: Any) -> list[Box]:
    """Return the boxes of a plot, an empty list for other plots.

    Raises Unknown for a box plot that is not recognised, or has too many boxes.
    """
    found = [each for each in axes.containers if type(each).__name__ == "BoxPlotContainer"]
    drawn = [artists for container in found for artists in _artists(container)]
    return [_box(*artists) for artists in few(drawn or _drawn_boxes(axes))]


def _box(box: Any, whiskers: Sequence[Any], median: Any, outliers: Any) -> Box:
    middles, corners = _corners(median), _corners(box)
    flat = middles[0][0] == middles[0][-1] and middles[1][0] != middles[1][-1]
    across, along = (0, 1) if flat else (1, 0)
    edges = corners[across]
    if len(edges) == 11:  # the corners of a notched box, whose notches may reach beyond it
        edges = [edges[0], edges[5]]
    ends = [value for each in whiskers for value in _corners(each)[across]]
    return Box(
        place=(min(corners[along]) + max(corners[along])) / 2,
        least=min([*ends, *edges]),
        low=min(edges),
        median=middles[across][0],
        high=max(edges),
        most=max([*ends, *edges]),
        outliers=[] if outliers is None else _corners(outliers)[across],
        flat=flat,
    )


def _artists(container: Any) -> Iterator[tuple[Any, Sequence[Any], Any, Any]]:
    fliers = list(container.fliers)
    for place, box in enumerate(container.boxes):
        whiskers = container.whiskers[2 * place : 2 * place + 2]
        yield box, whiskers, container.medians[place], next(iter(fliers[place : place + 1]), None)


def _drawn_boxes(axes: Any) -> Iterator[tuple[Any, Sequence[Any], Any, Any]]:
    """Yield box, whiskers, median and outliers of each box among the lines of `Axes.boxplot`.

    For a matplotlib without `BoxPlotContainer`. The lines of each box come in this order: the box,
    two whiskers, perhaps two caps, the median, perhaps the mean, perhaps the outliers. Raises
    Unknown for anything else that begins with a box.
    """
    lines = few(axes.get_lines(), MOST_ARTISTS * MOST_SERIES)
    if len(lines) < 4 or not _is_box(lines[0]):
        return
    if axes.patches or axes.collections or axes.images:
        raise Unknown
    starts = [place for place, line in enumerate(lines) if _is_box(line)]
    counts = set()
    for first, end in pairwise([*starts, len(lines)]):
        box, *rest = lines[first:end]
        segments = [each for each in rest if is_drawn(each)]
        markers = [each for each in rest if not is_drawn(each)]
        counts.add((len(segments), len(markers)))
        if any(len(each.get_xydata()) != 2 for each in segments) or len(counts) > 1:
            raise Unknown
        if not 3 <= len(segments) <= 6 or len(markers) > 2:
            raise Unknown
        caps = 2 if len(segments) > 4 else 0
        outliers = markers[-1] if markers and markers[-1].get_marker() != "^" else None
        yield box, segments[:2], segments[2 + caps], outliers


def _corners(artist: Any) -> tuple[list[float], list[float]]:
    """Return x and y positions of a line's points, or of a patch's four corners."""
    if hasattr(artist, "get_xydata"):
        pairs = artist.get_xydata().tolist()
    else:
        pairs = artist.get_path().vertices[:4].tolist()
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _is_box(line: Any) -> bool:
    """Return True if a line is closed and has the corners of a box, notched or not."""
    points = line.get_xydata().tolist()
    return len(points) in (5, 11) and points[0] == points[-1] and is_drawn(line)


def is_drawn(line: Any) -> bool:
    """Return True if a line is drawn, not only its markers."""
    return line.get_linestyle() not in ("None", "", " ")


def is_shown(artist: Any) -> bool:
    """Return True if an artist is neither hidden nor transparent as a whole."""
    alpha = artist.get_alpha()
    return bool(artist.get_visible()) and not (isinstance(alpha, int | float) and alpha == 0)
