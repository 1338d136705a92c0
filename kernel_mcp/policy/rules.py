"""Rules of a restrictive policy on a syntax tree: imports, and ways around them."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from kernel_mcp.policy import (
    HANDED_OUT,
    HANDED_OUT_BY_STDLIB,
    Diagnostic,
    ImportUse,
    Kind,
    Policy,
    Severity,
    words,
)
from kernel_mcp.policy.source import Source
from kernel_mcp.records import dataclass

_COLUMNS = frozenset({"col", "datum"})
"""Objects of polars and altair whose attributes are column names."""


@dataclass(slots=True)
class Bindings:
    """Names that a cell binds.

    modules      name → dotted path of the module that it refers to
    values       number of times that each name is bound to something else
    assignments  the assignments seen, which may give a module another name
    """

    modules: dict[str, str] = field(default_factory=dict)
    values: Counter[str] = field(default_factory=Counter)
    assignments: list[ast.Assign] = field(default_factory=list)

    def binds_value(self, name: str) -> bool:
        """Return True if the cell binds the name to something that is no module."""
        return self.values[name] > 0

    def add(self, node: Any) -> None:
        """Add the names that a node binds; call it in the order of `walk`."""
        kind = node.__class__
        if kind is ast.Name:
            if not isinstance(node.ctx, ast.Load):
                self.values[node.id] += 1
        elif kind in _NAMED_IN:
            self.values[getattr(node, _NAMED_IN[kind])] += 1
        elif kind is ast.Assign:
            self.assignments.append(node)
        elif kind is ast.Import:
            for alias in node.names:
                root = alias.name.partition(".")[0]
                self.modules[alias.asname or root] = alias.name if alias.asname else root
        elif kind is ast.ImportFrom and node.module and not node.level:
            for alias in node.names:
                if alias.name.islower():
                    self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    self.values[alias.asname or alias.name] += 1

    def follow_assignments(self) -> None:
        """Add modules under their other names, as in `p = pathlib`, once all nodes are added."""
        for node in self.assignments:
            base, attributes = chain(node.value)
            match node.targets, base:
                case [ast.Name(id=name)], ast.Name(id=root) if root in self.modules:
                    path = [self.modules[root], *(attribute.attr for attribute in attributes)]
                    self.modules[name] = ".".join(path)
                    self.values[name] -= 1


def chain(node: ast.expr) -> tuple[ast.expr, list[ast.Attribute]]:
    """Return the base of an attribute chain, and its attributes from left to right."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node)
        node = node.value
    attributes.reverse()
    return node, attributes


def holds_columns(path: str) -> bool:
    """Return True if attributes of the object at this path are column names."""
    return not _COLUMNS.isdisjoint(path.split("."))


_NAMED_IN = {
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
}
"""Types of nodes that bind a name, and the field with the name."""
_TURNS = (ast.If, ast.Try, getattr(ast, "TryStar", ast.Try), ast.With)
"""Types of nodes whose body may change the severity of refused imports."""


def walk(tree: ast.Module) -> Iterator[tuple[Any, Severity | None]]:
    """Yield the nodes of a tree, each with the severity of an import that is refused there.

    Outer nodes are first, each level in source order. Of a chain of attributes only the last one is
    yielded.
    """
    waiting: deque[tuple[Any, Severity | None]] = deque([(tree, "error")])
    while waiting:
        node, severity = waiting.popleft()
        yield node, severity
        kind = node.__class__
        if kind is ast.Name or kind is ast.Constant:
            continue
        if kind is ast.Attribute:
            waiting.append((chain(node)[0], severity))
            continue
        inside = _severity_inside(node, severity) if kind in _TURNS else severity
        for name in node._fields:
            value = getattr(node, name, None)
            below = inside if name == "body" else severity
            if isinstance(value, ast.AST):
                waiting.append((value, below))
            elif isinstance(value, list):
                waiting.extend((child, below) for child in value if isinstance(child, ast.AST))


_INSIDES = words(
    """
    __builtins__ __closure__ __code__ __globals__ __import__ __loader__ __subclasses__
    ag_frame cr_frame f_builtins f_globals gi_frame
    """
)
"""Attributes that give access to the interpreter; no data analysis needs them."""

_MISTAKEN = HANDED_OUT - {"ctypes"}
"""As HANDED_OUT, for names that the cell does not import.

`array` may be a numpy array, whose attribute `ctypes` is harmless.
"""

