"""Plain Python → syntax tree and code object, with everything the compiler says on the way."""

from __future__ import annotations

import ast
import sys
import threading
import warnings
from dataclasses import dataclass
from types import CodeType

from kernel_mcp.policy.diagnostics import Diagnostic
from kernel_mcp.policy.source import MAX_CHAIN, Source, deepest_chain

FILE_NAME = "<cell>"

_recording = threading.Lock()
"""Recording warnings swaps state of the whole process, so one parse at a time does it."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What came of parsing: `tree` and `code` are None where it failed or was not done."""

    tree: ast.Module | None
    code: CodeType | None
    diagnostics: tuple[Diagnostic, ...]


def parse(source: Source, *, python: str = "", compiled: bool = True) -> Parsed:
    """Parse and, unless told otherwise, compile, with top-level `await`, and never run.

    `python` is the version of the kernel, for a remark where this server's version differs.
    """
    text = source.text
    depth, line = deepest_chain(text)
    if depth > MAX_CHAIN:
        return Parsed(None, None, (_too_deep(source, line),))
    tree: ast.Module | None = None
    code: CodeType | None = None
    problem: Diagnostic | None = None
    with _recording, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tree = _tree(text)
            code = _code(tree) if compiled else None
        except SyntaxError as error:
            problem = _syntax(source, error, python, in_bytes=tree is not None)
        except (RecursionError, MemoryError, OverflowError, SystemError):
            problem = _too_deep(source, 1)
        except ValueError as error:
            problem = source.diagnostic("syntax", "error", f"ValueError: {error}", 1, 1)
    remarks = _remarks(source, caught)
    return Parsed(tree, code, (problem, *remarks) if problem is not None else remarks)


def _tree(text: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, FILE_NAME, "exec", flags=flags, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def _code(tree: ast.Module) -> CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(tree, FILE_NAME, "exec", flags=flags, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _too_deep(source: Source, line: int) -> Diagnostic:
    text = (
        "the code is too deeply nested to be checked; split the expression into several "
        "statements, or build the value in a loop"
    )
    return source.diagnostic("depth", "error", text, line, 1)


def _syntax(source: Source, error: SyntaxError, python: str, *, in_bytes: bool) -> Diagnostic:
    """The parser counts a column in characters, the compiler behind it in bytes."""
    line, column = error.lineno or 1, error.offset or 1
    if in_bytes:
        column = source.column_of_byte(line, column - 1)
    text = f"{type(error).__name__}: {error.msg}"
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    kernel = ".".join(python.split(".")[:2])
    if kernel and kernel != own:
        text += f" (checked with Python {own}; the session runs {kernel}, which may differ)"
    return source.diagnostic("syntax", "error", text, line, column)


def _remarks(source: Source, caught: list[warnings.WarningMessage]) -> tuple[Diagnostic, ...]:
    seen: dict[tuple[int, str], Diagnostic] = {}
    for warning in caught:
        if warning.filename != FILE_NAME:
            continue
        text = f"{warning.category.__name__}: {warning.message}"
        seen.setdefault(
            (warning.lineno, text),
            source.diagnostic("syntax", "warning", text, warning.lineno, 1),
        )
    return tuple(seen.values())
