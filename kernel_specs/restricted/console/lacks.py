"""Find the module, path or machine whose absence an exception shows.

It is read from objects, never from texts alone: a text may come from data. A module is missing if
an import statement, or a call that imports, has failed in code that contains its name.
"""

from __future__ import annotations

import dis
import errno
import sys
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

from kernel_specs.restricted.config import FILE, HOST, NETWORK, NO_LOOP, READ_ONLY, TOO_LARGE
from kernel_specs.restricted.console.tracebacks import IMPORT_GUARD

MOST_ERRORS = 100
MOST_FRAMES = 200
_CELL = "<ipython-input-"
_IMPORTING = ("<frozen importlib", IMPORT_GUARD, f"{__file__.rpartition('/console/')[0]}/policy/")
_IMPORT_MODULE = "/importlib/__init__.py"
_OWN_FOLDERS = (
    "/workspace/",
    "/tmp/",
    "/proc/",
    "/sys/",
    "/dev/",
    "/run/",
    "/usr/",
    "/opt/",
    "/etc/",
)
"""Folders of the sandbox itself: a missing file there is not one of the host."""
_UNREACHED = (errno.ENETUNREACH,)
_UNKNOWN_HOST = (-2, -3, -5)
"""`EAI_NONAME`, `EAI_AGAIN` and `EAI_NODATA` of netdb.h."""
_NO_LOOP = "no running event loop"
"""Text of `asyncio.get_running_loop`."""
_REFUSED = "the operator's --network does not permit"
"""Part of the proxy's message for a host that it refuses."""


def lacking(error: BaseException) -> str:
    """Return the module that is missing, or READ_ONLY, FILE or another constant, or "".

    The causes of `error` count, too: libraries raise errors of their own for missing modules.
    """
    outer: list[CodeType] = []
    for each in _chain(error):
        outer += [code for code, _ in _frames(each.__traceback__)]
        if found := _module(each, outer) or _path(each) or _machine(each):
            return found
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, members of a group, causes and contexts, the latest first."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < MOST_ERRORS:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        members = getattr(each, "exceptions", ())
        behind = (each.__cause__, each.__context__)
        found = [*(members if type(members) is tuple else ()), *behind]
        waiting += [other for other in found if isinstance(other, BaseException)]


def _module(error: BaseException, outer: list[CodeType]) -> str:
    """Return the module whose import has failed; `outer` is all code on the stack."""
    kind, name = type(error), getattr(error, "name", None)
    guard = sys.modules.get("kernel_specs.restricted.policy.guard")
    refused = guard is not None and kind is guard.ModuleNotAllowedError
    if type(name) is not str or not (refused or kind is ModuleNotFoundError):
        return ""
    frames = _frames(error.__traceback__)
    calls = 0
    while frames and _imports(frames[-1][0].co_filename):
        frames.pop()
        calls += 1
    if not frames or not (calls or _is_import(*frames[-1])):
        return ""
    return name if any(_spells(code, name) for code in outer) else ""


def _frames(trace: TracebackType | None) -> list[tuple[CodeType, int]]:
    """Return code and instruction offset of the innermost frames, the innermost last."""
    found: list[tuple[CodeType, int]] = []
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lasti))
        if len(found) > 2 * MOST_FRAMES:
            del found[:MOST_FRAMES]
        trace = trace.tb_next
    return found[-MOST_FRAMES:]


def _imports(filename: str) -> bool:
    return filename.startswith(_IMPORTING) or filename.endswith(_IMPORT_MODULE)


def _is_import(code: CodeType, place: int) -> bool:
    """Return True for an import statement, and for a call in code that calls `__import__`."""
    name = _instruction(code, place)
    return name == "IMPORT_NAME" or ("CALL" in name and "__import__" in code.co_names)


def _raises(code: CodeType, place: int) -> bool:
    return _instruction(code, place) == "RAISE_VARARGS"


def _instruction(code: CodeType, place: int) -> str:
    return dis.opname[code.co_code[place]] if 0 <= place < len(code.co_code) else ""


def _spells(code: CodeType, name: str) -> bool:
    """Return True if code holds the name of a module, or of one below it."""
    words = (*code.co_names, *code.co_consts)
    return any(type(each) is str and f"{each}.".startswith(f"{name}.") for each in words)


def _path(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.EFBIG and not _by_hand(error):
        return TOO_LARGE
    if not isinstance(error, OSError) or type(error.filename) is not str or _by_hand(error):
        return ""
    if error.errno == errno.EROFS:
        return READ_ONLY
    path = error.filename
    of_host = path.startswith("/") and not path.startswith(_OWN_FOLDERS)
    return FILE if of_host and error.errno == errno.ENOENT else ""


def _machine(error: BaseException) -> str:
    if not isinstance(error, Exception) or _by_hand(error):
        return ""
    if _REFUSED in _text(error):
        return HOST
    if type(error) is RuntimeError and _text(error) == _NO_LOOP:
        return NO_LOOP
    sockets: Any = sys.modules.get("_socket")
    unknown = sockets is not None and isinstance(error, sockets.gaierror)
    number = error.errno if isinstance(error, OSError) else None
    return NETWORK if number in (_UNKNOWN_HOST if unknown else _UNREACHED) else ""


def _by_hand(error: BaseException) -> bool:
    """Return True if a cell itself raised the error, and so controls all of its content."""
    frames = _frames(error.__traceback__)
    return not frames or (frames[-1][0].co_filename.startswith(_CELL) and _raises(*frames[-1]))


def _text(error: BaseException) -> str:
    """Return the texts the error was made with, without calling code of its class."""
    args = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return " ".join(each for each in args if type(each) is str)
