"""Texts of matplotlib take less time: fonts are found, and texts measured and laid out, once."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from kernel_specs.restricted.display.having import having

MOST_KNOWN = 1024
"""Texts that are remembered from one figure to the next; with them stay their fonts."""
_SEEKS_HEIGHTS = (3, 11)
"""The version of matplotlib that reads the height of its font anew for each text."""


class Known(dict[Any, Any]):
    """What was found out, which begins anew where it would be too much."""

    def remember(self, key: Any, value: Any) -> None:
        """Have a value at the next time."""
        if len(self) >= MOST_KNOWN:
            self.clear()
        self[key] = value


class Texts:
    """Texts that were drawn: their sizes, and the places of their glyphs."""

    def __init__(self) -> None:
        self._sizes, self._layouts = Known(), Known()
        for known in (self._sizes, self._layouts):  # a forked process has fonts of its own
            os.register_at_fork(after_in_child=known.clear)

    @contextmanager
    def known_to(self, canvas: Any, agg: Any) -> Iterator[None]:
        """Have the renderers of a canvas ask here; `agg` is the module that they come from."""
        kind, made = self._renderer(agg), []
        get = canvas.get_renderer

        def get_renderer(*args: Any, **options: Any) -> Any:
            renderer = get(*args, **options)
            if type(renderer) is agg.RendererAgg:
                renderer.__class__ = kind
                made.append(renderer)
            return renderer

        try:
            with having(canvas, "get_renderer", get_renderer), _found_once(), _heights_once():
                yield
        finally:
            for renderer in made:
                renderer.__class__ = agg.RendererAgg

    def _renderer(self, agg: Any) -> Any:
        """The kind of renderers for one figure."""
        sizes, layouts, own = self._sizes, self._layouts, Known()

        class Renderer(agg.RendererAgg):  # type: ignore[misc]
            def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> Any:
                if ismath:
                    key, known = (s, prop.copy(), ismath, self.dpi), own
                else:
                    font = super()._prepare_font(prop)
                    key = s, *self._as_set(font, prop)
                    known = sizes if key in sizes or _has_all(font, s) else own
                if key not in known:
                    measured = super().get_text_width_height_descent(s, prop, ismath)
                    known.remember(key, measured)
                return known[key]

            def _prepare_font(self, font_prop: Any) -> Any:
                font = super()._prepare_font(font_prop)
                if not hasattr(font, "_layout"):  # before matplotlib 3.11
                    return font
                return _Prepared(font, self._as_set(font, font_prop), layouts)

            def _as_set(self, font: Any, prop: Any) -> tuple[Any, ...]:
                return font, prop.get_size_in_points(), self.dpi, agg.get_hinting_flag()

            def _draw_text_glyphs_and_boxes(
                self, gc: Any, x: float, y: float, angle: float, glyphs: Any, boxes: Any
            ) -> None:
                sized = functools.cache(_Sized)
                glyphs = ((sized(font), *glyph) for font, *glyph in glyphs)
                super()._draw_text_glyphs_and_boxes(gc, x, y, angle, glyphs, boxes)

        return Renderer


def _has_all(font: Any, text: str) -> bool:
    """Whether it has the characters of a text: each figure warns of those that it lacks."""
    return all(font.get_char_index(ord(each)) for each in text)


class _Prepared:
    """A font that lays a text out once, as it is set."""

    def __init__(self, font: Any, as_set: tuple[Any, ...], layouts: Known) -> None:
        self._font, self._as_set, self._layouts = font, as_set, layouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._font, name)

    def _layout(self, text: str, flags: Any, *, features: Any = None, language: Any = None) -> Any:
        if features is not None or language is not None:
            return self._font._layout(text, flags=flags, features=features, language=language)
        key = text, *self._as_set
        if key not in self._layouts:
            self._layouts.remember(key, self._font._layout(text, flags=flags))
        return self._layouts[key]


class _Sized:
    """A font that is given a size once: for each that it is given, it adapts its glyphs anew."""

    def __init__(self, font: Any) -> None:
        self._font = font
        self._size: tuple[float, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._font, name)

    def set_size(self, *size: float) -> None:
        """Give it a size in points, and the dots of an inch."""
        if size != self._size:
            self._font.set_size(*size)
            self._size = size


def _found_once() -> AbstractContextManager[None]:
    """Find the files of a font once."""
    fonts = sys.modules["matplotlib.font_manager"].fontManager
    find = getattr(fonts, "_find_fonts_by_props", None)
    if find is None:
        return nullcontext()
    known: dict[Any, Any] = {}

    def find_fonts(prop: Any, *args: Any, **options: Any) -> Any:
        if args or options or isinstance(prop, str):
            return find(prop, *args, **options)
        if prop not in known:
            known[prop.copy()] = find(prop)
        return known[prop]

    return having(fonts, "_find_fonts_by_props", find_fonts)


class _Font:
    """A font whose tables are read once."""

    def __init__(self, font: Any) -> None:
        self._font = font
        self.get_sfnt_table = functools.cache(font.get_sfnt_table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._font, name)


@contextmanager
def _heights_once() -> Iterator[None]:
    """Read the heights of a font once."""
    text: Any = sys.modules["matplotlib.text"]
    get = sys.modules["matplotlib.font_manager"].get_font
    version = getattr(sys.modules["matplotlib"], "__version_info__", ())[:2]
    if version != _SEEKS_HEIGHTS or text.get_font is not get:
        yield
        return
    known: dict[Any, _Font] = {}

    def get_font(paths: Any) -> _Font:
        key = tuple(paths)
        if key not in known:
            known[key] = _Font(get(paths))
        return known[key]

    text.get_font = get_font
    try:
        yield
    finally:
        text.get_font = get
