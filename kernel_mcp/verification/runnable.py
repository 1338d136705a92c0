"""Cells as a script that runs without IPython and prints the values that the cells showed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence

from kernel_mcp.output.text import one_line
from kernel_mcp.policy.check import parse
from kernel_mcp.policy.magics import plain
from kernel_mcp.policy.source import Source
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.boundaries import Boundaries
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.checking import LONG_CODE_CHARS

_SHOW = """\
def _show(value):
    text = repr(value)
    if type(value) is set and value:
        try:  # as IPython shows sets
            text = "{" + ", ".join(map(repr, sorted(value))) + "}"
        except TypeError:
            pass
    if value is not None:
        print(text)
"""
_DISPLAY = """\
def display(*values, **_options):
    for value in values:
        print(repr(value))
"""
_BLOCK = "# /// "
"""Begin of the lines around metadata (PEP 723), of which a script has one block."""
_PRINTERS = ("print", "display")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
_WAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


@dataclass(frozen=True, slots=True)
class RunnableScript:
    """A script without its metadata.

    code      the text
    modules   names of modules that it imports, dotted
    cells     number of cells in it
    left      cells that did not end well, or were undone
    replaced  cells whose IPython commands are comments
    waits     cells that await something outside of functions, which no script can
    """

    code: str
    modules: frozenset[str]
    cells: int
    left: tuple[int, ...]
    replaced: tuple[int, ...]
    waits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plain:
    text: str
    tree: ast.Module | None
    replaced: bool


def runnable_script(cells: Sequence[Cell], undone: Collection[int] = ()) -> RunnableScript:
    """Return the cells that ended well as a script, with a comment at each boundary. Blocking."""
    parts: list[str] = []
    modules: set[str] = set()
    left, replaced, waits, kept = [], [], [], 0
    shows = displays = False
    boundaries, lost = Boundaries(undone), ""
    for cell in cells:
        lost = boundaries.before(cell) or lost
        if cell.status is not Status.OK or cell.number in undone:
            left.append(cell.number)
            continue
        found = _plain(cell.recorded.strip())
        text, shown = _showing(found)
        text = "\n".join(f"#{row}" if row.startswith(_BLOCK) else row for row in text.split("\n"))
        shows = shows or shown
        if found.tree is not None:
            modules |= set(_imports(found.tree))
            displays = displays or _uses_display(found.tree)
            waits += [cell.number] * _awaits(found.tree)
        else:
            modules |= set(_imports_of_lines(text))
        replaced += [cell.number] * found.replaced
        parts.append(
            f"# {one_line(lost)}\n" * bool(lost and kept) + f"# %% {cell.number}\n{text}\n"
        )
        lost, kept = "", kept + 1
    helpers = [_SHOW] * shows + [_DISPLAY] * displays
    code = "\n".join([*helpers, *parts])
    return RunnableScript(
        code, frozenset(modules), kept, tuple(left), tuple(replaced), tuple(waits)
    )


def _plain(code: str) -> _Plain:
    """Return a cell as plain Python; longer code than may be parsed here as it is."""
    if len(code) > LONG_CODE_CHARS:
        return _Plain(code, None, replaced=False)
    source = Source.of(code)
    tree = parse(source, compiled=False).tree
    if tree is not None:
        return _Plain(source.text, tree, replaced=False)
    source, commands = plain(source)
    tree = parse(source, compiled=False).tree
    if tree is None:
        return _Plain("\n".join(f"# {line}" for line in code.splitlines()), None, replaced=True)
    lines = list(source.lines)
    for each in commands:
        lines[each.first - 1] += f"  # {one_line(each.text)}"
    return _Plain("\n".join(lines), tree, replaced=True)


def _showing(found: _Plain) -> tuple[str, bool]:
    """Return the text that prints the value of its last expression, and True if there is one."""
    node = found.tree.body[-1] if found.tree is not None and found.tree.body else None
    if not isinstance(node, ast.Expr) or _prints(node.value):
        return found.text, False
    lines = found.text.split("\n")
    last, end = lines[(node.end_lineno or 1) - 1].encode(), node.end_col_offset or 0
    if last[end:].lstrip().startswith(b";"):
        return found.text, False
    lines[(node.end_lineno or 1) - 1] = (last[:end] + b"))" + last[end:]).decode()
    first, begin = lines[node.lineno - 1].encode(), node.col_offset
    lines[node.lineno - 1] = (first[:begin] + b"_show((" + first[begin:]).decode()
    return "\n".join(lines), True


def _prints(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in _PRINTERS


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _imports_of_lines(text: str) -> Iterator[str]:
    for words in map(str.split, text.splitlines()):
        if len(words) > 1 and words[0] in ("import", "from"):
            yield words[1].strip(",;")


def _uses_display(tree: ast.Module) -> bool:
    """Return True if `display` is used that IPython adds to the builtins."""
    nodes = [*ast.walk(tree)]
    imported: Iterable[str] = (
        each.asname or each.name
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for each in node.names
    )
    used = any(isinstance(node, ast.Name) and node.id == "display" for node in nodes)
    return used and "display" not in imported


def _awaits(tree: ast.Module) -> bool:
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, _WAITS) or (isinstance(node, ast.comprehension) and node.is_async):
            return True
        if not isinstance(node, _SCOPES):
            nodes += ast.iter_child_nodes(node)
    return False
