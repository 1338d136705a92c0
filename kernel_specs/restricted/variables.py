"""Describe the variables of a session without running user code.

The service thread does this while a cell runs. So only objects that cannot call user code are
inspected: those of exact built-in types, and of known types of numpy, pandas and polars.
"""

from __future__ import annotations

import ast
import itertools
import sys
import types
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

MAX_NAMES = 500
MAX_NEWS = 1000
"""Most names of each kind (added, removed) in one reply."""
NAME_CHARS = 200
PREVIEW_CHARS = 80
PREVIEW_ITEMS = 6
PREVIEW_DEPTH = 2
MAX_INT_BITS = 4096
"""Longer integers are not converted to digits, which takes quadratic time."""

_SCALARS = (int, float, complex, bool, type(None), type(Ellipsis))
_TEXTS = (str, bytes, bytearray)
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_SIZED = frozenset({*_TEXTS, *_BRACKETS, range})
_LIBRARY_TYPES = {
    "numpy": ("ndarray",),
    "pandas": ("DataFrame", "Series", "Index", "RangeIndex", "DatetimeIndex"),
    "polars": ("DataFrame", "Series"),
}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class VariableSummary:
    """Description of a variable; `size` in bytes. `shape`, `length`, `size` are None if unknown."""

    name: str
    type: str
    module: str
    shape: list[int] | None
    length: int | None
    size: int | None
    preview: str


def describe(
    namespace: dict[str, Any], hidden: Container[str] = (), match: str = "", offset: int = 0
) -> dict[str, Any]:
    """Return the content of a `kernel_mcp_variables_reply`.

    Only names that contain `match`, or fit it as a pattern, are described, those from number
    `offset` on. The kernel's own names, `hidden`, are left out. Names of more than `NAME_CHARS`
    characters are only counted.
    """
    names = [
        (name, value)
        for name, value in list(namespace.items())
        if type(name) is str and not name.startswith("_") and name not in hidden
        if match in name or fnmatchcase(name, match)
    ]
    short = [pair for pair in names if len(pair[0]) <= NAME_CHARS]
    shown = short[offset : offset + MAX_NAMES]
    variables = [asdict(_variable(name, value)) for name, value in shown]
    omitted = len(names) - len(shown) - len(short[:offset])
    return {"status": "ok", "variables": variables, "omitted": omitted}


class NameTracker:
    """Tracker of names that were added to a namespace or removed since the last call.

    A call costs time in proportion to the new names. A dict keeps the order of insertion, so keys
    after the last known one are new. All keys are compared only if the count shows a removal.
    """

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._size = 0
        self._last: object = None

    def news(
        self, namespace: dict[Any, Any], hidden: Container[str]
    ) -> tuple[list[str], list[str]]:
        """Return the public names added, and those removed, since the last call."""
        fresh, known = self._since(namespace), self._known
        if fresh is not None and len(namespace) == self._size + len(fresh):
            come = [key for key in fresh if _public(key, hidden) and key not in known]
            gone: list[str] = []
        else:
            now = {key: None for key in list(namespace) if _public(key, hidden)}
            come = [key for key in now if key not in known]
            gone = [key for key in known if key not in now]
            for key in gone:
                del known[key]
        known.update(dict.fromkeys(come))
        self._size, self._last = len(namespace), next(reversed(namespace.keys()), None)
        return come, gone

    def _since(self, namespace: dict[Any, Any]) -> list[Any] | None:
        """Return the keys after the last known one, or None if that was removed."""
        fresh: list[Any] = []
        try:
            for key in reversed(namespace.keys()):
                if key is self._last:
                    return fresh[::-1]
                fresh.append(key)
        except RuntimeError:  # a thread is changing it
            pass
        return None


