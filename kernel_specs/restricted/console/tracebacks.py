"""Format exceptions as text of limited size; run cells without leaving names or results."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import ipykernel
import IPython

MAX_CHARS = 64 * 1024
"""Longest entry of a traceback; an exception may carry megabytes of text."""
MAX_DEPTH = 10_000
MAX_FRAMES = 40
IMPORT_GUARD = "<frozen importlib._bootstrap> (import guard)"
"""File name of the import guard's wrapper. Python skips such frames for the `stacklevel` of
warnings, and this module drops them from tracebacks."""

_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n"
_KERNEL = (
    *(f"{Path(file).parent}/" for file in (IPython.__file__, ipykernel.__file__)),
    f"{Path(__file__).parents[2]}/",
    IMPORT_GUARD,
)
_RUNNER = (f"{Path(IPython.__file__).parent}/core/interactiveshell.py", "run_code")
"""File and name of the function that runs the code of cells."""
_CELL = re.compile(r'File "(<ipython-input-[^"]*>)"')

CellName = Callable[[str], "str | None"]
"""Label of a compiled cell, given its file name; None for other files."""


def format_exception(
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
    cell_name: CellName,
    folder: str = "",
) -> list[str]:
    """Return the parts of a traceback: header, one string per frame, the exception itself last.

    Paths of files below `folder` are relative to it.
    """
    summary = traceback.TracebackException(kind, value, trace, limit=-MAX_DEPTH, compact=True)
    parts = [_label_cells(part, cell_name) for part in _parts(summary, set())]
    if folder:
        frames = re.compile(rf'^([ |]*File "){re.escape(folder)}/', re.MULTILINE)
        parts = [frames.sub(r"\1", part) for part in parts]
    return list(map(shorten, parts))


def exception_only(kind: type[BaseException], value: BaseException) -> list[str]:
    """Return name and text of an exception as the only part, even if its `__str__` fails."""
    return [shorten("".join(traceback.format_exception_only(kind, value)).rstrip("\n"))]


def is_success(error: BaseException | None) -> bool:
    """Return True if this exception ends a program with exit code 0."""
    if not isinstance(error, SystemExit):
        return False
    return error.code is None or (isinstance(error.code, int) and error.code == 0)


def safe_str(value: object) -> str:
    """Return `str(value)`, shortened; a placeholder if the object's own code raises."""
    try:
        return shorten(str(value))
    except Exception:  # noqa: BLE001  # a user's __str__ may raise anything
        return f"<unprintable {type(value).__name__} object>"


def shorten(text: str) -> str:
    """Cut the middle out of a text of more than MAX_CHARS characters."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _parts(summary: traceback.TracebackException, seen: set[int]) -> list[str]:
    seen.add(id(summary))
    parts: list[str] = []
    cause, context = summary.__cause__, summary.__context__
    if cause is not None and id(cause) not in seen:
        parts += [*_parts(cause, seen), _CAUSE]
    elif context is not None and not summary.__suppress_context__ and id(context) not in seen:
        parts += [*_parts(context, seen), _CONTEXT]
    if getattr(summary, "exceptions", None):  # a group draws its members as a tree
        _drop_kernel_frames(summary.stack)
        return [*parts, "".join(summary.format(chain=False)).rstrip("\n")]
    if summary.stack:
        _drop_kernel_frames(summary.stack)
        parts.append("Traceback (most recent call last):")
        parts += _frames(summary.stack)
    parts.append("".join(summary.format_exception_only()).rstrip("\n"))
    return parts


def _drop_kernel_frames(stack: traceback.StackSummary) -> None:
    kept = [frame for frame in stack if not frame.filename.startswith(_KERNEL)]
    if kept:
        stack[:] = kept


def _frames(stack: traceback.StackSummary) -> list[str]:
    frames = [text.rstrip("\n") for text in stack.format()]
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        note = f"  [{len(frames) - 2 * half} frames left out]"
        frames = [*frames[:half], note, *frames[-half:]]
    return frames


def _label_cells(text: str, cell_name: CellName) -> str:
    return _CELL.sub(lambda match: cell_name(match[1]) or match[0], text)


def hide_callers() -> None:
    """Let printed stacks end at the cell, without the frames that run it."""
    original = traceback.walk_stack

    def walk_stack(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        """Return the frames from `f` to the outermost, with their lines, as in `traceback`."""
        return original(f) if f is None else _below_cells(original(f))

    traceback.walk_stack = walk_stack


def _below_cells(stack: Iterator[tuple[FrameType, int]]) -> Iterator[tuple[FrameType, int]]:
    for frame, line in stack:
        code = frame.f_code
        if (code.co_filename, code.co_name) == _RUNNER:
            return
        if not code.co_filename.startswith(_KERNEL):
            yield frame, line


def follow_loguru(module: Any) -> None:
    """Leave the frames that run a cell out of loguru's tracebacks, which begin above the cell."""
    original = module.ExceptionFormatter._extract_frames

    @functools.wraps(original)
    def extract(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        try:
            frames, source = found
            places = [(file, function) for file, _, function, _ in frames]
        except (TypeError, ValueError):  # another release of loguru
            return found
        below = places.index(_RUNNER) if _RUNNER in places else 0
        return [each for each in frames[below:] if not each[0].startswith(_KERNEL)], source

    module.ExceptionFormatter._extract_frames = extract


_LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


@contextlib.contextmanager
def forgetting(shell: Any) -> Iterator[None]:
    """Restore names and results of `shell` after the block; for the kernel's own cells."""
    names, hidden, hook = dict(shell.user_ns), dict(shell.user_ns_hidden), shell.displayhook
    shown = hook._, hook.__, hook.___
    try:
        yield
    finally:
        shell.user_ns.clear()
        shell.user_ns.update(names)
        shell.user_ns_hidden.clear()
        shell.user_ns_hidden.update(hidden)
        shell.user_ns["Out"].clear()
        hook._, hook.__, hook.___ = shown
        shell.last_execution_result = None
        shell.last_execution_succeeded = True
        for name in _LAST_ERROR:
            vars(sys).pop(name, None)