_CATCHES_IMPORT_ERROR = frozenset(
    {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
)
_FROM = re.compile(r"from\s+")
_BUILTINS = frozenset(dir(builtins))


def apply_rules(
    source: Source, tree: ast.Module, policy: Policy
) -> tuple[list[Diagnostic], list[ImportUse]]:
    """Return refusals and imports of a tree; no refusals if the policy allows everything."""
    judge = _Judge(source, policy)
    judge.run(tree)
    return judge.diagnostics, list(dict.fromkeys(judge.imports))


@dataclass(slots=True)
class _Judge:
    source: Source
    policy: Policy
    bindings: Bindings = field(default_factory=Bindings)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    imports: list[ImportUse] = field(default_factory=list)
    imported_by_call: set[ast.Name] = field(default_factory=set)
    """The names `__import__` of calls that count as an import."""

    def run(self, tree: ast.Module) -> None:
        """Apply the rules to every node, once all names that the cell binds are known."""
        rules: dict[type, Callable[[Any, Severity | None], None]] = {
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Call: self._call,
        }
        if not self.policy.allow_all:
            rules |= {
                ast.Attribute: self._attribute,
                ast.Name: self._name,
                ast.Subscript: self._subscript,
            }
        judged = []
        add = self.bindings.add
        for node, severity in walk(tree):
            add(node)
            if node.__class__ in rules:
                judged.append((node, severity))
        self.bindings.follow_assignments()
        for node, severity in judged:
            rules[node.__class__](node, severity)

    def _import(self, node: ast.Import, severity: Severity | None) -> None:
        for alias in node.names:
            if self._use(alias.name, alias, alias.col_offset, severity):
                root, *below = alias.name.split(".")
                self._handed_out(root, [(name, alias) for name in below], HANDED_OUT)

    def _import_from(self, node: ast.ImportFrom, severity: Severity | None) -> None:
        module = node.module or ""
        if node.level:
            text = "a relative import needs a package, and a cell belongs to none"
            self._report("import", "warning", text, node, node.col_offset)
            return
        if self.policy.allows_members(module):
            self._use(module, node, node.col_offset, severity)
            for alias in node.names:
                self._handed_out(module, [(alias.name, alias)], None)
        elif self.policy.allows(module):
            for alias in node.names:
                self._use(f"{module}.{alias.name}", alias, alias.col_offset, severity)
        else:
            line = self.source.lines[node.lineno - 1].encode()[node.col_offset :]
            match = _FROM.match(line.decode("utf-8", "ignore"))
            skip = match.end() if match is not None else 0
            self._use(module, node, node.col_offset + skip, severity)

    def _use(
        self, module: str, node: ast.stmt | ast.alias, offset: int, severity: Severity | None
    ) -> bool:
        allowed = self.policy.allows(module)
        self.imports.append(ImportUse(module, allowed, node.lineno))
        if not allowed and severity is not None:
            text = self.policy.denial(module)
            if severity == "warning":
                text += " The code around it catches the ImportError."
            self._report("import", severity, text, node, offset)
        return allowed

    def _name(self, node: ast.Name, _severity: Severity | None) -> None:
        name = node.id
        if not isinstance(node.ctx, ast.Load) or node in self.imported_by_call:
            return
        if name == "get_ipython":
            text = (
                "get_ipython() runs commands past the import policy and is not allowed in this "
                "session; use plain Python. Start the server with --allow '*' to permit it."
            )
            self._report("magic", "error", text, node, node.col_offset)
        elif name == "__import__":
            self._refuse_builtin(node, "write an import statement instead")
        elif name in _INSIDES:
            self._refuse_inside(name, node, node.col_offset)
        elif name in self.policy.deny_builtins and not (
            self.bindings.binds_value(name) or name in self.bindings.modules
        ):
            self._refuse_builtin(node, "")

    def _call(self, node: ast.Call, _severity: Severity | None) -> None:
        """Handle `__import__("math")` as an import and `getattr(x, "y")` as an attribute."""
        if not isinstance(node.func, ast.Name):
            return
        if node.func.id == "__import__" and node.args:
            first = node.args[0]
            module = first.value if isinstance(first, ast.Constant) else None
            denied = "__import__" in self.policy.deny_builtins
            if isinstance(module, str) and self.policy.allows(module) and not denied:
                self.imports.append(ImportUse(module, True, node.lineno))
                self.imported_by_call.add(node.func)
        elif node.func.id == "getattr" and len(node.args) > 1 and not self.policy.allow_all:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                base, attributes = chain(node.args[0])
                steps: list[tuple[str, ast.expr]] = [(item.attr, item) for item in attributes]
                self._chain(base, [*steps, (name.value, name)])

    def _attribute(self, node: ast.Attribute, _severity: Severity | None) -> None:
        base, attributes = chain(node)
        self._chain(base, [(item.attr, item) for item in attributes])

    def _subscript(self, node: ast.Subscript, _severity: Severity | None) -> None:
        key = node.slice
        if isinstance(key, ast.Constant) and key.value in ("__builtins__", "__import__"):
            self._refuse_inside(str(key.value), key, key.col_offset)

    def _chain(self, base: ast.expr, steps: list[tuple[str, ast.expr]]) -> None:
        """Check a chain of attributes such as `numpy.os.system`."""
        before = base.id if isinstance(base, ast.Name) else ""
        for name, node in steps:
            loader = name == "loader" and before == "__spec__"
            builtin = before in _BUILTINS and not self.bindings.binds_value(before)
            if name in _INSIDES or loader or (builtin and name == "__self__"):
                self._refuse_inside(name, node, _offset(name, node))
                return
            before = name
        if not isinstance(base, ast.Name) or self.bindings.binds_value(base.id):
            return
        module = self.bindings.modules.get(base.id)
        if module is not None:
            self._handed_out(module, steps, None)
        elif base.id in self.policy.modules:
            self._handed_out(base.id, steps, _MISTAKEN)

    def _handed_out(
        self,
        path: str,
        steps: list[tuple[str, ast.expr]] | list[tuple[str, ast.alias]],
        names: frozenset[str] | None,
    ) -> None:
        """Refuse a module that is reached as an attribute of an allowed one.

        `names` are the attributes that count as modules. None stands for the default ones; members
        that the policy does not allow are then refused, too.
        """
        policy = self.policy
        if policy.allow_all or not policy.allows(path):
            return
        members_only = names is None
        if names is None:
            stdlib = path.partition(".")[0] in sys.stdlib_module_names
            names = HANDED_OUT_BY_STDLIB if stdlib else HANDED_OUT
        for name, node in steps:
            if holds_columns(path):
                return
            plain = "subprocess" if name.startswith("create_subprocess_") else name.strip("_")
            inner = f"{path}.{name}"
            if members_only and not policy.allows(inner) and not name.startswith("__"):
                self._report("import", "error", policy.denial(inner), node, _offset(name, node))
                return
            if plain in names and not policy.allows(plain):
                text = f"{inner} leads to the module {plain!r}: {policy.denial(plain)}"
                self._report("attribute", "error", text, node, _offset(name, node))
                return
            path = inner

    def _refuse_builtin(self, node: ast.Name, instead: str) -> None:
        way = instead or f"the {self.policy.profile} profile does without it"
        text = (
            f"{node.id} is not allowed in this session; {way}. Start the server with "
            + ("--allow '*'" if node.id == "__import__" else "--profile default")
            + " to permit it."
        )
        self._report("builtin", "error", text, node, node.col_offset)

    def _refuse_inside(self, name: str, node: ast.expr, offset: int) -> None:
        text = (
            f"{name} reaches into the interpreter, past the import policy, and is not allowed in "
            "this session. Start the server with --allow '*' to permit it."
        )
        self._report("attribute", "error", text, node, offset)

    def _report(
        self,
        kind: Kind,
        severity: Severity,
        text: str,
        node: ast.expr | ast.stmt | ast.alias,
        offset: int,
    ) -> None:
        line = node.lineno
        if isinstance(node, ast.Attribute):
            line = node.end_lineno or line
        column = self.source.column_of_byte(line, offset)
        self.diagnostics.append(self.source.diagnostic(kind, severity, text, line, column))


def _offset(name: str, node: ast.expr | ast.alias) -> int:
    """Return the byte column at which the name of an attribute begins."""
    if isinstance(node, ast.Attribute) and node.end_col_offset is not None:
        return max(0, node.end_col_offset - len(name.encode()))
    return node.col_offset


def _severity_inside(node: Any, severity: Severity | None) -> Severity | None:
    """Return the severity of refused imports in the body of a node; None if they are ignored.

    They are ignored under `TYPE_CHECKING`, and warnings where the ImportError is caught.
    """
    if severity is None:
        return None
    if isinstance(node, ast.If):
        return None if _type_checking(node.test) else severity
    if isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _last_name(call.func) == "suppress":
                return "warning" if any(map(_catches, call.args)) else severity
        return severity
    handlers: list[ast.ExceptHandler] = node.handlers
    caught = any(handler.type is None or _catches(handler.type) for handler in handlers)
    return "warning" if caught else severity


def _catches(caught: ast.expr) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_last_name(item) in _CATCHES_IMPORT_ERROR for item in caught.elts)
    return _last_name(caught) in _CATCHES_IMPORT_ERROR


def _type_checking(test: ast.expr) -> bool:
    return _last_name(test) == "TYPE_CHECKING"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
