"""Limits of size: 400 lines for a class, 8 parameters for a constructor, 500 lines for a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES, CLASS_LINES, PARAMETERS = 500, 400, 8


def too_large(name: str, text: str) -> Iterator[str]:
    if text.count("\n") > FILE_LINES:
        yield f"{name} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > CLASS_LINES:
            yield f"{name}: {node.name} has {lines} lines"
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                own = each.args
                count = len(own.posonlyargs) + len(own.args) + len(own.kwonlyargs) - 1
                if count > PARAMETERS:
                    yield f"{name}: the constructor of {node.name} has {count} parameters"


def test_no_file_class_or_constructor_is_too_large() -> None:
    found: list[str] = []
    for package in ("kernel_mcp", "kernel_specs"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            found += too_large(name, path.read_text(encoding="utf-8"))
    assert found == []
