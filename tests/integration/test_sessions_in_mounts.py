"""Sessions begin in the first mount if it is writable, and relative paths of tools mean it, too."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from tests.integration.agent import Agent, agent
from tests.integration.lives import Place
from tests.unit.packages.wheels import wheel

pytestmark = pytest.mark.anyio

HERE = "import os; print(f'<{os.getcwd()}>')"


def project_in(folder: Path) -> Path:
    """A project with what the host executes, a secret, and a link that leads out of it."""
    project = folder / "project"
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / "sub").mkdir()
    (folder / "outside.txt").write_text("outside")
    (project / "out").symlink_to(folder / "outside.txt")
    for name, text in {
        ".git/HEAD": "ref: refs/heads/main\n",
        ".mcp.json": "{}",
        ".env": "KEY=secret",
        "sales.csv": "a\n1\n",
        "helper.py": "value = 7\ndef fail():\n    raise ValueError(value)\n",
    }.items():
        (project / name).write_text(text)
    return project


async def where(notebook: Agent, **arguments: str) -> str:
    return (await notebook.run(HERE, **arguments)).text.partition("<")[2].partition(">")[0]


@pytest.mark.parametrize(
    "started",
    [
        pytest.param((), id="cold", marks=pytest.mark.ways),
        pytest.param(("--warm", "1"), id="forked"),
    ],
)
async def test_cells_and_file_tools_begin_in_it(tmp_path: Path, started: tuple[str, ...]) -> None:
    project = project_in(tmp_path)
    async with agent("--mount", f"{project}:rw", *started) as notebook:
        assert await where(notebook) == str(project)
        code = "import helper; open('sales.csv').read(), helper.value"
        assert (await notebook.run(code)).text == "('a\\n1\\n', 7)"
        failed = (await notebook.run("helper.fail()")).text
        assert 'File "helper.py", line 3, in fail\n    raise ValueError(value)' in failed
        await notebook.call("write_file", path="sub/made.txt", content="made")
        assert (project / "sub" / "made.txt").read_text() == "made"
        assert (await notebook.call("read_file", path="sub/made.txt")).text == "made"
        assert (await notebook.call("read_file", path=f"{project}/sub/made.txt")).text == "made"
        listed = (await notebook.call("list_files")).text
        assert "sales.csv  4 bytes" in listed
        assert f"Folders of the host: {project}. The workspace is /workspace." in listed
        assert "sub/made.txt  4 bytes" in (await notebook.call("list_files", path="sub")).text
        await notebook.run("open('/workspace/own.txt', 'w').write('own')")
        assert (await notebook.call("read_file", path="/workspace/own.txt")).text == "own"
        assert not (project / "own.txt").exists()
        found = (await notebook.call("read_file", path="own.txt")).text
        assert found.startswith("own")
        assert "this is /workspace/own.txt, in the workspace" in found
        missed = (await notebook.run("open('own.txt')")).text
        assert "There is /workspace/own.txt, in the workspace: open it by this path" in missed
        await notebook.call("export_notebook", path="all.ipynb")
        assert json.loads((project / "all.ipynb").read_text())["cells"]
        opened = await notebook.call("open_notebook", path="sub/new.ipynb")
        assert not opened.failed, opened.text
        assert await where(notebook) == f"{project}/sub"
        assert "getcwd" in (project / "sub" / "new.ipynb").read_text()
        ran = await notebook.call("run_script", script=f"{HERE}; open('by_script', 'w').close()")
        assert str(project) in ran.text
        assert "gone with its session" not in ran.text
        assert (project / "by_script").exists()


@pytest.mark.ways
async def test_an_export_replaces_no_notebook_of_the_project(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    theirs = project / "notebook.ipynb"
    theirs.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    async with agent("--mount", f"{project}:rw") as notebook:
        await notebook.run("x = 1")
        refused = await notebook.refused("export_notebook")
        assert f"a notebook in {project} that was not exported" in refused
        assert "x = 1" not in theirs.read_text()
        for code in ("x = 2", "x = 3"):
            await notebook.run(code)
            assert not (await notebook.call("export_notebook", path="mine.ipynb")).failed
            assert code in (project / "mine.ipynb").read_text()


@pytest.mark.ways
async def test_it_stays_so_after_undo_reset_and_a_move(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    async with agent("--mount", f"{project}:rw", "--warm", "0") as notebook:
        await notebook.run("x = 1")
        await notebook.run("import os; os.chdir('sub')", checkpoint=True)
        assert await where(notebook) == f"{project}/sub"
        await notebook.call("undo", cells=2)
        assert await where(notebook) == str(project)
        await notebook.call("write_file", path="a.txt", content="a")
        await notebook.call("reset", files=True)
        assert (project / "a.txt").exists()
        assert await where(notebook) == str(project)
        note = (await notebook.call("close_session")).data["note"]
        assert note.endswith(f"what was in /workspace was removed; files in {project} stay.")
        assert (project / "a.txt").exists()


@pytest.mark.ways
async def test_it_stays_so_for_the_next_server(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    place, mounted = Place(tmp_path), ("--mount", f"{project}:rw")
    for code, folder in (("x = 1", project), ("os.chdir('sub')", project / "sub")):
        async with place.life(*mounted) as notebook:
            await notebook.run(f"import os; {code}")
        async with place.life(*mounted) as notebook:
            assert await where(notebook) == str(folder)
            assert (await notebook.run("x")).text == "1"


@pytest.mark.ways
async def test_a_notebook_of_it_is_none_of_a_workspace_for_the_next_server(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    place, mounted = Place(tmp_path), ("--mount", f"{project}:rw")
    async with place.life(*mounted) as notebook:
        await notebook.call("open_notebook", path="sub/a.ipynb")
        await notebook.run("x = 1")
    async with place.life(*mounted) as notebook:
        assert "'sub/a.ipynb' is still open" in (await notebook.run("x = 2")).text
    assert "x = 2" in (project / "sub" / "a.ipynb").read_text()
    async with place.life() as notebook:
        told = (await notebook.run("x = 3")).text
        assert f"'{project}/sub/a.ipynb' is not open any more" in told
        assert "sub" not in (await notebook.call("list_files")).text
    assert "x = 3" not in (project / "sub" / "a.ipynb").read_text()


async def test_tools_reach_nothing_there_that_is_covered_or_outside(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    hook, settings = project / ".git" / "hooks" / "pre-commit", project / ".mcp.json"
    async with agent("--mount", f"{project}:rw") as notebook:
        for path in (".git/hooks/pre-commit", ".mcp.json", "sub/../.git/hooks/pre-commit"):
            refused = await notebook.refused("write_file", path=path, content="evil")
            assert "stays read-only" in refused
        assert "is covered" in await notebook.refused("read_file", path=".env")
        assert "is covered" in await notebook.refused("write_file", path=".env", content="")
        for path in ("out", "../outside.txt", "sub/../../outside.txt"):
            assert "outside" not in (await notebook.refused("read_file", path=path)).replace(
                path, ""
            )
        for path in ("../outside.txt", "/etc/passwd", "~/x", "a\0b"):
            await notebook.refused("write_file", path=path, content="evil")
        await notebook.refused("export_notebook", path=".git/hooks/a.ipynb")
        for code in ("open('.git/hooks/pre-commit', 'w')", "open('.mcp.json', 'w')"):
            assert "Read-only file system" in (await notebook.run(code)).text
        assert (await notebook.run("open('.env').read()")).text == "''"
        assert (tmp_path / "outside.txt").read_text() == "outside"
    assert not hook.exists()
    assert settings.read_text() == "{}"


async def test_modules_of_it_are_the_session_s_own_in_every_profile(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    async with agent("--mount", f"{project}:rw", "--profile", "guarded") as notebook:
        assert (await notebook.run("import helper; helper.value")).text == "7"
        checked = (await notebook.call("check_syntax", code="import helper")).data
        assert checked["valid"]


@pytest.mark.ways
async def test_sessions_begin_in_their_workspace_elsewhere(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    file, out = f"{project}/sales.csv", f"{tmp_path}/out"
    (tmp_path / "out").mkdir()
    for first in (("--mount", str(project)), ("--mount", f"{file}:rw")):
        async with agent(*first, "--mount", f"{out}:rw") as notebook:
            assert await where(notebook) == "/workspace"
            await notebook.call("write_file", path="a.txt", content="a")
            assert (await notebook.call("read_file", path="/workspace/a.txt")).text == "a"
            assert not any((tmp_path / "out").iterdir())


async def test_a_secret_that_appears_is_covered_by_its_relative_name_too(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    async with agent("--mount", f"{project}:rw", "--warm", "1") as notebook:
        await notebook.run("from pathlib import Path")
        (project / "sub" / ".env").write_text("KEY=late")
        # set aside where it is not known who has made it, and covered under that name
        read = "[each.read_text() for each in Path('sub').glob('.env*')]"
        with anyio.fail_after(60):
            while (await notebook.run(read)).text != "['']":
                pass


async def test_an_adopted_branch_goes_on_in_it(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    async with agent("--mount", f"{project}:rw", "--warm", "1") as notebook:
        await notebook.run("import os; os.chdir('sub'); x = 1")
        made = (await notebook.call("branch", n=1)).data["branches"][0]
        branch = made["session"]
        assert await where(notebook, session=branch) == f"{project}/sub"
        own = "open(os.environ['BRANCH_DIR'] + '/own', 'w')"
        code = f"open('of_branch', 'w').write('b'); {own}; x = 2"
        await notebook.run(code, session=branch)
        assert not (await notebook.call("adopt", branch=branch)).failed
        assert (await notebook.run("x, open('of_branch').read()")).text.startswith("(2, 'b')")
        assert await where(notebook) == f"{project}/sub"
        assert (project / "sub" / "of_branch").read_text() == "b"
        assert not (project / ".branches").exists()
        assert (await notebook.call("read_file", path="sub/of_branch")).text == "b"
        assert (await notebook.call("read_file", path=f"{made['folder']}/own")).text == "(empty)"


async def test_files_in_it_are_not_installed_and_the_way_is_told(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    (project / "needed.txt").write_text("kmtest-good\n")
    for folder in (project, tmp_path / "links"):
        wheel(folder, "kmtest-good", "1.0")
    name = "kmtest_good-1.0-py3-none-any.whl"
    links = ("--allow-install", "*", "--find-links", str(tmp_path / "links"))
    async with agent("--mount", f"{project}:rw", *links) as notebook:
        for line in ("%pip install -r needed.txt", f"!pip install ./{name}", "%pip install -e ."):
            answer = await notebook.call("execute", code=f"{line}\nimport kmtest_good")
            assert answer.failed
            assert "No line of this cell was run." in answer.text, answer.text
        for given in (f"./{name}", f"{project}/{name}", f"file://{project}/{name}"):
            assert (await notebook.call("install", packages=[given])).failed
        assert not (await notebook.call("install", packages=["kmtest-good"])).failed
        assert (await notebook.run("import kmtest_good; kmtest_good.__version__")).text == "'1.0'"
