"""The settings that `process_state` saves: how each is read and written."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython

from kernel_specs.restricted.originals import io, signal

_getcwd = os.getcwd
"""The original function: user code may replace it."""


@dataclass(frozen=True)
class Setting:
    """A setting: its name, the module that has it, how to read and to write it.

    Both functions get the module. Of a dict only changed items are saved and written, with None for
    a removed one. Settings that affect imports are `early`: written before variables are loaded.
    """

    name: str
    module: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    early: bool = False


def _filters(warnings: Any) -> list[tuple[Any, ...]]:
    return [
        (action, getattr(text, "pattern", text), kind, getattr(module, "pattern", module), line)
        for action, text, kind, module, line in warnings.filters
    ]


def _set_filters(warnings: Any, filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, text, kind, module, line in filters:
        warnings.filterwarnings(action, text or "", kind, module or "", line, append=True)


def _levels(logging: Any) -> dict[str, int]:
    known = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: each.level for name, each in known.items() if isinstance(each, logging.Logger)}


def _set_levels(logging: Any, levels: dict[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _plain(value: Any) -> Any:
    """Return a dict of numbers and arrays as tuples of pairs, with lists."""
    if type(value) is dict:
        return tuple((key, _plain(each)) for key, each in value.items())
    return value.tolist() if hasattr(value, "tolist") else value


def _set_numbers(random: Any, numbers: Any) -> None:
    state = dict(numbers)
    state["state"] = dict(state["state"])
    kind = state["bit_generator"]
    if random.get_state(legacy=False)["bit_generator"] != kind:
        random.set_bit_generator(getattr(random, kind)())
    random.set_state(state)


def _options(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of the options of pandas below a group."""
    for name in dir(group):
        value = getattr(group, name)
        if type(value) is type(group):
            yield from _options(value, f"{before}{name}.")
        else:
            yield before + name, value


