"""A ledger of what recorded analyses cost a model: characters in and out, calls, errors, by tool.

The same analyses run on kernel-mcp, with `python -c` in a shell, and on posit-mcp-repl where that
can be installed. Characters out are those that Claude Code shows its model.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import anyio
from mcp.client import Client
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent

from benchmarks import ours
from benchmarks.connection import connected
from benchmarks.places import build_ours, clean_environ, environment
from benchmarks.results import failure

RECORDED = Path(__file__).with_name("analyses.txt")
PACKAGES = ("numpy", "pandas", "matplotlib", "scikit-learn", "statsmodels")
PEER = "posit-mcp-repl"
CELL, TOOL_CELL = "# %%", "# %% "
BRANCH = "BRANCH "
"""In arguments, before the number of a branch that the last call has made."""
SHOW, SAVE, PICTURE = "plt.show()", "plt.savefig('figure.png')", "figure.png"
SHELL = (
    {"name": "bash", "description": "Run a command.", "inputSchema": {"command": "string"}},
    {"name": "read", "description": "Read a file.", "inputSchema": {"path": "string"}},
)
SHELL_CHARS = 30_000
"""Characters of an answer that Claude Code's own shell tool shows."""
CELL_S = 120
IN_SHELL = ("sh", "-c", "mcp-repl --interpreter python; exit")
"""Version 0.3.0 exits before its first answer in most starts without a shell in between."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call of `tool`; `code` is the cell, or what systems with one tool run instead."""

    tool: str
    arguments: Mapping[str, Any]
    code: str


@dataclass(slots=True)
class Row:
    """Sums over calls: characters of arguments and of answers, pictures apart."""

    calls: int = 0
    errors: int = 0
    sent: int = 0
    shown: int = 0
    pictures: int = 0


