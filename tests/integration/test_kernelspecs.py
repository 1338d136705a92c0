"""Sessions with the kernel of a kernel spec: stock ipykernel, which every machine has."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.notebooks.document import code_cell
from tests.integration.agent import Agent, agent
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

SPEC = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3"
WAYS = {
    "bwrap": (),
    "mount": ("--mount",),
    "landlock": ("--sandbox", "landlock"),
    "none": ("--sandbox", "none"),
}


every_way = pytest.mark.parametrize(
    "notebook", sampled(WAYS, "bwrap"), indirect=True, scope="module"
)
"""Run a test for each way to confine kernels; others run under bubblewrap alone."""


@pytest.fixture(scope="module")
async def notebook(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agent]:
    """A client whose session `stock` runs stock ipykernel."""
    flags = WAYS[getattr(request, "param", "bwrap")]
    if flags == ("--mount",):
        flags = ("--mount", str(tmp_path_factory.mktemp("data")))
    async with servers.agent("--kernel", f"stock={SPEC}", *flags) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
async def session(notebook: Agent) -> AsyncIterator[None]:
    opened = await notebook.call("create_session", name="stock", language="stock")
    assert not opened.failed, opened.text
    yield
    await notebook.call("close_session", session="stock")


async def sessions_of(notebook: Agent) -> list[str]:
    listed = (await notebook.call("list_sessions")).data["sessions"]
    return [each["session"] for each in listed]


@every_way
async def test_variables_stay_and_output_comes_in_order(notebook: Agent) -> None:
    await notebook.run("x = 41", session="stock")
    answer = await notebook.run("print('a'); print('b'); x + 1", session="stock")
    assert (answer.status, answer.text) == ("ok", "a\nb\n42")


async def test_an_error_is_one_and_keeps_variables(notebook: Agent) -> None:
    await notebook.run("x = 1", session="stock")
    answer = await notebook.run("1/0", session="stock")
    assert answer.status == "error"
    assert "ZeroDivisionError" in answer.text
    assert (await notebook.run("x", session="stock")).text == "1"


async def test_a_cell_beyond_its_time_is_interrupted_and_variables_stay(notebook: Agent) -> None:
    await notebook.run("x = 1; import time", session="stock")
    answer = await notebook.run("time.sleep(600)", session="stock", timeout=1)
    assert answer.status == "timeout"
    assert (await notebook.run("x", session="stock")).text == "1"


@every_way
async def test_the_death_of_the_kernel_is_told_with_its_cause(notebook: Agent) -> None:
    await notebook.run("x = 1; import os", session="stock")
    answer = await notebook.run("os.kill(os.getpid(), 9)", session="stock")
    assert answer.status == "killed"
    assert "SIGKILL" in answer.text
    assert "NameError" in (await notebook.run("x", session="stock")).text


async def test_reset_gives_a_fresh_kernel(notebook: Agent) -> None:
    await notebook.run("x = 1", session="stock")
    assert not (await notebook.call("reset", session="stock")).failed
    assert "NameError" in (await notebook.run("x", session="stock")).text


@every_way
async def test_files_are_those_of_the_workspace(notebook: Agent) -> None:
    await notebook.call("write_file", session="stock", path="a.txt", content="hi")
    assert (await notebook.run("open('a.txt').read()", session="stock")).text == "'hi'"


async def test_tools_that_it_lacks_say_so(notebook: Agent) -> None:
    more: dict[str, dict[str, Any]] = {
        "check_syntax": {"code": "1"},
        "install": {"packages": ["six"]},
    }
    for tool in ("undo", "branch", "list_variables", "list_packages", *more):
        text = await notebook.refused(tool, session="stock", **more.get(tool, {}))
        assert f"{tool} is not available: this session runs Python 3 (ipykernel)" in text
    about = (await notebook.call("info", session="stock")).data
    assert about["languages"] == ["stock: Python 3 (ipykernel)"]
    assert "not saved" in about["kept"]
    listed = (await notebook.call("list_sessions")).data["sessions"]
    (state,) = [each for each in listed if each["name"] == "stock"]
    assert state["python"] == ""
    assert state["language"].startswith("Python 3 (ipykernel) 3.")


async def test_the_default_session_is_pythons_and_others_stand_beside_it(notebook: Agent) -> None:
    assert (await notebook.run("y = 7; y")).text == "7"
    assert "NameError" in (await notebook.run("y", session="stock")).text


async def test_a_script_runs_once_in_a_session_of_the_language(notebook: Agent) -> None:
    before = await sessions_of(notebook)
    script = "import sys; print('out'); print('err', file=sys.stderr)"
    answer = await notebook.call("run_script", script=script, language="stock")
    assert (answer.status, answer.cell["stdout"], answer.cell["stderr"]) == ("ok", "out\n", "err\n")
    text = await notebook.refused("run_script", script="1", language="stock", dependencies=["six"])
    assert "for Python alone" in text
    assert await sessions_of(notebook) == before


async def test_its_notebooks_name_its_kernel_and_run_in_its_sessions(notebook: Agent) -> None:
    await notebook.run("x = 2", session="stock")
    await notebook.run("1/0", session="stock")
    await notebook.call("export_notebook", session="stock", path="a.ipynb")
    ran = await notebook.call("run_cells", session="stock", path="a.ipynb", cells="to cell-1")
    assert ran.status == "ok", ran.text
    book = json.loads((await notebook.call("read_file", session="stock", path="a.ipynb")).text)
    assert book["metadata"]["kernelspec"]["display_name"] == "Python 3 (ipykernel)"
    assert book["metadata"]["language_info"]["file_extension"] == ".py"
    named = {"name": "ir", "display_name": "R", "language": "R"}
    book["metadata"] = {"kernelspec": named}
    text = json.dumps(book)
    await notebook.call("write_file", session="stock", path="r.ipynb", content=text)
    refused = await notebook.refused("run_cells", session="stock", path="r.ipynb", cells="all")
    assert "is a notebook of R, and cells run as Python here" in refused
    assert "--kernel NAME=SPEC" in refused
    told = await notebook.call("export_notebook", session="stock", path="a.py", format="script")
    assert "code of 2 cells to 'a.py'. Left out, as they did not end well: cell 2" in told.text


async def test_reset_tells_what_is_gone_and_no_packages(notebook: Agent) -> None:
    text = (await notebook.call("reset", session="stock", packages=True)).text
    assert "all variables, functions and loaded packages are gone" in text
    assert "had been installed" not in text


async def test_an_unknown_language_names_those_that_are_there(notebook: Agent) -> None:
    text = await notebook.refused("create_session", language="cobol")
    assert "'cobol' is not one of python, stock" in text
    text = await notebook.refused("create_session", language="stock", packages=["six"])
    assert "leave them out" in text
    text = await notebook.refused("create_session", language="stock", fresh=True)
    assert "are not kept; leave fresh and resume out" in text


@every_way
async def test_nothing_of_the_start_is_left_open(notebook: Agent) -> None:
    code = (
        "import os, json; names = os.listdir('/proc/self/fd')\n"
        "links = [f'/proc/self/fd/{name}' for name in names]\n"
        "print(json.dumps([os.readlink(each) for each in links if os.path.lexists(each)]))"
    )
    found = json.loads((await notebook.run(code, session="stock")).text)
    assert not [each for each in found if "memfd:output-ring" in each]


async def test_pages_are_output_and_a_request_to_end_says_what_does(notebook: Agent) -> None:
    answer = await notebook.run("print('first')\nlen?", session="stock")
    assert answer.text.startswith("first\n")
    assert "Return the number of items in a container." in answer.text
    answer = await notebook.run("exit()", session="stock")
    assert "close_session" in answer.text


@every_way
async def test_output_of_programs_is_shown_once(notebook: Agent) -> None:
    answer = await notebook.run("import os; s = os.system('echo hi'); print('a')", session="stock")
    told = answer.text.split()
    while "hi" not in told:  # the kernel's thread, which reads what programs write, was late
        told += (await notebook.run("", session="stock")).text.split()
    assert (told.count("a"), told.count("hi")) == (1, 1)


@pytest.mark.ways
async def test_a_kernel_to_which_nothing_can_be_added_runs_all_the_same(tmp_path: Path) -> None:
    spec = json.loads((SPEC / "kernel.json").read_text())
    program = str(Path(sys.executable))
    folder = tmp_path / "spec"
    folder.mkdir()
    made = {**spec, "argv": [program, *spec["argv"][1:]], "language": "R"}
    (folder / "kernel.json").write_text(json.dumps(made))
    async with agent("--kernel", f"odd={folder}") as other:
        opened = await other.call("create_session", name="odd", language="odd")
        assert not opened.failed, opened.text
        assert (await other.run("6 * 7", session="odd")).text == "42"
        about = await other.call("info", session="odd")
        assert "did not fit its version" in "".join(about.data["sandbox_found"])


@pytest.mark.ways
async def test_a_notebook_in_a_mount_runs_on_the_named_kernel_of_its_language(
    servers: Servers, tmp_path: Path
) -> None:
    spec = json.loads((SPEC / "kernel.json").read_text())
    command = [sys.executable, *spec["argv"][1:]]
    (tmp_path / "mars").mkdir()
    given = {"argv": command, "language": "Marsian", "display_name": "Marsian"}
    (tmp_path / "mars" / "kernel.json").write_text(json.dumps(given))
    data = tmp_path / "data"
    data.mkdir()
    book = {
        "cells": [code_cell("one", "x = 20", [], None), code_cell("two", "x + 1", [], None)],
        "metadata": {"kernelspec": {"name": "mars", "language": "marsian"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = data / "m.ipynb"
    path.write_text(json.dumps(book))
    flags = ("--kernel", f"m={tmp_path}/mars", "--mount", f"{data}:rw")
    async with servers.agent(*flags) as notebook:
        answer = await notebook.call("run_cells", path=str(path), cells="all")
        told = "This was session 'm', which runs Marsian: pass that `session` to go on with it"
        assert answer.text.endswith(f"\n21\n[kernel-mcp] {told}")
        again = await notebook.call("run_cells", path=str(path), cells="two")
        assert "21" in again.text  # in the same session
    written = json.loads(path.read_text())["cells"][1]["outputs"]
    assert [each["data"] for each in written] == [{"text/plain": ["21"]}]