def _all_options(pandas: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that are deprecated
        return dict(_options(pandas.options))


def _set_options(pandas: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in options.items():
            if pandas.get_option(name) != value:
                pandas.set_option(name, value)


def _parameters(matplotlib: Any) -> dict[str, Any]:
    """Return `rcParams` without the backend, which the kernel sets."""
    parameters = matplotlib.rcParams
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are deprecated
        return {name: parameters[name] for name in parameters if not name.startswith("backend")}


def _set_parameters(matplotlib: Any, parameters: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in parameters.items():
            if matplotlib.rcParams[name] != value:
                matplotlib.rcParams[name] = value


def handlers() -> dict[str, Any]:
    """Return the handlers of signals, by name; without SIGINT, which is the kernel's."""
    found = {each.name: signal.getsignal(each) for each in signal.Signals}
    del found["SIGINT"]
    return {
        name: int(handler) if isinstance(handler, signal.Handlers) else handler
        for name, handler in found.items()
    }


def set_handlers(_: Any, handlers: dict[str, Any]) -> None:
    """Set handlers. Raises ValueError for SIGALRM, by which loading limits its time."""
    for name in handlers.keys() - {"SIGALRM"}:
        if handlers[name] is not None:  # one that Python has not set
            signal.signal(signal.Signals[name], handlers[name])
    if "SIGALRM" in handlers:
        raise ValueError("the kernel uses SIGALRM while it restores variables: set it again")


def _umask(_: Any) -> int:
    """Return the mask without setting it, as os.umask would."""
    with io.open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _stack_size(threading: Any) -> int:
    """Return the size, which reading it resets to 0."""
    size: int = threading.stack_size()
    threading.stack_size(size)
    return size


def _set_collection(gc: Any, settings: tuple[bool, tuple[int, int, int]]) -> None:
    is_enabled, thresholds = settings
    gc.set_threshold(*thresholds)
    (gc.enable if is_enabled else gc.disable)()


def _text_formatter() -> Any:
    shell: Any = get_ipython()
    return shell.display_formatter.formatters["text/plain"]


def _set_precision(_: Any, both: tuple[str, str]) -> None:
    """Set `float_precision`, which sets `float_format`, then that if it was set by itself."""
    formatter = _text_formatter()
    formatter.float_precision, form = both
    formatter.float_format = form


def _of_cells(function: object) -> bool:
    return getattr(function, "__module__", None) == "__main__"


def _extensions(_: Any) -> tuple[str, ...]:
    shell: Any = get_ipython()
    return tuple(sorted(shell.extension_manager.loaded))


def _load_extensions(_: Any, names: tuple[str, ...]) -> None:
    from kernel_specs.restricted.hibernation.objects import import_module  # takes a while

    shell: Any = get_ipython()
    for name in names:
        if name not in shell.extension_manager.loaded:
            import_module(name if name in sys.modules or "." in name else _full_name(name), [])
            shell.extension_manager.load_extension(name)


def _full_name(name: str) -> str:
    """Return the name of the module of an extension, which IPython has under a short one."""
    return f"IPython.extensions.{name}" if name in ("autoreload", "storemagic") else name


def _reloader() -> Any:
    shell: Any = get_ipython()
    return shell.magics_manager.registry["AutoreloadMagics"]._reloader


def _set_reloader(_: Any, both: tuple[bool, bool]) -> None:
    made = _reloader()
    made.enabled, made.check_all = both


def _aliases(_: Any) -> dict[str, str]:
    shell: Any = get_ipython()
    return dict(shell.alias_manager.aliases)


def _set_aliases(_: Any, aliases: dict[str, str | None]) -> None:
    shell: Any = get_ipython()
    for name, command in aliases.items():
        if command is None:
            shell.alias_manager.undefine_alias(name)
        else:
            shell.alias_manager.define_alias(name, command)


def _magics(_: Any) -> dict[str, Any]:
    """Return magics that code has defined, by `line` or `cell` and their name."""
    shell: Any = get_ipython()
    return {
        f"{kind} {name}": function
        for kind, magics in shell.magics_manager.magics.items()
        for name, function in magics.items()
        if _of_cells(function)
    }


def _set_magics(_: Any, magics: dict[str, Any]) -> None:
    shell: Any = get_ipython()
    for place, function in magics.items():
        kind, _sep, name = place.partition(" ")
        if function is not None:
            shell.magics_manager.register_function(function, kind, name)


def _callbacks(_: Any) -> dict[str, Any]:
    """Return callbacks of events that code has registered, by event and number."""
    shell: Any = get_ipython()
    return {
        f"{event} {number}": function
        for event, functions in shell.events.callbacks.items()
        for number, function in enumerate(functions)
        if _of_cells(function)
    }


def _set_callbacks(_: Any, callbacks: dict[str, Any]) -> None:
    shell: Any = get_ipython()
    for place, function in callbacks.items():
        if function is not None:
            shell.events.register(place.partition(" ")[0], function)


def _formatters(_: Any) -> dict[str, Any]:
    """Return class and function by MIME type and class, of formatters that code has set."""
    shell: Any = get_ipython()
    return {
        f"{kind} {each.__module__}.{each.__qualname__}": (each, function)
        for kind, formatter in shell.display_formatter.formatters.items()
        for each, function in formatter.type_printers.items()
        if _of_cells(function)
    }


def _set_formatters(_: Any, formatters: dict[str, Any]) -> None:
    shell: Any = get_ipython()
    for place, both in formatters.items():
        if both is not None:
            shell.display_formatter.formatters[place.partition(" ")[0]].for_type(*both)


SETTINGS = (
    Setting("os.umask", "os", _umask, lambda os, mask: os.umask(mask)),
    Setting(
        "gc.get_threshold",
        "gc",
        lambda gc: (gc.isenabled(), gc.get_threshold()),
        _set_collection,
    ),
    Setting(
        "sys.getswitchinterval",
        "sys",
        lambda sys: sys.getswitchinterval(),
        lambda sys, seconds: sys.setswitchinterval(seconds),
    ),
    Setting(
        "threading.stack_size",
        "threading",
        _stack_size,
        lambda threading, size: threading.stack_size(size),
    ),
    Setting(
        "socket.getdefaulttimeout",
        "socket",
        lambda socket: socket.getdefaulttimeout(),
        lambda socket, seconds: socket.setdefaulttimeout(seconds),
    ),
    Setting(
        "locale.setlocale",
        "locale",
        lambda locale: locale.setlocale(locale.LC_ALL),
        lambda locale, name: locale.setlocale(locale.LC_ALL, name),
    ),
    Setting("extensions of IPython", "IPython", _extensions, _load_extensions),
    Setting(
        "%autoreload",
        "IPython.extensions.autoreload",
        lambda _: (_reloader().enabled, _reloader().check_all),
        _set_reloader,
    ),
    Setting(
        "%precision",
        "IPython",
        lambda _: (_text_formatter().float_precision, _text_formatter().float_format),
        _set_precision,
    ),
    Setting(
        "%pprint",
        "IPython",
        lambda _: _text_formatter().pprint,
        lambda _, is_on: setattr(_text_formatter(), "pprint", is_on),
    ),
    Setting(
        "ast_node_interactivity",
        "IPython",
        lambda _: getattr(get_ipython(), "ast_node_interactivity"),  # noqa: B009
        lambda _, kind: setattr(get_ipython(), "ast_node_interactivity", kind),
    ),
    Setting("aliases of IPython", "IPython", _aliases, _set_aliases),
    Setting("magics of IPython", "IPython", _magics, _set_magics),
    Setting("events of IPython", "IPython", _callbacks, _set_callbacks),
    Setting("formatters of IPython", "IPython", _formatters, _set_formatters),
    Setting("time.tzname", "time", lambda time: time.tzname, lambda time, _: time.tzset()),
    Setting("os.getcwd", "os", lambda _: _getcwd(), lambda os, path: os.chdir(path)),
    Setting(
        "sys.getrecursionlimit",
        "sys",
        lambda sys: sys.getrecursionlimit(),
        lambda sys, limit: sys.setrecursionlimit(limit),
    ),
    Setting(
        "sys.get_int_max_str_digits",
        "sys",
        lambda sys: sys.get_int_max_str_digits(),
        lambda sys, digits: sys.set_int_max_str_digits(digits),
    ),
    Setting("warnings.filters", "warnings", _filters, _set_filters),
    Setting(
        "logging.disable",
        "logging",
        lambda logging: logging.root.manager.disable,
        lambda logging, level: logging.disable(level),
    ),
    Setting("levels of logging", "logging", _levels, _set_levels),
    Setting(
        "decimal.getcontext",
        "decimal",
        lambda decimal: decimal.getcontext().__reduce__()[1],
        lambda decimal, parts: decimal.setcontext(decimal.Context(*parts)),
    ),
    Setting(
        "numpy.random",
        "numpy.random",
        lambda random: _plain(random.get_state(legacy=False)),
        _set_numbers,
    ),
    Setting(
        "numpy.get_printoptions",
        "numpy",
        lambda numpy: numpy.get_printoptions(),
        lambda numpy, options: numpy.set_printoptions(**options),
    ),
    Setting(
        "numpy.geterrcall",
        "numpy",
        lambda numpy: numpy.geterrcall(),
        lambda numpy, function: numpy.seterrcall(function),
    ),
    Setting(
        "numpy.geterr",
        "numpy",
        lambda numpy: numpy.geterr(),
        lambda numpy, kinds: numpy.seterr(**kinds),
    ),
    Setting(
        "numpy.getbufsize",
        "numpy",
        lambda numpy: numpy.getbufsize(),
        lambda numpy, size: numpy.setbufsize(size),
    ),
    Setting("pandas.options", "pandas", _all_options, _set_options),
    Setting("matplotlib.rcParams", "matplotlib", _parameters, _set_parameters),
    Setting(
        "torch.get_rng_state",
        "torch",
        lambda torch: torch.get_rng_state().tolist(),
        lambda torch, state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
)
