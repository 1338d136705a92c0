"""The rooms of the house stand on one another: no import upwards, no cycle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernel_mcp", "kernel_specs")

ROOMS = (
    ("records", "units"),
    ("errors",),
    ("barriers", "extensions", "lazy_imports"),
    ("telemetry",),
    ("linux",),
    ("config",),
    ("identity",),
    ("output",),
    ("policy",),
    ("host_folders", "network", "tool_servers"),
    ("files",),
    ("notebooks",),
    ("sandbox",),
    ("limits",),
    ("launch",),
    ("environments",),
    ("kernels",),
    ("attached", "kernelspecs"),
    ("backends",),
    ("sessions",),
    ("verification",),
    ("endpoints",),
    ("packages",),
    ("lab",),
    ("instructions",),
    ("tool_context", "stdio_lines"),
    ("tools",),
    ("envelopes",),
    ("stdio",),
    ("http",),
    ("protocol",),
    ("kernel_context",),
    ("kernel_sources",),
    ("deferred", "start", "server", "commands"),
    ("web",),
    ("fleet",),
    ("cli",),
    ("__main__",),
)
"""The rooms of `kernel_mcp`, bottom to top; a floor a line."""

FLOORS = {name: floor for floor, names in enumerate(ROOMS) for name in names}


def sources() -> dict[str, Path]:
    """The file of each module by its dotted name; a package is its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports anywhere: in functions and for type checkers, too."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        yield from (name for name in names if name in known)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = sources()
    return {
        name: set(imported(ast.parse(path.read_text(encoding="utf-8")), known)) - {name}
        for name, path in known.items()
    }


def room(module: str) -> str:
    """The folder or file of `kernel_mcp` that a module stands in."""
    return module.split(".")[1] if "." in module else ""


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_by_way_of_others(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []


@pytest.mark.parametrize("depth", [2, 3])
def test_no_folder_imports_itself_by_way_of_others(graph: dict[str, set[str]], depth: int) -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        folder = ".".join(module.split(".")[:depth])
        folders[folder] |= {".".join(other.split(".")[:depth]) for other in others} - {folder}
    assert circle(folders) == []


def test_nothing_is_imported_upwards(graph: dict[str, set[str]]) -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if module.startswith("kernel_mcp.") and other.startswith("kernel_mcp.")
        if room(module) != room(other) and FLOORS[room(module)] <= FLOORS[room(other)]
    ]
    assert upwards == []


def test_what_runs_in_kernels_knows_nothing_of_the_server(graph: dict[str, set[str]]) -> None:
    for module, others in graph.items():
        if module.startswith("kernel_specs"):
            assert not [other for other in others if other.startswith("kernel_mcp")], module


def test_the_paper_on_the_architecture_names_every_room_and_no_other_file() -> None:
    paper = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (ROOT / "kernel_mcp").iterdir():
        if any(folder.glob("*.py")):
            assert f"`{folder.name}/`" in paper
    places = [ROOT, ROOT / "kernel_mcp", ROOT / "kernel_specs", ROOT / "kernel_specs/restricted"]
    for name in re.findall(r"`([a-z_]+/[a-z_]+)`", paper):
        assert any((place / f"{name}{end}").exists() for place in places for end in ("", ".py"))


def rows(text: str) -> dict[str, str]:
    """Return the text of docs/architecture.md for each room."""
    found = {}
    for names, words in re.findall(r"^\| (`[^|]+`) \| (.*) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            found[name.rstrip("/")] = words
    return found


def test_the_map_names_every_file() -> None:
    told = rows((ROOT / "docs/architecture.md").read_text())
    for module in sources():
        _, *path = module.split(".")
        count = len(path)
        while count and "/".join(path[:count]) not in told:
            count -= 1
        room = told["/".join(path[:count])] if count else ""
        unnamed = [part for part in path[count:] if not re.search(rf"`{part}/?`", room)]
        assert unnamed in ([], ["__main__"]), f"docs/architecture.md does not name {module}"
