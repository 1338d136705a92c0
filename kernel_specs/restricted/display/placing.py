"""Decide for which matplotlib figures the bounding box is known without drawing them first.

`print_figure` draws a figure first, because some artists get their positions only then: those of
3-D, layouts of a figure, arrows, tables. Artists of the kinds named here compute their positions
when their bounding box is requested.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_FIRST, _LAST = (3, 8), (3, 11)
"""First and last version of matplotlib that this was tested with."""
_ANYWHERE = frozenset(
    f"matplotlib.{name}"
    for name in (
        "lines.Line2D",
        "text.Text",
        "spines.Spine",
        "colorbar._ColorbarSpine",
        "axis.XAxis",
        "axis.YAxis",
        "image.AxesImage",
        "collections.LineCollection",
        *(f"patches.{name}" for name in ("Rectangle", "Polygon", "Wedge", "Circle", "Ellipse")),
        *(f"patches.{name}" for name in ("PathPatch", "StepPatch")),
    )
)
_WITHIN_AXES = frozenset(
    f"matplotlib.{name}"
    for name in (
        *(f"collections.{name}Collection" for name in ("Path", "Poly", "Patch", "Event")),
        "collections.FillBetweenPolyCollection",
        "collections.QuadMesh",
        "contour.QuadContourSet",
        "lines.AxLine",
    )
)
"""Kinds whose size is known only after drawing; it does not matter if their axes clip them."""
_MADE_BY = ("matplotlib.", "pandas.")
"""Modules of tickers whose results do not change between calls, unless they call user code."""


def is_placed_undrawn(figure: Any) -> bool:
    """Return True if bounding box and picture of a figure are the same without a first drawing."""
    version = sys.modules["matplotlib"].__version_info__[:2]
    return (
        _FIRST <= version <= _LAST
        and _kind(figure) == "matplotlib.figure.Figure"
        and not figure.subfigs
        and _kind(figure.get_layout_engine()) in _NO_LAYOUT
        and not figure.canvas.callbacks.callbacks.get("draw_event")
        and all(map(_is_plain, figure.axes))
        and _are_placed(each for each in figure.get_children() if each not in figure.axes)
    )


_NO_LAYOUT = ("builtins.NoneType", "matplotlib.layout_engine.PlaceHolderLayoutEngine")
_LOCATORS = ("builtins.NoneType", "matplotlib.colorbar._ColorbarAxesLocator")


def _is_plain(axes: Any) -> bool:
    tickers = [
        ticker
        for axis in (axes.xaxis, axes.yaxis)
        for which in (axis.major, axis.minor)
        for ticker in (which.locator, which.formatter)
    ]
    return (
        _kind(axes) == "matplotlib.axes._axes.Axes"
        and _kind(axes.get_axes_locator()) in _LOCATORS
        and all(map(_is_steady, tickers))
        and _are_placed(axes.get_children())
    )


def _is_steady(ticker: Any) -> bool:
    held = (ticker, *vars(ticker).values(), *getattr(ticker, "scaled", {}).values())
    return all(map(_is_theirs, filter(callable, held)))


def _is_theirs(function: Any) -> bool:
    """Return True if matplotlib or pandas defines the function; `partial` objects are unwrapped."""
    while (inner := getattr(function, "func", None)) is not None:
        function = inner
    return str(getattr(function, "__module__", "")).startswith(_MADE_BY)


def _are_placed(artists: Iterable[Any]) -> bool:
    return all("draw" not in vars(each) and _is_placed(each, _kind(each)) for each in artists)


def _is_placed(artist: Any, kind: str) -> bool:
    if kind in _ANYWHERE:
        return True
    if kind in _WITHIN_AXES:
        return bool(artist._fully_clipped_to_axes())
    if kind == "matplotlib.legend.Legend":
        return artist._mode is None
    if kind == "matplotlib.text.Annotation":
        return artist.arrow_patch is None and isinstance(artist.xycoords, str)
    return False


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
