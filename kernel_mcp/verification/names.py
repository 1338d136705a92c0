"""Names that the code of a cell binds, uses and calls, by its syntax alone."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from kernel_mcp.records import dataclass

MOST_CHARS = 100_000
"""Longer code is not read: its names are unknown."""
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose body is Python."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Names of a cell.

    binds    global names that it assigns, imports or deletes
    uses     global names that it reads
    aliases  modules and their attributes by the names that it imports them as
    calls    dotted names that it calls, and True if the call has arguments
    """

    binds: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[tuple[str, bool], ...] = ()


_NOTHING = Flow()


def flow_of(source: str) -> Flow:
    """Return the names of a cell; none for code that cannot be parsed."""
    code = plain(source)
    if len(code) > MOST_CHARS:
        return _NOTHING
    try:
        tree, table = ast.parse(code), symtable.symtable(code, "cell", "exec")
        binds, uses = _names(table)
        calls = tuple(_calls(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _NOTHING
    return Flow(frozenset(binds), frozenset(uses), dict(_aliases(tree)), calls)


def plain(source: str) -> str:
    """Return code without the lines of magics and shell commands; empty for a foreign cell."""
    lines = source.split("\n")
    if lines[0].startswith("%%") and not lines[0].startswith(_PYTHON_MAGICS):
        return ""
    kept = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        text = line.lstrip()
        if text.startswith(("%time ", "%timeit ")):
            text = text.partition(" ")[2].lstrip()
        elif text.startswith(("%", "!")) or text.rstrip().endswith("?"):
            text = "pass"
        kept.append(indent + text)
    return "\n".join(kept)


def _names(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Return the global names that a table and the tables in it bind and read."""
    binds, uses, left = set(), set(), [table]
    while left:
        each = left.pop()
        top = each.get_type() == "module"
        for symbol in each.get_symbols():
            if not (top or symbol.is_global()):
                continue
            if symbol.is_referenced():
                uses.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                binds.add(symbol.get_name())
        left += each.get_children()
    return binds, uses


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                yield (each.asname, each.name) if each.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _calls(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _dotted(node.func), bool(node.args or node.keywords)


def _dotted(node: ast.AST) -> str:
    """Return a chain of attributes with dots; a part that is no name is empty."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


class DataFlow:
    """The flow of names through cells that run in order."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.flows = [flow_of(each) for each in sources]
        self._aliases: dict[str, str] = {}
        for each in self.flows:
            self._aliases.update(each.aliases)

    def before(self, place: int) -> list[int]:
        """Return the places of cells that the one at `place` depends on, in order, itself last.

        A cell between the one that binds a name and the one that reads it may change its value.
        """
        found, left = {place}, [place]
        while left:
            at = left.pop()
            for name in self.flows[at].uses:
                for earlier in range(at - 1, -1, -1):
                    flow = self.flows[earlier]
                    if name in flow.binds or name in flow.uses:
                        if earlier not in found:
                            found.add(earlier)
                            left.append(earlier)
                        if name in flow.binds and name not in flow.uses:
                            break
        return sorted(found)

    def calls(self, place: int) -> Iterator[tuple[str, bool]]:
        """Yield the full names of what a cell calls, with True for a call with arguments."""
        for name, has_arguments in self.flows[place].calls:
            head, dot, rest = name.partition(".")
            yield f"{self._aliases.get(head, head)}{dot}{rest}", has_arguments


_GENERATORS = {"random": "random", "numpy.random": "numpy"}
_OWN = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random")
_ENTROPY = ("uuid.uuid1", "uuid.uuid4", "os.urandom", "random.SystemRandom")
_CLOCKS = ("now", "utcnow", "today", "time", "time_ns", "perf_counter", "perf_counter_ns")
_MORE_CLOCKS = ("monotonic", "monotonic_ns", "process_time", "ctime", "localtime", "gmtime")
_TIMES = ("time", "datetime", "pandas")
_THREADS = ("threading", "concurrent", "multiprocessing", "joblib", "_thread")
_NETWORKS = ("requests", "urllib", "httpx", "aiohttp", "socket", "ftplib", "smtplib", "urllib3")

CLOCK, THREADS, NETWORK, ENTROPY = "the clock", "threads", "the network", "the system's entropy"
UNSEEDED = "a generator without a seed"
OF_RANDOM, OF_NUMPY = "the generator of `random`", "the generator of numpy"


def chance(flow: DataFlow, place: int) -> set[str]:
    """Return the sources of chance that a cell uses, by the names that it calls."""
    found = set()
    for name, has_arguments in flow.calls(place):
        module, _, last = name.rpartition(".")
        top = name.partition(".")[0]
        if name in _OWN:
            found |= set() if has_arguments else {UNSEEDED}
        elif name in _ENTROPY or top == "secrets":
            found.add(ENTROPY)
        elif module in _GENERATORS and last not in ("seed", "setstate", "set_state"):
            found.add(OF_RANDOM if module == "random" else OF_NUMPY)
        elif (
            (top in _TIMES and last in _CLOCKS)
            or (top == "time" and last in _MORE_CLOCKS)
            or (top == "time" and last in ("strftime", "asctime") and not has_arguments)
        ):
            found.add(CLOCK)
        elif top in _THREADS:
            found.add(THREADS)
        elif top in _NETWORKS:
            found.add(NETWORK)
    return found
