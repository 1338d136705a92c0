"""Ticks of a matplotlib figure take less time: each is made, set and measured once per drawing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from kernel_specs.restricted.display.having import having
from kernel_specs.restricted.display.placing import own_axes

_ARTISTS = ("tick1line", "tick2line", "gridline", "label1", "label2")


def quickened(figure: Any) -> Iterator[AbstractContextManager[None]]:
    """What lets a drawing, or the search for the box of a figure, do nothing of this twice.

    The figure is one that is placed undrawn.
    """
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            yield having(axis, "_get_tick", _copying(axis._get_tick))
            yield having(axis, "_copy_tick_props", _with_markers_shared(axis._copy_tick_props))
    for axis in own_axes(figure):
        update = functools.cache(axis._update_ticks)
        yield having(axis, "_update_ticks", update)
        boxes = _measuring_once(update, axis._get_ticklabel_bboxes)
        yield having(axis, "_get_ticklabel_bboxes", boxes)


def _measuring_once(update: Callable[[], Any], measure: Callable[..., Any]) -> Callable[..., Any]:
    """Find the boxes of the labels of an axis once."""
    once = functools.cache(lambda renderer: measure(update(), renderer))

    def boxes(ticks: Any, renderer: Any = None) -> Any:
        return once(renderer) if ticks is update() else measure(ticks, renderer)

    return boxes


def _copying(make: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """Make ticks of an axis as copies of the first of their kind.

    What copies share is what they would have in common, or what `Axis._copy_tick_props` replaces.
    """
    firsts: dict[bool, Any] = {}

    def get_tick(major: bool) -> Any:
        if major in firsts:
            return _copy(firsts[major])
        made = make(major)
        firsts[major] = _copy(made)
        return made

    return get_tick


def _copy(tick: Any) -> Any:
    copied = _copy_artist(tick)
    for name in _ARTISTS:
        setattr(copied, name, _copy_artist(getattr(tick, name)))
    return copied


def _copy_artist(artist: Any) -> Any:
    copied: Any = object.__new__(type(artist))
    attributes = vars(copied)
    attributes.update(vars(artist))
    attributes["_callbacks"] = type(artist._callbacks)(signals=["pchanged"])
    if attributes["_sticky_edges"] is not None:  # before matplotlib 3.11
        attributes["_sticky_edges"] = type(artist._sticky_edges)([], [])
    return copied


def _with_markers_shared(copy_props: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Copy what ticks look like without the parts of their markers, which nothing changes."""
    markers: Any = sys.modules["matplotlib.markers"]
    usual, sharing = markers.copy, SimpleNamespace(deepcopy=_copy_marker)

    def copy_tick_props(src: Any, dest: Any) -> None:
        markers.copy = sharing
        try:
            copy_props(src, dest)
        finally:
            markers.copy = usual

    return copy_tick_props


def _copy_marker(attributes: dict[str, Any]) -> dict[str, Any]:
    plain = isinstance(attributes["_marker"], int | str) and attributes["_user_transform"] is None
    return dict(attributes) if plain else deepcopy(attributes)
