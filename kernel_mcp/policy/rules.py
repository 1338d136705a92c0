"""Rules of a restrictive policy on a syntax tree: imports, and ways around them."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import Counter
from collections.abc import Container
from dataclasses import field
from typing import Any, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Bindings:
    """Names that a cell binds.

    modules  name → dotted path of the module that it refers to
    bound    names that refer to something else
    """

    modules: dict[str, str]
    bound: frozenset[str]

    def defines(self, name: str) -> bool:
        """Return True if the cell binds the name anywhere."""
        return name in self.bound or name in self.modules

    @classmethod
    def of(cls, seen: Seen) -> Bindings:
        """Return the bindings of a tree, following plain assignments such as `p = pathlib`."""
        modules: dict[str, str] = {}
        stores = seen.stores
        for node in seen.in_order(seen.imports):
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
        for node in seen.in_order(seen.assignments):
            assert isinstance(node, ast.Assign)
            _follow(node, modules, stores)
        bound = frozenset(name for name, count in stores.items() if count > 0)
        return cls({name: path for name, path in modules.items() if name not in bound}, bound)


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


Place: TypeAlias = tuple[int, int, ast.stmt]
"""Depth of a statement in the tree, its number in the walk, and the statement."""


@dataclass(slots=True)
class Seen:
    """Nodes that a walk through a tree has collected.

    judged       nodes for the rules, with the severity of a refused import there; None for none
    imports      import statements
    assignments  assignment statements
    stores       number of times that each name is bound to something other than a module
    """

    judged: list[tuple[Any, Severity | None]] = field(default_factory=list)
    imports: list[Place] = field(default_factory=list)
    assignments: list[Place] = field(default_factory=list)
    stores: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def in_order(places: list[Place]) -> list[ast.stmt]:
        """Return statements from the outermost to the innermost, each level in source order."""
        return [node for *_, node in sorted(places, key=lambda place: (place[0], -place[1]))]


def survey(tree: ast.Module, names: Container[str]) -> Seen:
    """Walk a tree once, from its end to its beginning; `names` are those that rules refer to."""
    seen = Seen()
    judged, stores = seen.judged, seen.stores
    number = 0
    waiting: list[tuple[Any, Severity | None, int]] = [(tree, "error", 0)]  # nodes, by class
    while waiting:
        node, severity, depth = waiting.pop()
        number += 1
        kind = node.__class__
        if kind is ast.Name:
            if node.ctx.__class__ is not ast.Load:
                stores[node.id] += 1
            elif node.id in names:
                judged.append((node, severity))
            continue
        if kind is ast.Attribute:
            judged.append((node, severity))
            while node.__class__ is ast.Attribute:
                node = node.value
            waiting.append((node, severity, depth + 1))
            continue
        if (stored := _STORED.get(kind)) is not None:
            if (given := getattr(node, stored)) is not None:
                stores[given] += 1
        elif kind in _JUDGED:
            judged.append((node, severity))
        if kind is ast.Import or kind is ast.ImportFrom:
            seen.imports.append((depth, number, node))
            continue
        if kind is ast.Assign:
            seen.assignments.append((depth, number, node))
        inside = _severity_inside(node, severity) if kind in _TURNS else severity
        depth += 1
        for field_name in _FIELDS[kind]:
            value: Any = getattr(node, field_name, None)
            below = inside if field_name == "body" else severity
            if value.__class__ is list:
                waiting.extend(
                    (child, below, depth) for child in value if child.__class__ not in _LEAVES
                )
            elif value.__class__ not in _LEAVES:
                waiting.append((value, below, depth))
    return seen


_STORED = {
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
_JUDGED = frozenset({ast.Import, ast.ImportFrom, ast.Call, ast.Subscript})
_TURNS = frozenset(
    kind for kind in (ast.If, ast.Try, getattr(ast, "TryStar", None), ast.With) if kind is not None
)
"""Types of nodes in whose body refused imports may have another severity."""
_LEAVES = frozenset(
    [
        *(str, int, float, complex, bytes, bool, type(None), type(...)),
        *(ast.Constant, ast.Pass, ast.Break, ast.Continue, ast.alias, ast.TypeIgnore),
        *ast.expr_context.__subclasses__(),
        *ast.boolop.__subclasses__(),
        *ast.operator.__subclasses__(),
        *ast.unaryop.__subclasses__(),
        *ast.cmpop.__subclasses__(),
    ]
)
"""Types of field values below which there is nothing for a rule."""
_NO_NODES = frozenset({"ctx", "op", "ops", "id", "attr", "arg", "type_comment", "kind", "level"})


class _Fields(dict[type, tuple[str, ...]]):
    """For each type of node, its fields that may contain nodes."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        found = self[kind] = tuple(name for name in kind._fields if name not in _NO_NODES)
        return found


