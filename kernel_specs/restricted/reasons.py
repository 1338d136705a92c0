"""What cannot leave a process, and why, in words for a list of lost variables."""

from __future__ import annotations

import re
import types

MAX_REASON_CHARS = 160
KINDS = {
    "_thread.lock": "a thread lock",
    "_thread.RLock": "a thread lock",
    "_thread._local": "thread-local data",
    "threading.Thread": "a thread",
    "builtins.generator": "a generator",
    "builtins.coroutine": "a coroutine",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.frame": "a frame",
    "builtins.traceback": "a traceback",
    "builtins.memoryview": "a memory view",
    "_io.BytesIO": "",
    "_io.StringIO": "",
    "_io._IOBase": "an open file",
    "tempfile._TemporaryFileWrapper": "an open file",
    "mmap.mmap": "a memory map",
    "socket.socket": "a connection",
    "_socket.socket": "a connection",
    "ssl.SSLContext": "a connection",
    "sqlite3.Connection": "a connection",
    "sqlite3.Cursor": "a database cursor",
    "subprocess.Popen": "a process",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.pool.Pool": "a pool of workers",
    "concurrent.futures._base.Executor": "a pool of workers",
    "concurrent.futures._base.Future": "a pending result",
    "_asyncio.Future": "an asynchronous task",
    "_asyncio.Task": "an asynchronous task",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "weakref.ReferenceType": "a weak reference",
    "_contextvars.ContextVar": "a context variable",
}
"""What cannot leave the process, by the name of its class or of one it derives from."""
_ENDINGS = (("Connection", "a connection"), ("Cursor", "a database cursor"), ("Lock", "a lock"))
_REFUSAL = re.compile(r"cannot pickle '([\w.]+)' object")


class CannotKeepError(Exception):
    """An object that only exists in this process; `what` names its kind with an article."""

    def __init__(self, what: str, culprit: object) -> None:
        """`culprit` is the object itself, found at any depth."""
        super().__init__(what)
        self.what = what
        self.culprit = culprit


def kind_of(kind: type) -> str:
    """What the class stands for when it cannot leave the process, else an empty text."""
    for base in kind.__mro__:
        what = KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if what is not None:
            return what
        if any(
            type(vars(base).get(name)) is types.FunctionType
            for name in ("__reduce__", "__reduce_ex__", "__getstate__")
        ):
            return ""  # it knows how to do better
    return ""


def reason_for(error: BaseException, value: object) -> str:
    """Why `value` cannot be kept, in words for a list: `thread lock`, `holds an open file`."""
    if isinstance(error, MemoryError):
        return "too large for the memory limit"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "nested too deeply"
    if isinstance(error, CannotKeepError):
        what, itself = error.what, error.culprit is value
    elif match := _REFUSAL.search(_text(error)):
        what, itself = _words_for(match[1]), type(value).__name__ == match[1].rpartition(".")[2]
    else:
        return _cut(f"{type(error).__name__}: {_text(error)}".removesuffix(": "))
    return _cut(what.removeprefix("an ").removeprefix("a ") if itself else f"holds {what}")


def _words_for(name: str) -> str:
    """The kind of an object that pickle refused by the name of its class."""
    endings = (words for ending, words in _ENDINGS if name.endswith(ending))
    return KINDS.get(name) or next(endings, f"a {name} object")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the text of a user's exception may fail
        return ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…"
