"""No document that others send takes the server's process more than its share of time.

`python -m tests.unit.test_documents --full` tries a thousand, the test a sample of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_mcp.config.requirements import split_names
from kernel_mcp.config.values import parse_toml
from kernel_mcp.endpoints.plain import plain_data
from kernel_mcp.envelopes import message_of
from kernel_mcp.environments.metadata import installed_modules, installed_needs
from kernel_mcp.environments.pinned_requirements import exported
from kernel_mcp.environments.uv import UvResult
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.http.conditions import part_of
from kernel_mcp.network.http import Head, ProxyRefusal
from kernel_mcp.notebooks.document import NotebookDocument
from kernel_mcp.notebooks.views import AnswerBudget, full_cell, outline
from kernel_mcp.output.bundles import bounded_metadata
from kernel_mcp.output.items import Display, Failure, Item, Stream
from kernel_mcp.output.layout import lay_out
from kernel_mcp.output.markup import bare_html, html_outline, html_to_text
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Masks, escaped, escaped_lines, one_line, stripped, visible
from kernel_mcp.packages.lines import install_cell
from kernel_mcp.packages.requirements import listed
from kernel_mcp.policy.missing import missing, missing_magic
from kernel_mcp.policy.source import script_metadata
from kernel_mcp.sessions.notebook_export import FILE_BYTES, _Writer
from kernel_mcp.tools.views import _view
from tests.unit.documents import CHARS, documents

MOST_S = 0.05
"""Processor time for `CHARS` characters, where `reference` takes `REFERENCE_S`."""
REFERENCE_S = 0.02
CLOCK_S = 0.03
"""The most that a clock with 100 ticks a second adds, and garbage collections."""
SAMPLE = 20
FULL = 1000
CHILD_S = 600
EXPECTED = (KernelMcpError, ValueError, RecursionError, ProxyRefusal, OverflowError)
"""How a parser says that a document is none of its kind."""


def shown(folder: Path) -> Iterator[tuple[str, Callable[[str], object]]]:
    """The ways of an output, from its arrival to answers, resources, exports and views."""

    def of(make: Callable[[str], Any], use: Callable[..., object]) -> Callable[[str], object]:
        def work(text: str) -> object:
            log = OutputLog(folder, 1)
            log.add(make(text))
            items = log.since()
            cell: Any = SimpleNamespace(number=1, log=log)
            return use(cell, items)

        return work

    def laid_out(_: Any, items: Sequence[Item]) -> object:
        return lay_out(items, cell=1, uri="u", characters=30_000)

    made: dict[str, Callable[[str], Any]] = {
        "stream": lambda text: Stream("stdout", text),
        "failure": lambda text: Failure("E", text[:1000], tuple(text.split("\n\n"))),
        "page": lambda text: Display({"text/html": text, "text/plain": "x"}, {}),
        "svg": lambda text: Display({"image/svg+xml": text}, {}),
        "json": lambda text: Display({"application/json": {"a": text}}, {"a": text}),
        "plain": lambda text: Display({"text/plain": text}, {}),
        "picture": lambda text: Display({"image/png": text}, {}),
    }
    used = {"answer": laid_out, "view": _view, "resource": whole_text, "export": exported_cell}
    for name, make in made.items():
        for way, use in used.items():
            yield f"{name} in {way}", of(make, use)


def whole_text(cell: Any, _: Sequence[Item]) -> object:
    return "".join(cell.log.text())


def exported_cell(cell: Any, _: Sequence[Item]) -> object:
    return _Writer(FILE_BYTES, ())._outputs(cell, 1)


def parsers(folder: Path) -> dict[str, Callable[[str], object]]:
    """Every reader of what others write, by name."""
    site = folder / "a-1.dist-info"
    site.mkdir()

    def record(text: str) -> object:
        (site / "RECORD").write_text(text, encoding="utf-8", errors="replace")
        return installed_modules(folder)

    def metadata(text: str) -> object:
        (site / "METADATA").write_text(f"Requires-Dist: {text}", "utf-8", "replace")
        return list(installed_needs(folder))

    def book(text: str) -> object:
        cells = NotebookDocument.read("a.ipynb", text.encode("utf-8", "replace")).cells
        return outline(cells, 1, 10_000), [
            list(full_cell(cell, AnswerBudget(10_000))) for cell in cells[:5]
        ]

    def ranged(text: str) -> object:
        headers: Any = {"range": text, "if-match": text, "if-range": ""}
        return part_of(SimpleNamespace(headers=headers, method="GET"), "a", 10)  # type: ignore[arg-type]

    masks = Masks([("KEY", "a-secret-value"), ("OTHER", "12345678")])
    return {
        **dict(shown(folder)),
        "bare_html": lambda text: bare_html(text, CHARS),
        "outline": lambda text: html_outline(text, CHARS),
        "words": lambda text: html_to_text(text, CHARS),
        "clean": clean,
        "escaped": escaped,
        "escaped_lines": escaped_lines,
        "visible": visible,
        "stripped": stripped,
        "one_line": one_line,
        "masked": masks.masked,
        "taken": masks.split_masked,
        "metadata of displays": lambda text: bounded_metadata({"a": text}),
        "lab": lambda text: plain_data({"text/html": text, "image/png": text}),
        "notebook": book,
        "record": record,
        "metadata": metadata,
        "toml": parse_toml,
        "names": split_names,
        "packages": listed,
        "install_cell": lambda text: install_cell(f"%pip install a\n{text}"),
        "install_line": lambda text: install_cell(f"%pip install {text}"),
        "script": script_metadata,
        "missing": lambda text: missing(Failure("ModuleNotFoundError", text, (text,))),
        "missing_magic": lambda text: missing_magic(text, text),
        "message": lambda text: message_of(text.encode("utf-8", "replace")),
        "head": lambda text: Head.parse(text.encode("latin-1", "replace") + b"\r\n\r\n"),
        "range": ranged,
        "exported": exported,
        "uv": lambda text: UvResult(1, text).cause(),
    }


def reference() -> float:
    """Processor time of the same work anywhere: more on a busy or slow machine."""
    start = time.process_time()
    for _ in range(5):
        sum(number * number for number in range(60_000))
    return time.process_time() - start


def spent(work: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    with suppress(*EXPECTED):
        work(text)
    return time.process_time() - start


def main(count: int) -> None:
    """Print each document that takes too long for a parser."""
    with tempfile.TemporaryDirectory() as folder:
        found = parsers(Path(folder))
        for number, text in enumerate(documents(count)):
            for name, work in found.items():
                if spent(work, text) > MOST_S:
                    again = min(spent(work, text) for _ in range(3))
                    if again > MOST_S * max(1, reference() / REFERENCE_S) + CLOCK_S:
                        where = f"document {number}, {text[:40]!r}"
                        print(f"{name}: {again:.2f} s for {where}", flush=True)
    print("all", flush=True)


@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(("--full",), marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
)
def test_no_document_takes_a_parser_long(flags: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_documents", *flags],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.splitlines() == ["all"], ran.stderr[-2000:]


if __name__ == "__main__":
    main(FULL if "--full" in sys.argv else SAMPLE)