_FIELDS = _Fields()


def _follow(assignment: ast.Assign, modules: dict[str, str], stores: Counter[str]) -> None:
    target = assignment.targets[0]
    base, attributes = chain(assignment.value)
    if len(assignment.targets) > 1 or not isinstance(target, ast.Name):
        return
    if isinstance(base, ast.Name) and base.id in modules:
        path = [modules[base.id], *(attribute.attr for attribute in attributes)]
        modules[target.id] = ".".join(path)
        stores[target.id] -= 1


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
_BUILTIN_NAMES = frozenset(dir(builtins))
_NAMED = _INSIDES | {"get_ipython", "__import__"}
"""Names that rules refer to, beside the builtins that a policy denies."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Imports and diagnostics that the rules find in one tree."""

    diagnostics: tuple[Diagnostic, ...]
    imports: tuple[ImportUse, ...]


def apply_rules(source: Source, tree: ast.Module, policy: Policy) -> Findings:
    """Return imports and refusals in a tree; no refusals if the policy allows everything."""
    judge = _Judge(source, policy)
    judge.run(tree)
    return Findings(tuple(judge.diagnostics), tuple(dict.fromkeys(judge.imports)))


@dataclass(slots=True)
class _Judge:
    source: Source
    policy: Policy
    bindings: Bindings = field(default_factory=lambda: Bindings({}, frozenset()))
    diagnostics: list[Diagnostic] = field(default_factory=list)
    imports: list[ImportUse] = field(default_factory=list)

    def run(self, tree: ast.Module) -> None:
        """Apply the rules to every node that they refer to."""
        free = self.policy.allow_all
        seen = survey(tree, () if free else _NAMED | self.policy.deny_builtins)
        passed: set[int] = set()
        if not free:
            self.bindings = Bindings.of(seen)
        for node, severity in seen.judged:
            kind = node.__class__
            if kind is ast.Attribute:
                if not free:
                    base, attributes = chain(node)
                    self._chain(base, [(item.attr, item) for item in attributes])
            elif kind is ast.Call:
                self._call(node, passed)
            elif kind is ast.Name:
                if id(node) not in passed:
                    self._name(node)
            elif kind is ast.Import:
                self._import(node, severity)
            elif kind is ast.ImportFrom:
                self._import_from(node, severity)
            else:
                self._subscript(node)

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

    def _name(self, node: ast.Name) -> None:
        name = node.id
        if not isinstance(node.ctx, ast.Load) or self.policy.allow_all:
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
        elif name in self.policy.deny_builtins and not self.bindings.defines(name):
            self._refuse_builtin(node, "")

    def _call(self, node: ast.Call, passed: set[int]) -> None:
        """Handle `__import__("math")` as an import and `getattr(x, "y")` as an attribute.

        The id of an `__import__` name that is thereby allowed is added to `passed`.
        """
        function = node.func.id if node.func.__class__ is ast.Name else ""
        if function == "__import__" and node.args:
            first = node.args[0]
            module = first.value if isinstance(first, ast.Constant) else None
            denied = "__import__" in self.policy.deny_builtins
            if isinstance(module, str) and self.policy.allows(module) and not denied:
                self.imports.append(ImportUse(module, True, node.lineno))
                passed.add(id(node.func))
        elif function == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                base, attributes = chain(node.args[0])
                steps: list[tuple[str, ast.expr]] = [(item.attr, item) for item in attributes]
                self._chain(base, [*steps, (name.value, name)])

    def _subscript(self, node: ast.Subscript) -> None:
        key = node.slice
        if isinstance(key, ast.Constant) and key.value in ("__builtins__", "__import__"):
            self._refuse_inside(str(key.value), key, key.col_offset)

    def _chain(self, base: ast.expr, steps: list[tuple[str, ast.expr]]) -> None:
        """Check a chain of attributes such as `numpy.os.system`."""
        if self.policy.allow_all:
            return
        before = base.id if isinstance(base, ast.Name) else ""
        for name, node in steps:
            loader = name == "loader" and before == "__spec__"
            owner = name == "__self__" and before in _BUILTIN_NAMES - self.bindings.bound
            if name in _INSIDES or loader or owner:
                self._refuse_inside(name, node, _offset(name, node))
                return
            before = name
        if not isinstance(base, ast.Name) or base.id in self.bindings.bound:
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
