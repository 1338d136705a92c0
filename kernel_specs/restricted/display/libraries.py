"""Adapt libraries, when code imports them, to a kernel without browser and window.

An action never imports its library: it runs after the import, and its exceptions are dropped.
"""

# IPython is untyped to mypy.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from kernel_specs.restricted import definitions
from kernel_specs.restricted.console import tracebacks

Action = Callable[[Any], object]

TEXT_WIDTH = 200
TEXT_COLUMNS = 50
"""Most columns of a data frame in its text."""
INLINE = "module://matplotlib_inline.backend_inline"
_WINDOWED = (
    "gtk",
    "macosx",
    "osx",
    "nbagg",
    "notebook",
    "qt",
    "tk",
    "webagg",
    "wx",
    "ipympl",
    "widget",
)
"""Prefixes of backends that draw into a window or a browser, which a kernel does not have."""


class AfterImport(MetaPathFinder):
    """A meta path finder that runs an action after the import of some modules.

    Other finders locate the module; this one wraps their loaders.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = dict(actions)
        self._searched: set[str] = set()

    def install(self) -> None:
        """Put this finder first on sys.meta_path."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of another finder, for a module with an action; else None."""
        action = self._actions.get(fullname)
        if action is None or fullname in self._searched:
            return None
        self._searched.add(fullname)
        try:
            finders = [finder for finder in sys.meta_path if finder is not self]
            found = (finder.find_spec(fullname, path, target) for finder in finders)
            spec = next((each for each in found if each is not None), None)
        finally:
            self._searched.discard(fullname)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, action)
        return spec


def _follow(loader: Any, action: Action) -> None:
    """Make this one loader run `action` once it has executed its module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        with contextlib.suppress(Exception):
            action(module)

    with contextlib.suppress(AttributeError):  # a loader whose attributes cannot be set
        loader.exec_module = exec_module


def show_figures() -> None:
    """Show every figure that pyplot holds, then close them all; the inline backend does that."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None or not helpers.Gcf.figs or _is_inline():
        return
    from IPython.display import display

    try:
        for manager in helpers.Gcf.get_all_fig_managers():
            display(manager.canvas.figure)
    finally:
        helpers.Gcf.destroy_all()


def _is_inline() -> bool:
    """Return True under the inline backend, which knows of `ioff` and which figures stay open."""
    matplotlib: Any = sys.modules["matplotlib"]
    loaded = "matplotlib_inline.backend_inline" in sys.modules
    return loaded and dict.get(matplotlib.rcParams, "backend") in ("inline", INLINE)


def is_windowed(backend: object) -> bool:
    """Return True for the name of a backend that draws into a window or a browser."""
    return isinstance(backend, str) and backend.lower().startswith(_WINDOWED)


def figure_picture(figure: Any) -> Any:
    """Return a matplotlib figure as PNG, until a backend registers its own function."""
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, "png")


def _follow_pyplot(pyplot: Any) -> None:
    """Make `show` display figures under every backend; replace windowed backends by inline."""
    show, switch = pyplot.show, pyplot.switch_backend

    @functools.wraps(show)
    def show_now(*args: Any, **options: Any) -> Any:
        return show(*args, **options) if _is_inline() else show_figures()

    @functools.wraps(switch)
    def switch_backend(newbackend: Any) -> None:
        switch(INLINE if is_windowed(newbackend) else newbackend)

    pyplot.show, pyplot.switch_backend = show_now, switch_backend


def _follow_pandas(pandas: Any) -> None:
    """Widen the text of data frames; user code can still change these options."""
    pandas.set_option("display.width", TEXT_WIDTH)
    pandas.set_option("display.max_columns", TEXT_COLUMNS)


def _precede_polars(_: Any) -> None:
    os.environ.setdefault("POLARS_TABLE_WIDTH", str(TEXT_WIDTH))
    os.environ.setdefault("POLARS_FMT_MAX_COLS", str(TEXT_COLUMNS))


def _follow_pillow(viewers: Any) -> None:
    """Show images as outputs: Pillow would prefer a program such as `xdg-open`."""
    viewers.register(viewers.IPythonViewer, order=0)


def _follow_plotly(renderers: Any) -> None:
    """Show figures as JSON under every renderer; `bundles` adds text and a picture if possible."""
    renderers.nbformat = renderers.nbformat or SimpleNamespace(__version__="5.0.0")

    @functools.wraps(renderers.show)
    def show(fig: Any, renderer: Any = None, validate: bool = True, **_: Any) -> None:
        from IPython.display import display

        figure = renderers.validate_coerce_fig_to_dict(fig, validate)
        display(renderers.renderers["plotly_mimetype"].to_mimebundle(figure), raw=True)

    renderers.show = show


def _follow_bokeh(showing: Any) -> None:
    """Display models as outputs instead of in a browser."""
    original = showing.show

    @functools.wraps(original)
    def show(obj: Any, *args: Any, **options: Any) -> Any:
        from IPython.display import display

        if options.get("notebook_handle") or not hasattr(obj, "references"):
            return original(obj, *args, **options)
        display(obj)
        return None

    showing.show = show


def _follow_tqdm(notebook: Any) -> None:
    """Make progress bars text, which shows their last state; a widget would stay at its first."""
    std = sys.modules["tqdm.std"].tqdm

    class tqdm_notebook(std):  # type: ignore[misc, valid-type]  # noqa: N801
        """A bar as text, called as `tqdm.notebook` calls its own."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            """`display=False` shows it later, when it changes."""
            super().__init__(*args, **options)

    def trange(*args: Any, **options: Any) -> Any:
        return tqdm_notebook(range(*args), **options)

    notebook.tqdm = notebook.tqdm_notebook = tqdm_notebook
    notebook.trange = notebook.tnrange = trange
    notebook.IProgress = notebook.IProgress or object  # else `tqdm.auto` warns of its absence


def _follow_rich(console: Any) -> None:
    """Make rich write text; in a notebook it writes HTML, and progress needs widgets."""
    console._is_jupyter = lambda: False


ACTIONS: Mapping[str, Action] = {
    "PIL.ImageShow": _follow_pillow,
    "bokeh.io.showing": _follow_bokeh,
    "loguru._better_exceptions": tracebacks.follow_loguru,
    "matplotlib.pyplot": _follow_pyplot,
    "multiprocessing.spawn": definitions.follow_spawn,
    "pandas": _follow_pandas,
    "plotly.io._renderers": _follow_plotly,
    "polars": _precede_polars,
    "rich.console": _follow_rich,
    "tqdm.notebook": _follow_tqdm,
}
"""Actions by module; polars reads its variables at each use, so setting them later suffices."""
