"""The kinds of objects in `saved_objects.txt`, as cells for one session.

A case is the code that makes objects and an expression that is true of them before and after; names
for which `told` is true need not be there, or not be the same. Each case gets names of its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).with_name("saved_objects.txt")


@dataclass(frozen=True)
class Case:
    """One case, with its names changed."""

    name: str
    setup: str
    check: str


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: set[str], prefix: str) -> None:
        self._names = {name: f"{prefix}{name}" for name in names}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "told":
            (name,) = node.args
            assert isinstance(name, ast.Constant)
            name.value = self._names[str(name.value)]
        return node

    def visit_alias(self, node: ast.alias) -> ast.alias:
        node.asname = self._names.get(node.asname or node.name, node.asname)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._names.get(node.name, node.name)
        return self.generic_visit(node)


def cases() -> list[Case]:
    """All of them."""
    return [_case(number, text) for number, text in enumerate(TEXT.read_text().split("### ")[1:])]


def _case(number: int, text: str) -> Case:
    name, _, rest = text.partition("\n")
    setup, _, check = rest.partition("\n>>> ")
    tree, question = ast.parse(setup), ast.parse(check.strip(), mode="eval")
    renaming = _Renaming(_bound(tree.body), f"c{number}_")
    return Case(name, ast.unparse(renaming.visit(tree)), ast.unparse(renaming.visit(question)))


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that statements of a module bind; dotted imports keep theirs."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {each.asname or each.name for each in node.names if "." not in each.name}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
        for field in ("body", "orelse", "handlers"):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found |= _bound(getattr(node, field, []))
    return found
