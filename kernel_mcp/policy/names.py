"""Names that code reads and nothing defines, found in the compiled but never run code."""

from __future__ import annotations

import builtins
import difflib
import dis
import re
from collections.abc import Iterator
from types import CodeType

from kernel_mcp.policy.diagnostics import Diagnostic
from kernel_mcp.policy.source import Source
from kernel_mcp.policy.stdlib import words

MAX_NAMES = 20
"""Remarks about one cell."""

MAX_LENGTH = 64 * 1024
"""Characters of code up to which the search is quick enough to be made."""

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_UNKNOWABLE = frozenset({"exec", "globals", "locals", "vars", "get_ipython"})
_PROVIDED = frozenset(dir(builtins)) | words(
    """
    display exit quit In Out aiter anext EncodingWarning BaseExceptionGroup ExceptionGroup
    PythonFinalizationError get_ipython copyright credits license help
    """
)
_IMPLICIT = re.compile(r"__\w*__|_{1,3}|_i{1,3}|_[iod]h|_i?\d+")


def undefined_names(
    source: Source, code: CodeType, known_names: frozenset[str]
) -> tuple[Diagnostic, ...]:
    """Warnings for names that the cell reads and neither it, Python nor the session defines.

    Silent where code may define names out of sight: `from x import *`, `exec`, `globals()`.
    """
    if len(source.text) > MAX_LENGTH:
        return ()
    first_read: dict[str, tuple[int, int | None]] = {}
    written: set[str] = set()
    for part in _code_objects(code):
        instructions = list(dis.get_instructions(part))
        stored = {item.argval for item in instructions if item.opname == "STORE_NAME"}
        written |= {item.argval for item in instructions if item.opname == "STORE_GLOBAL"}
        own: set[str] = set()
        if part is code:
            written |= stored
        else:
            own = stored
        line = part.co_firstlineno
        for item in instructions:
            line, offset = _place(item, line)
            if item.opname in _READS and item.argval not in own:
                first_read.setdefault(item.argval, (line, offset))
            elif _imports_everything(item):
                return ()
    if not _UNKNOWABLE.isdisjoint(first_read):
        return ()
    missing = [
        name
        for name in first_read
        if name not in written
        and name not in known_names
        and name not in _PROVIDED
        and not _IMPLICIT.fullmatch(name)
    ]
    candidates = sorted(written | known_names)
    return tuple(
        _remark(source, name, first_read[name], candidates) for name in missing[:MAX_NAMES]
    )


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    waiting = [code]
    while waiting:
        part = waiting.pop()
        yield part
        waiting.extend(item for item in part.co_consts if isinstance(item, CodeType))


def _place(instruction: dis.Instruction, line: int) -> tuple[int, int | None]:
    """Line and byte offset; before Python 3.11 only the line, carried on from the one before."""
    positions = getattr(instruction, "positions", None)
    if positions is not None and positions.lineno is not None:
        return positions.lineno, positions.col_offset
    starts = instruction.starts_line
    return (starts if type(starts) is int else line), None


def _imports_everything(instruction: dis.Instruction) -> bool:
    return instruction.opname == "IMPORT_STAR" or (
        instruction.opname == "CALL_INTRINSIC_1" and "IMPORT_STAR" in instruction.argrepr
    )


def _remark(
    source: Source, name: str, place: tuple[int, int | None], candidates: list[str]
) -> Diagnostic:
    line, offset = place
    if offset is None:
        text = source.lines[line - 1] if line <= len(source.lines) else ""
        match = re.search(rf"\b{re.escape(name)}\b", text)
        column = match.start() + 1 if match is not None else 1
    else:
        column = source.column_of_byte(line, offset)
    close = difflib.get_close_matches(name, candidates, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    message = f"name {name!r} is not defined in this cell or in the session{hint}"
    return source.diagnostic("name", "warning", message, line, column)
