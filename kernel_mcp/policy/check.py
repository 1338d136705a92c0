"""`check`: static analysis of a cell, without running it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import itertools
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType

from kernel_mcp.config.values import close_to
from kernel_mcp.policy import Diagnostic, ImportUse, Policy, Report, magics, words
from kernel_mcp.policy.magics import Command
from kernel_mcp.policy.rules import apply_rules
from kernel_mcp.policy.source import (
    ScriptMetadataError,
    Source,
    guard,
    script_metadata,
)
from kernel_mcp.records import dataclass

FILE_NAME = "<cell>"
_recording = threading.Lock()
"""Held while warnings are recorded, because that changes state of the whole process."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of parsing. `tree` and `code` are None if that step failed or was not done."""

    tree: ast.Module | None
    code: CodeType | None
    diagnostics: tuple[Diagnostic, ...]


def parse(source: Source, *, python: str = "", compiled: bool = True) -> Parsed:
    """Parse and, with `compiled`, compile code, with top-level `await` permitted; never run it.

    `python` is the version of the kernel: syntax errors mention it if the server's differs. Python
    3.10 crashes on an expression of some 100,000 operators.
    """
    text = source.text
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
            problem = too_deep(source)
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
    """Compile a cell. IPython compiles each statement alone: any may import from `__future__`."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    body = sorted(
        tree.body,
        key=lambda node: not (isinstance(node, ast.ImportFrom) and node.module == "__future__"),
    )
    code = compile(ast.Module(body, []), FILE_NAME, "exec", flags=flags, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def too_deep(source: Source) -> Diagnostic:
    """Return the error for code that is nested too deeply for the parser."""
    text = (
        "the code is too deeply nested to be checked; split the expression into several "
        "statements, or build the value in a loop"
    )
    return source.diagnostic("depth", "error", text, 1, 1)


def _syntax(source: Source, error: SyntaxError, python: str, *, in_bytes: bool) -> Diagnostic:
    """Return the diagnostic of a SyntaxError; with `in_bytes` its column counts UTF-8 bytes."""
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


MAX_ENTRIES = 2000
"""Most workspace entries that are examined; code may create very many."""


def own_modules(folders: Iterable[Path]) -> frozenset[str]:
    """Return the names under which code can import files and folders of a session's folders.

    No file is read. Names of the standard library are left out, as they cannot be replaced. A
    folder that cannot be read has none.
    """
    found: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in itertools.islice(entries, MAX_ENTRIES):
                name, dot, suffix = entry.name.partition(".")
                if name.isidentifier() and (not dot or suffix == "py"):
                    found.add(name)
    return frozenset(found - sys.stdlib_module_names)


MAX_NAMES = 20
"""Most undefined names reported for one cell."""

MAX_LENGTH = 64 * 1024
"""Longest code, in characters, that is searched for undefined names."""

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
    """Return warnings for names that the cell reads but neither it, Python nor the session defines.

    Empty for code that may define names dynamically: `from x import *`, `exec`, `globals()`.
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
    """Return line and byte offset; the offset is None if not known, as before Python 3.11.

    `line` is the one of the previous instruction.
    """
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
    close = close_to(name, candidates)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    message = f"name {name!r} is not defined in this cell or in the session{hint}"
    return source.diagnostic("name", "warning", message, line, column)


MAX_DIAGNOSTICS = 50


def check(
    code: str,
    policy: Policy,
    *,
    known_names: frozenset[str] | None = None,
    own_modules: frozenset[str] = frozenset(),
    python: str = "",
    compiled: bool = True,
) -> Report:
    """Report syntax, imports, refusals, undefined names and script metadata of a cell.

    known_names  variables of the session; None skips the search for undefined names
    own_modules  modules in the session's workspace, which may be imported
    python       version of the session's Python, mentioned if the server's differs
    compiled     False skips errors that only the compiler detects, after the parser
    """
    note = f"Allowed here: {policy.summary()}."
    policy = replace(policy, modules=policy.modules | own_modules)
    source = Source.of(code)
    unusable = guard(source, code)
    if unusable is not None:
        return Report(valid=False, diagnostics=(unusable,))
    source, parsed, found = _parse(source, python, compiled)
    diagnostics = list(parsed.diagnostics)
    imports: tuple[ImportUse, ...] = ()
    if not policy.allow_all:
        diagnostics += [
            magics.refuse(source, each, policy) for each in found if not magics.is_harmless(each)
        ]
    if parsed.tree is not None:
        found_in_tree, used = apply_rules(source, parsed.tree, policy)
        diagnostics += found_in_tree
        imports = tuple(sorted(used, key=lambda use: use.line))
    plain = all(magics.is_harmless(each) for each in found)
    if known_names is not None and parsed.code is not None and plain:
        diagnostics += undefined_names(source, parsed.code, known_names)
    diagnostics += _metadata(source, code)
    refused = any(not use.allowed for use in imports)
    return Report(
        valid=all(item.severity != "error" for item in diagnostics),
        diagnostics=_limited(diagnostics),
        imports=imports,
        note=note if refused else "",
    )


def _parse(
    source: Source, python: str, compiled: bool
) -> tuple[Source, Parsed, tuple[Command, ...]]:
    """Parse as plain Python and, only if that fails, as IPython would read it."""
    parsed = parse(source, python=python, compiled=compiled)
    if parsed.tree is not None or any(item.kind == "depth" for item in parsed.diagnostics):
        return source, parsed, ()
    plain, found = magics.plain(source)
    if plain == source:
        return source, parsed, ()
    return plain, parse(plain, python=python, compiled=compiled), found


def _metadata(source: Source, code: str) -> list[Diagnostic]:
    try:
        script_metadata(code)
    except ScriptMetadataError as error:
        return [source.diagnostic("pep723", "error", error.reason, error.line, 1)]
    return []


def _limited(diagnostics: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return diagnostics in source order. If there are too many, warnings are dropped first."""
    chosen = sorted(diagnostics, key=lambda item: item.severity != "error")[:MAX_DIAGNOSTICS]
    chosen.sort(key=lambda item: (item.line, item.column))
    left_out = len(diagnostics) - len(chosen)
    if left_out:
        chosen[-1] = replace(
            chosen[-1], message=f"{chosen[-1].message} ({left_out} more problems are not shown)"
        )
    return tuple(chosen)
