"""Tools in a session of R: what they say is true there, and notebooks are R's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import nbformat
import pytest
from mcp_types import TextResourceContents

from kernel_mcp.notebooks.document import code_cell
from tests.integration.agent import Agent
from tests.integration.servers import Servers
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.ways]


@pytest.fixture(scope="module")
async def notebook(servers: Servers) -> AsyncIterator[Agent]:
    async with servers.agent("--kernel", kernel_flag("r")) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
async def session(notebook: Agent) -> AsyncIterator[None]:
    opened = await notebook.call("create_session", name="r", language="r")
    assert not opened.failed, opened.text
    yield
    await notebook.call("close_session", session="r")


async def test_syntax_is_that_of_the_language(notebook: Agent) -> None:
    good = await notebook.call("check_syntax", session="r", code="x <- 1:3; f = function(a) a^2")
    assert good.data["valid"]
    bad = await notebook.call("check_syntax", session="r", code="x <- 1\nimport numpy")
    assert not bad.data["valid"]
    (found,) = bad.data["diagnostics"]
    assert (found["line"], found["source_line"]) == (2, "import numpy")
    assert "dependencies and python are for Python alone" in await notebook.refused(
        "check_syntax", session="r", code="1", dependencies=["six"]
    )


async def test_a_fence_of_the_language_is_taken_off_and_quoted_names_stay(notebook: Agent) -> None:
    answer = await notebook.run("```{r}\n`my column` <- 2\n```", session="r")
    assert "fence was taken off" in answer.text
    assert (await notebook.run("`my column`", session="r")).text.startswith("[1] 2")


async def test_a_script_of_the_language_has_its_streams(notebook: Agent) -> None:
    answer = await notebook.call(
        "run_script", script="cat('out'); message('err'); writeLines('a', 'o.txt')", language="r"
    )
    assert (answer.status, answer.cell["stdout"]) == ("ok", "out")
    assert answer.cell["stderr"].strip() == "err"
    assert "the script wrote o.txt" in answer.text
    failed = await notebook.call("run_script", script="stop('no')", language="r")
    assert (failed.failed, failed.status) == (True, "error")


async def test_a_death_and_a_reset_tell_what_is_lost_in_the_words_of_the_language(
    notebook: Agent,
) -> None:
    answer = await notebook.run("tools::pskill(Sys.getpid(), 9)", session="r")
    assert "All variables, functions and loaded packages of this session are lost" in answer.text
    answer = await notebook.call("reset", session="r")
    assert "all variables, functions and loaded packages are gone" in answer.text
    assert "imports" not in answer.text


def as_notebook(*sources: str, **metadata: Any) -> str:
    """Return a notebook file with these code cells, by default one of R."""
    spec = {"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}}
    cells = [code_cell(f"c{place}", each, [], None) for place, each in enumerate(sources)]
    book = {"cells": cells, "metadata": metadata or spec, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book)


def parsed(text: str) -> Any:
    """Return a notebook, which is valid."""
    book = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(book)
    return book


PLOT = "library(ggplot2)\nggplot(mtcars, aes(wt, mpg)) + geom_point()"
ANALYSIS = (
    "x <- c(2, 3, 5); mean(x)",
    "df <- data.frame(a = 1:3, b = letters[1:3]); df",
    "for (i in 1:3) cat(i, '\\n'); message('to stderr'); warning('careful')",
    "NULL",
    "invisible(7)",
    PLOT,
    "list(1, 'two')",
    "stop('here')",
)


def by_jupyter(sources: tuple[str, ...], folder: Path) -> Any:
    """Return the notebook that nbclient makes of these cells, as a plain Jupyter does."""
    path = folder / "plain.ipynb"
    path.write_text(as_notebook(*sources))
    code = (
        "import sys, nbformat; from nbclient import NotebookClient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "run = NotebookClient(book, allow_errors=True, coalesce_streams=True)\n"
        "run.execute(); nbformat.write(book, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)
    return parsed(path.read_text())


def shape(output: Any) -> tuple[Any, ...]:
    """Return what two runs of a cell have in common: pictures differ in their bytes."""
    if output.output_type == "stream":
        return output.name, output.text.strip()
    if output.output_type == "error":
        return "error", output.ename, output.evalue
    data = {mime: "" if mime.startswith("image/") else text for mime, text in output.data.items()}
    return output.output_type, data


async def test_a_notebook_of_the_language_has_the_outputs_of_jupyter(
    notebook: Agent, tmp_path: Path
) -> None:
    await notebook.call("write_file", session="r", path="a.ipynb", content=as_notebook(*ANALYSIS))
    answer = await notebook.call("run_cells", session="r", path="a.ipynb", cells="all", wait=60)
    assert answer.status == "error", answer.text
    address = f"kernel://{answer.cell['session']}/files/a.ipynb"
    (written,) = (await notebook.client.read_resource(address)).contents
    assert isinstance(written, TextResourceContents)
    found = parsed(written.text)
    theirs = await anyio.to_thread.run_sync(by_jupyter, ANALYSIS, tmp_path)
    for ours, plain in zip(found.cells, theirs.cells, strict=True):
        assert [shape(each) for each in ours.outputs] == [shape(each) for each in plain.outputs]


async def test_what_runs_is_appended_to_a_new_notebook_of_the_language(notebook: Agent) -> None:
    opened = await notebook.call("open_notebook", session="r", path="new.ipynb")
    assert "0 cells of R" in opened.text
    await notebook.run("x <- 2; x", session="r")
    book = parsed((await notebook.call("read_file", session="r", path="new.ipynb")).text)
    assert book.metadata.kernelspec == {"name": "ir", "display_name": "R", "language": "R"}
    assert (book.metadata.language_info.name, book.cells[0].source) == ("R", "x <- 2; x")


async def test_a_notebook_runs_in_no_session_of_another_language(notebook: Agent) -> None:
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    await notebook.call(
        "write_file", session="r", path="p.ipynb", content=as_notebook("1", **python)
    )
    for tool, cells in (("open_notebook", {}), ("run_cells", {"cells": "all"})):
        text = await notebook.refused(tool, session="r", path="p.ipynb", **cells)
        assert "is a notebook of Python, and cells run as R here" in text
    await notebook.call("write_file", path="r.ipynb", content=as_notebook("1 + 1"))
    text = await notebook.refused("run_cells", path="r.ipynb", cells="all")
    assert "write_file(session='r')" in text
    julia = {"kernelspec": {"name": "julia-1.10", "display_name": "Julia", "language": "julia"}}
    await notebook.call("write_file", path="j.ipynb", content=as_notebook("1", **julia))
    text = await notebook.refused("run_cells", path="j.ipynb", cells="all")
    assert "--kernel NAME=SPEC" in text


async def test_cells_of_a_notebook_in_a_mount_run_in_the_session_of_its_language(
    servers: Servers, tmp_path: Path
) -> None:
    path = tmp_path / "r.ipynb"
    path.write_text(as_notebook("x <- 20", "x + 1"))
    mount = f"{tmp_path}:rw"
    async with servers.agent("--kernel", kernel_flag("r"), "--mount", mount) as notebook:
        answer = await notebook.call("run_cells", path=str(path), cells="all")
        assert "[1] 21" in answer.text
        assert "session 'r', which runs R" in answer.text
        assert "[1] 21" in parsed(path.read_text()).cells[1].outputs[0].data["text/plain"]
        again = await notebook.call("run_cells", path=str(path), cells="all", session="r")
        assert not again.failed
        states = (await notebook.call("list_sessions")).data["sessions"]
        assert [each["name"] for each in states].count("r") == 1


async def test_a_session_is_exported_as_a_notebook_and_a_script_of_its_language(
    notebook: Agent,
) -> None:
    await notebook.run("x <- 2", session="r")
    await notebook.run("stop('no')", session="r")
    await notebook.run("x * 3", session="r")
    handle = (await notebook.run("tools::pskill(Sys.getpid(), 9)", session="r")).cell["session"]
    await notebook.call("export_notebook", session="r", path="n.ipynb")
    book = parsed((await notebook.call("read_file", session="r", path="n.ipynb")).text)
    assert (book.metadata.kernelspec.name, book.metadata.language_info.file_extension) == (
        "ir",
        ".r",
    )
    (resource,) = (await notebook.client.read_resource(f"kernel://{handle}/notebook")).contents
    assert isinstance(resource, TextResourceContents)
    assert '"ir"' in resource.text
    refused = await notebook.refused("export_notebook", session="r", path="a.py", format="script")
    assert "let it end in .r" in refused
    told = await notebook.call("export_notebook", session="r", path="a.R", format="script")
    assert "code of 2 cells" in told.text
    assert "cells 2, 4" in told.text
    code = (await notebook.call("read_file", session="r", path="a.R")).text
    assert code.split() == ["#", "%%", "x", "<-", "2", "#", "%%", "x", "*", "3"]


async def test_the_doctor_says_what_held() -> None:
    flags = ("--sandbox", "bwrap", "--no-template", "--kernel", kernel_flag("r"))
    command = [sys.executable, "-m", "kernel_mcp", "doctor", *flags]
    done = await anyio.run_process(command, check=False)
    assert b"runs cells, draws a plot, stops at an interrupt and keeps variables" in done.stdout
    assert done.returncode == 0, done.stdout
