"""Figures of matplotlib become pictures with the same pixels in less time.

`print_figure` draws a figure twice: without any output, to find its bounding box, then again. Here
the first time is left out where the box is found without it, ticks and texts take less, and PNG is
packed lightly. All of this ends with the picture: `savefig` of code is as it is.
"""

from __future__ import annotations

import functools
import gc
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from kernel_specs.restricted.display.having import having
from kernel_specs.restricted.display.placing import is_placed_undrawn
from kernel_specs.restricted.display.texts import Texts
from kernel_specs.restricted.display.ticks import quickened

MOST_PIXELS = 24_000_000
"""Pixels of a figure as it is sent; the server decodes no more."""
PACKING = 1
"""Of zlib's nine levels; with the usual six a plot has a sixth less bytes and takes 5 ms more."""
_BAND_BYTES = 256 * 1024
"""Rows that are filtered at once, so few that they stay in a cache of the processor."""
_UP = 2
"""PNG's filter that leaves the difference to the row above: Pillow tries five for each row, for as
long as all else takes, and its files are no smaller."""
_INCH = 0.0254
_RGBA = (8, 6, 0, 0, 0)


class Figures:
    """Pictures of figures, and what is remembered from one to the next."""

    def __init__(self) -> None:
        self._texts = Texts()

    @contextmanager
    def pictured(self, figure: Any) -> Iterator[None]:
        """Make pictures of a matplotlib figure in little time, with at most `MOST_PIXELS`."""
        agg = _agg_of(figure.canvas)
        with _uncollected(), bounded(figure), ExitStack() as held:
            if agg is not None:
                held.enter_context(_placed(figure, agg))
                held.enter_context(self._texts.known_to(figure.canvas, agg))
                held.enter_context(_packed(figure.canvas, agg))
            yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let the collector rest: a drawing makes many objects, and next to no cycles among them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def bounded(figure: Any) -> Iterator[None]:
    """Draw a matplotlib figure with at most `MOST_PIXELS`."""
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
    """The module that draws pixels, for a canvas of its very own kind; else None."""
    agg: Any = sys.modules.get("matplotlib.backends.backend_agg")
    return agg if agg is not None and type(canvas) is agg.FigureCanvasAgg else None


@contextmanager
def _placed(figure: Any, agg: Any) -> Iterator[None]:
    """Leave a drawing out that has no output, where all finds its place without it.

    There ticks are set once to look for the box, and once to draw.
    """
    placed = False
    with ExitStack() as ticks:

        def draw(renderer: Any) -> Any:
            nonlocal placed
            ticks.close()
            idle = isinstance(renderer, agg.RendererAgg) and "draw_path" in vars(renderer)
            was_placed, placed = placed, idle and is_placed_undrawn(figure)
            if placed or was_placed:
                for held in quickened(figure):
                    ticks.enter_context(held)
            if not placed:
                return type(figure).draw(figure, renderer)
            for axes in figure.axes:  # as a drawing begins; what looks for the box does the rest
                locator = axes.get_axes_locator()
                axes.apply_aspect(locator(axes, renderer) if locator else None)
                axes.viewLim  # noqa: B018  # limits that wait for the data are set
            return None

        with having(figure, "draw", draw):
            yield


def _packed(canvas: Any, agg: Any) -> AbstractContextManager[None]:
    """Have a canvas write the same pixels as a PNG that is packed in less time."""
    write = canvas.print_png

    @functools.wraps(write)
    def print_png(target: Any, *args: Any, **options: Any) -> None:
        if args or any(value is not None for value in options.values()):
            write(target, *args, **options)
            return
        agg.FigureCanvasAgg.draw(canvas)
        numpy, version = sys.modules["numpy"], sys.modules["matplotlib"].__version__
        said = f"Matplotlib version{version}, https://matplotlib.org/"
        pixels = numpy.asarray(canvas.buffer_rgba())
        target.writelines(_png(numpy, pixels, canvas.figure.dpi, said))

    return having(canvas, "print_png", print_png)


def _png(numpy: Any, pixels: Any, dpi: float, software: str) -> Iterator[bytes]:
    """The parts of a PNG of an array of rows of pixels, of four bytes each."""
    height, width, _ = pixels.shape
    density = int(dpi / _INCH + 0.5)
    yield b"\x89PNG\r\n\x1a\n"
    yield _chunk(b"IHDR", struct.pack(">II5B", width, height, *_RGBA))
    yield _chunk(b"tEXt", b"Software\0" + software.encode("latin-1"))
    yield _chunk(b"pHYs", struct.pack(">IIB", density, density, 1))
    yield _chunk(b"IDAT", b"".join(_rows(numpy, pixels.reshape(height, width * 4))))
    yield _chunk(b"IEND", b"")


def _rows(numpy: Any, rows: Any) -> Iterator[bytes]:
    height, size = rows.shape
    many = max(1, _BAND_BYTES // size)
    band = numpy.empty((many, 1 + size), numpy.uint8)
    band[:, 0] = _UP
    packer = zlib.compressobj(PACKING)
    above: Any = 0
    for first in range(0, height, many):
        part = rows[first : first + many]
        numpy.subtract(part[0], above, out=band[0, 1:])
        numpy.subtract(part[1:], part[:-1], out=band[1 : len(part), 1:])
        above = part[-1]
        yield packer.compress(band[: len(part)])
    yield packer.flush()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
