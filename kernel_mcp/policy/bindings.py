"""Which names of a cell stand for modules, and which for anything else."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

_COLUMNS = frozenset({"col", "datum"})
"""Objects of polars and altair whose attributes are column names."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """modules: name → dotted module it was imported as; bound: names that hold something else."""

    modules: dict[str, str]
    bound: frozenset[str]

    def defines(self, name: str) -> bool:
        """Whether the cell gives the name a meaning of its own anywhere."""
        return name in self.bound or name in self.modules

    @classmethod
    def of(cls, tree: ast.Module) -> Bindings:
        """Read them off a tree, following plain assignments such as `p = pathlib`."""
        modules: dict[str, str] = {}
        stores: Counter[str] = Counter()
        assignments: list[ast.Assign] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    modules[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if alias.name.islower():
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    else:
                        stores[alias.asname or alias.name] += 1
            else:
                stores.update(_stored(node))
                if isinstance(node, ast.Assign):
                    assignments.append(node)
        for assignment in assignments:
            _follow(assignment, modules, stores)
        bound = frozenset(name for name, count in stores.items() if count > 0)
        return cls({name: path for name, path in modules.items() if name not in bound}, bound)


def chain(node: ast.expr) -> tuple[ast.expr, list[ast.Attribute]]:
    """What an attribute chain hangs on, and its attributes in the order they are read."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node)
        node = node.value
    attributes.reverse()
    return node, attributes


def holds_columns(path: str) -> bool:
    """Whether attributes of this object are names of columns."""
    return not _COLUMNS.isdisjoint(path.split("."))


def _stored(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return [node.name]
    if isinstance(node, ast.MatchMapping) and node.rest:
        return [node.rest]
    return []


def _follow(assignment: ast.Assign, modules: dict[str, str], stores: Counter[str]) -> None:
    target = assignment.targets[0]
    base, attributes = chain(assignment.value)
    if len(assignment.targets) > 1 or not isinstance(target, ast.Name):
        return
    if isinstance(base, ast.Name) and base.id in modules:
        path = [modules[base.id], *(attribute.attr for attribute in attributes)]
        modules[target.id] = ".".join(path)
        stores[target.id] -= 1