@dataclass(slots=True)
class Ledger:
    """The rows of one system by tool, its characters by analysis, and those of its definitions."""

    rows: dict[str, Row] = field(default_factory=dict)
    analyses: dict[str, int] = field(default_factory=dict)
    definitions: int = 0

    def enter(self, title: str, tool: str, sent: Mapping[str, Any], shown: Shown) -> None:
        """Add one call."""
        row = self.rows.setdefault(tool, Row())
        row.calls += 1
        row.errors += shown.failed
        row.sent += (size := len(_json(sent)))
        row.shown += len(shown.text)
        row.pictures += shown.pictures
        self.analyses[title] = self.analyses.get(title, 0) + size + len(shown.text)

    def total(self) -> Row:
        """Return the sums over all tools."""
        return Row(*(sum(getattr(row, key) for row in self.rows.values()) for key in Row.__slots__))


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer as a model sees it."""

    text: str
    pictures: int = 0
    failed: bool = False


class System(Protocol):
    """Plays the steps of one analysis."""

    async def definitions(self) -> str:
        """Return the definitions of its tools as JSON without blanks."""

    async def play(self, step: Step) -> Sequence[tuple[str, Mapping[str, Any], Shown]]:
        """Make the calls of a step; return tool, arguments and answer of each."""


def recorded(text: str) -> dict[str, list[Step]]:
    """Return the steps of each analysis by its title."""
    found: dict[str, list[Step]] = {}
    for part in text.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        found[title] = [*_steps(rest)]
    return found


def _steps(text: str) -> Iterator[Step]:
    for part in f"\n{text}".split(f"\n{CELL}")[1:]:
        head, _, code = part.partition("\n")
        tool, _, arguments = head.strip().partition(" ")
        yield Step(tool or "execute", json.loads(arguments or "{}"), code.strip())


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def shown(result: CallToolResult) -> Shown:
    """Return an answer as Claude Code shows it: the structured part stands for all text."""
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    if result.structured_content is not None and not result.is_error:
        texts = [_json(result.structured_content)]
    links = [block for block in result.content if isinstance(block, ResourceLink)]
    texts += [f"[Resource link: {each.name}] {each.uri}" for each in links]
    pictures = sum(isinstance(block, ImageContent) for block in result.content)
    return Shown("\n".join(texts), pictures, bool(result.is_error))


@dataclass(slots=True)
class Notebook:
    """Our server."""

    client: Client
    branches: list[str] = field(default_factory=list)

    async def definitions(self) -> str:
        """See `System`."""
        tools = (await self.client.list_tools()).tools
        return _json(list(map(_read, tools))) + (self.client.instructions or "")

    async def play(self, step: Step) -> Sequence[tuple[str, Mapping[str, Any], Shown]]:
        """See `System`."""
        arguments = dict(step.arguments)
        for name, value in arguments.items():
            if isinstance(value, str) and value.startswith(BRANCH):
                arguments[name] = self.branches[int(value.removeprefix(BRANCH)) - 1]
        if step.tool == "execute":
            arguments["code"] = step.code
        result = await self.client.call_tool(step.tool, arguments)
        if step.tool == "branch":
            made = (result.structured_content or {})["branches"]
            self.branches = [each["session"] for each in made]
        return [(step.tool, arguments, shown(result))]


def _read(tool: Any) -> dict[str, Any]:
    """Return what a model reads of a definition."""
    return {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": tool.input_schema,
    }


@dataclass(slots=True)
class Repl:
    """A server with one tool for code, which keeps its variables."""

    client: Client

    async def definitions(self) -> str:
        """See `System`."""
        return _json(list(map(_read, (await self.client.list_tools()).tools)))

    async def play(self, step: Step) -> Sequence[tuple[str, Mapping[str, Any], Shown]]:
        """See `System`."""
        if not step.code:
            return []
        arguments = {"input": step.code}
        answer = shown(await self.client.call_tool("repl", arguments))
        failed = "Traceback (most recent call last)" in answer.text  # it marks none as an error
        return [("repl", arguments, replace(answer, failed=failed))]


@dataclass(slots=True)
class Shell:
    """`python -c` in a shell: each command has all code that the new code depends on."""

    python: Path
    folder: Path
    before: list[ast.Module] = field(default_factory=list)

    async def definitions(self) -> str:
        """See `System`."""
        return _json(SHELL)

    async def play(self, step: Step) -> Sequence[tuple[str, Mapping[str, Any], Shown]]:
        """See `System`."""
        if not step.code:
            return []
        code = with_needed(self.before, step.code.replace(SHOW, SAVE))
        with anyio.fail_after(CELL_S):
            done = await anyio.run_process(
                [str(self.python), "-c", code],
                cwd=self.folder,
                env={**clean_environ(), "MPLBACKEND": "Agg"},
                check=False,
            )
        if not done.returncode:
            self.before.append(ast.parse(step.code))
        text = (done.stdout + done.stderr).decode(errors="replace")[:SHELL_CHARS]
        calls = [("bash", _command(code), Shown(text, failed=bool(done.returncode)))]
        if SHOW in step.code and not done.returncode:
            calls.append(("read", {"path": PICTURE}, Shown("", pictures=1)))
        return calls


def _command(code: str) -> dict[str, str]:
    return {"command": f"python -c {shlex.quote(code)}"}


def with_needed(before: Sequence[ast.Module], code: str) -> str:
    """Return code after the earlier cells whose names it uses; its last value is printed."""
    tree = ast.parse(code)
    wanted, needed = _names(tree, ast.Load), []
    for cell in reversed(before):
        if _names(cell, ast.Store) & wanted:
            wanted |= _names(cell, ast.Load)
            needed.append(cell)
    quiet = [each for cell in reversed(needed) for each in cell.body if not _shows(each)]
    if tree.body and isinstance(last := tree.body[-1], ast.Expr) and not _prints(last):
        last.value = ast.Call(ast.Name("print"), [last.value], [])
    return ast.unparse(ast.Module([*quiet, *tree.body], []))


def _names(tree: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    """Return names that are read, or those that are bound or of which a part is assigned."""
    found = {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, kind)
    }
    if kind is ast.Load:
        return found
    for each in ast.walk(tree):
        if isinstance(each, ast.Subscript | ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {part.id for part in ast.walk(each) if isinstance(part, ast.Name)}
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, ast.FunctionDef):
            found.add(each.name)
    return found


def _shows(statement: ast.stmt) -> bool:
    """Return True for a statement that a later command need not repeat."""
    if isinstance(statement, ast.For):
        return all(map(_shows, statement.body))
    return isinstance(statement, ast.Expr)


def _prints(statement: ast.Expr) -> bool:
    call = statement.value
    called = call.func if isinstance(call, ast.Call) else None
    return (isinstance(called, ast.Name) and called.id == "print") or ast.unparse(call) in (
        SAVE,
        SHOW,
    )


async def _systems(stack: AsyncExitStack, folder: Path, repl: Path | str) -> dict[str, System]:
    """Return each system, freshly started: each analysis is a conversation of its own."""
    python = await environment("ledger", PACKAGES)
    argv = [*ours.command(), "--allow", ",".join(PACKAGES)]
    found: dict[str, System] = {
        "kernel-mcp": Notebook(await stack.enter_async_context(connected(argv, folder))),
        "python -c": Shell(python / "bin/python", folder),
    }
    if isinstance(repl, Path):
        place = repl / "bin"
        environ = {"PATH": f"{place}:{clean_environ()['PATH']}", "VIRTUAL_ENV": str(repl)}
        client = connected(IN_SHELL, folder, "legacy", environ)
        found[PEER] = Repl(await stack.enter_async_context(client))
    return found


async def measure(analyses: Mapping[str, Sequence[Step]]) -> tuple[dict[str, Ledger], str]:
    """Play all analyses; return the ledger of each system, and why one is missing."""
    ledgers: dict[str, Ledger] = {}
    repl: Path | str = ""

    async def install() -> None:
        nonlocal repl
        repl = await environment(PEER, (PEER, *PACKAGES))

    missing = await failure(install) or ""
    await build_ours(",".join(PACKAGES))
    for title, steps in analyses.items():
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kb-")))
            for name, system in (await _systems(stack, folder, repl)).items():
                ledger = ledgers.setdefault(name, Ledger())
                ledger.definitions = len(await system.definitions())
                for step in steps:
                    for tool, arguments, answer in await system.play(step):
                        ledger.enter(title, tool, arguments, answer)
    return ledgers, missing


def table(ledgers: Mapping[str, Ledger]) -> Iterator[str]:
    """Yield the lines of the ledger."""
    head = f"{'system':16}{'tool':18}{'calls':>6}{'errors':>7}{'in':>9}{'out':>9}{'pictures':>9}"
    yield head
    for name, ledger in ledgers.items():
        for tool, row in [*sorted(ledger.rows.items()), ("all", ledger.total())]:
            yield (
                f"{name:16}{tool:18}{row.calls:6}{row.errors:7}{row.sent:9,}{row.shown:9,}"
                f"{row.pictures:9}"
            )
        yield f"{name:16}{'(definitions)':18}{'':22}{ledger.definitions:9,}"
    yield ""
    yield f"{'characters in and out':50}" + "".join(f"{name:>16}" for name in ledgers)
    for title in next(iter(ledgers.values())).analyses:
        yield f"{title:50}" + "".join(f"{each.analyses[title]:16,}" for each in ledgers.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Play the analyses, and print the ledger."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokens", description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="analyses with it in the title")
    options = parser.parse_args(argv)
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    analyses = recorded(RECORDED.read_text("utf-8"))
    chosen = {title: each for title, each in analyses.items() if options.only in title}
    ledgers, missing = anyio.run(measure, chosen)
    print("\n".join(table(ledgers)))
    if missing:
        print(f"{PEER} is missing: {missing}")


if __name__ == "__main__":
    main()