def removed(gone: list[str], cell: str) -> list[str]:
    """Return the names in `gone` that no `del` or `except ... as` of the cell names."""
    try:
        nodes = list(ast.walk(ast.parse(cell)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return gone
    named = {each.id for each in nodes if isinstance(each, ast.Name) and type(each.ctx) is ast.Del}
    named |= {each.name for each in nodes if isinstance(each, ast.ExceptHandler) and each.name}
    return [name for name in gone if name not in named]


def _public(key: object, hidden: Container[str]) -> bool:
    return (
        type(key) is str and not key.startswith("_") and len(key) <= NAME_CHARS
    ) and key not in hidden


def _variable(name: str, value: object) -> VariableSummary:
    kind = type(value)
    shape = _shape(value)
    return VariableSummary(
        name=name,
        type=_type_name(value),
        module=_text(type.__dict__["__module__"].__get__(kind)) or "",
        shape=shape,
        length=_length(value, shape),
        size=size_of(value),
        preview=_cut(_preview(value)),
    )


def _type_name(value: object) -> str:
    kind = type(value)
    if kind is types.ModuleType:
        return "module"
    if kind in _FUNCTIONS:
        return "function"
    if issubclass(kind, type):
        return "class"
    return _class_name(kind)


def _shape(value: Any) -> list[int] | None:
    if _library_type(value).endswith(("ndarray", "DataFrame")):
        shape = _quietly(lambda: value.shape)
        if type(shape) is tuple and all(type(size) is int for size in shape):
            return list(shape)
    return None


def _length(value: Any, shape: list[int] | None) -> int | None:
    if type(value) in _SIZED or _library_type(value).endswith(("Series", "Index")):
        length = _quietly(lambda: len(value))
        return length if type(length) is int else None
    return shape[0] if shape else None


def size_of(value: Any) -> int | None:
    """Return the bytes of a value, without those that it refers to; None if unknown."""
    library = _library_type(value)
    if library == "numpy.ndarray":
        size = _quietly(lambda: value.nbytes)
    elif library.startswith("polars."):
        size = _quietly(lambda: value.estimated_size())
    elif library == "pandas.DataFrame":
        size = _quietly(lambda: int(value.memory_usage(index=False).sum()))
    elif library.startswith("pandas."):
        size = _quietly(lambda: int(value.nbytes))
    elif type(value) in _SCALARS or type(value) in _SIZED:
        size = sys.getsizeof(value)
    else:
        return None
    return size if type(size) is int else None


def _preview(value: Any, depth: int = 0) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > MAX_INT_BITS:
        return f"<int of {value.bit_length()} bits>"
    if kind in _SCALARS or kind is range:
        return repr(value)
    if kind in _TEXTS:
        return repr(value[: PREVIEW_CHARS + 1])
    if kind in _BRACKETS:
        return _container(value, depth)
    if kind is types.ModuleType:
        return f"<module {_text(vars(value).get('__name__'))}>"
    if kind is types.FunctionType:
        return _signature(value)
    if issubclass(kind, type):
        return f"<class {_class_name(value)}>"
    library = _library_type(value)
    table = _quietly(lambda: _table(value, library)) if library else None
    return str(table) if table else f"<{_type_name(value)} object>"


def _container(value: Any, depth: int) -> str:
    opening, closing = _BRACKETS[type(value)]
    if depth >= PREVIEW_DEPTH:
        return f"{opening}…{closing}"
    items = value.items() if type(value) is dict else value
    # A copy of the first items, as the cell may be changing the container at this moment.
    first = _quietly(lambda: list(itertools.islice(items, PREVIEW_ITEMS)))
    if first is None:
        return f"{opening}…{closing}"
    if type(value) is dict:
        shown = [f"{_preview(key, depth + 1)}: {_preview(item, depth + 1)}" for key, item in first]
    else:
        shown = [_preview(item, depth + 1) for item in first]
    if len(value) > PREVIEW_ITEMS:
        shown.append("…")
    if type(value) is set and not shown:
        return "set()"
    comma = "," if type(value) is tuple and len(shown) == 1 else ""
    return f"{opening}{', '.join(shown)}{comma}{closing}"


def _table(value: Any, library: str) -> str:
    if library == "numpy.ndarray":
        if value.dtype.hasobject:
            return f"{value.dtype} array"
        return f"{value.dtype}: {value.flat[:PREVIEW_ITEMS].tolist()!r}"
    if library.endswith("DataFrame"):
        names = [_preview(name, 1) for name in list(value.columns[:PREVIEW_ITEMS])]
        more = ", …" if len(value.columns) > PREVIEW_ITEMS else ""
        return f"columns: {', '.join(names)}{more}"
    return f"{value.dtype}"


def _signature(function: Any) -> str:
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    if code.co_flags & 0x04:
        names.insert(code.co_argcount, f"*{code.co_varnames[count]}")
        count += 1
    elif code.co_kwonlyargcount:
        names.insert(code.co_argcount, "*")
    if code.co_flags & 0x08:
        names.append(f"**{code.co_varnames[count]}")
    return f"{code.co_name}({', '.join(names)})"


def _library_type(value: object) -> str:
    """Return the type, as "numpy.ndarray", of exact instances of `_LIBRARY_TYPES`, else ""."""
    kind = type(value)
    for module, names in _LIBRARY_TYPES.items():
        library = sys.modules.get(module)
        if type(library) is types.ModuleType:
            for name in names:
                if vars(library).get(name) is kind:
                    return f"{module}.{name}"
    return ""


def _class_name(kind: type) -> str:
    return str(type.__dict__["__name__"].__get__(kind))


def _text(value: object) -> str:
    return value if type(value) is str else ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…"


def _quietly(look: Callable[[], Any]) -> Any:
    """Return the result of `look`, None if it raises: another thread may change the object."""
    try:
        return look()
    except Exception:  # noqa: BLE001  # a description is never worth an error
        return None
