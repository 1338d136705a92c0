"""Render matplotlib figures with the same pixels in less time.

`print_figure` draws a figure twice: without any output, to find its bounding box, then again. Here
the first drawing is skipped if the box can be found without it. Code's own `savefig` is unchanged.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kernel_specs.restricted.display.placing import is_placed_undrawn
from kernel_specs.restricted.display.temporary import temporary_method

MOST_PIXELS = 24_000_000
"""Most pixels of a figure that is sent; the server decodes no more."""


@contextmanager
def pictured(figure: Any) -> Iterator[None]:
    """Speed up pictures of a figure inside the block, and limit them to `MOST_PIXELS`."""
    agg = _agg_of(figure.canvas)
    with _uncollected(), bounded(figure), nullcontext() if agg is None else _placed(figure, agg):
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: a drawing makes many objects, with hardly any cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def bounded(figure: Any) -> Iterator[None]:
    """Limit drawings of a matplotlib figure to `MOST_PIXELS` inside the block."""
    dpi = figure.dpi
    width, height = figure.get_size_inches()
    pixels = width * height * dpi * dpi
    if pixels > MOST_PIXELS:
        figure.dpi = dpi * (MOST_PIXELS / pixels) ** 0.5
    try:
        yield
    finally:
        if pixels > MOST_PIXELS:
            figure.dpi = dpi


def _agg_of(canvas: Any) -> Any:
    """Return matplotlib's Agg backend if the canvas is exactly of its class, else None."""
    agg: Any = sys.modules.get("matplotlib.backends.backend_agg")
    return agg if agg is not None and type(canvas) is agg.FigureCanvasAgg else None


@contextmanager
def _placed(figure: Any, agg: Any) -> Iterator[None]:
    """Skip the first drawing if it has no output, and all artists are placed without it.

    The others begin in matplotlib itself, which finds the place of a warning by their callers.
    """

    def draw(renderer: Any) -> Any:
        vars(figure).pop("draw", None)
        idle = isinstance(renderer, agg.RendererAgg) and "draw_path" in vars(renderer)
        if not (idle and _takes_places(figure, renderer)):
            return type(figure).draw(figure, renderer)
        return None

    with temporary_method(figure, "draw", draw):
        yield


def _takes_places(figure: Any, renderer: Any) -> bool:
    """Place the axes as a drawing would; return False if the figure must be drawn first."""
    try:
        if not is_placed_undrawn(figure):
            return False
        for axes in figure.axes:
            locator = axes.get_axes_locator()
            axes.apply_aspect(locator(axes, renderer) if locator else None)
            axes.viewLim  # noqa: B018  # reading it applies pending automatic limits
    except Exception:  # noqa: BLE001  # another matplotlib: it is drawn twice, as usual
        return False
    return True
