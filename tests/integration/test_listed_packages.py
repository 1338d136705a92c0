"""Environments of `--requirements` and `--project`, built by the real uv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from tests.integration.agent import agent, lost
from tests.integration.lives import Place
from tests.sampled import sampled
from tests.unit.packages.wheels import sdist, wheel

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A folder with wheels that nobody else has."""
    folder = tmp_path / "links"
    for version in ("1.0", "2.0"):
        wheel(folder, "kmtest-locked", version, requires=["kmtest-below"])
    wheel(folder, "kmtest-below")
    wheel(folder, "kmtest-dev")
    wheel(folder, "kmtest-more")
    return folder


@pytest.fixture
def project(tmp_path: Path, links: Path) -> Path:
    """A project with a lock, whose own code must never run."""
    folder = tmp_path / "project"
    folder.mkdir()
    planted = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "setup.py").write_text(planted)
    (folder / "backend.py").write_text(planted + "def build_wheel(*a): 1/0\n")
    (folder / "conftest.py").write_text(planted)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0.1"\nrequires-python = ">=3.10"\n'
        'dependencies = ["kmtest-locked==1.0", "kmtest-none; sys_platform == \'win32\'"]\n'
        '[dependency-groups]\ndev = ["kmtest-dev"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "src" / "mine").mkdir(parents=True)
    wheel(links, "kmtest-none")
    lock(folder, links)
    return folder


def lock(folder: Path, links: Path) -> None:
    words = ["lock", "--directory", str(folder), "--no-index", "--find-links", str(links)]
    subprocess.run([uv.find_uv_bin(), *words], check=True, capture_output=True)


@pytest.mark.ways
async def test_the_lock_of_a_project_makes_the_environment_of_all_kernels(
    project: Path, links: Path, tmp_path: Path
) -> None:
    flags = ("--project", str(project), "--find-links", str(links), "--allow", "kmtest-more")
    async with agent(*flags, "--warm", "1") as notebook:
        code = (
            "import kmtest_locked, kmtest_below, kmtest_dev, kmtest_more\n"
            "print(kmtest_locked.__version__)\nimport importlib.util as u\n"
            "print(u.find_spec('mine'), u.find_spec('kmtest_none'), u.find_spec('pytest'))"
        )
        for session in ("", (await notebook.call("create_session")).data["session"]):
            answer = await notebook.run(code, session=session)
            assert answer.text == "1.0\nNone None None"
        assert "mine is code of the project" in (await notebook.run("import mine")).text
        info = (await notebook.call("info")).data
        assert info["listed_by"] == [f"--project {project}"]
        assert "kmtest-locked==1.0" in info["packages"]
        first = info["interpreter"]
    assert not (tmp_path / "ran").exists()
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text + "[tool.ruff]\nline-length = 99\n")
    async with agent(*flags) as notebook:
        assert (await notebook.call("info")).data["interpreter"] == first
    (project / "pyproject.toml").write_text(text.replace("locked==1.0", "locked==2.0"))
    lock(project, links)
    async with agent(*flags) as notebook:
        code = "import kmtest_locked; kmtest_locked.__version__"
        assert "2.0" in (await notebook.run(code)).text
    assert not (tmp_path / "ran").exists()


@pytest.mark.ways
async def test_members_of_a_workspace_are_left_out_and_what_they_need_is_there(
    project: Path, links: Path, tmp_path: Path
) -> None:
    for folder, name, needs in (
        (project / "packages/part", "part", "kmtest-more"),
        (tmp_path / "beside", "beside", "kmtest-dev"),
    ):
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.10"\n'
            f'dependencies = ["{needs}"]\n'
        )
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(
        text.replace('["kmtest-locked==1.0"', '["part", "beside", "kmtest-locked==1.0"')
        + '[tool.uv.workspace]\nmembers = ["packages/*"]\n'
        + '[tool.uv.sources]\npart = { workspace = true }\nbeside = { path = "../beside" }\n'
    )
    lock(project, links)
    found = "import importlib.util as u\nprint([bool(u.find_spec(n)) for n in names])"
    names = ["kmtest_locked", "kmtest_more", "kmtest_dev", "mine", "part", "beside"]
    for folder, there in (
        (project, [True, True, True, False, False, False]),
        (project / "packages/part", [False, True, False, False, False, False]),
    ):
        flags = ("--project", str(folder), "--find-links", str(links))
        async with agent(*flags) as notebook:
            answer = await notebook.run(f"names = {names}\n{found}")
            assert answer.text == str(there)
            assert "part is a package of the project" in (await notebook.run("import part")).text
            code = "import importlib.metadata as m; m.version('part')"
            assert f"--python {project / '.venv'}" in (await notebook.run(code)).text
            told = str((await notebook.call("info")).data["environment"])
            assert "metadata and scripts of beside, mine, part are not installed" in told
            assert f"--python {project / '.venv'}" in told
    assert not (tmp_path / "ran").exists()


@pytest.mark.ways
async def test_a_lock_of_versions_that_the_kernel_does_not_work_with_is_used_beside_it(
    project: Path, links: Path
) -> None:
    wheel(links, "ipykernel", "6.29.5", requires=["kmtest-below"])
    text = (project / "pyproject.toml").read_text()
    text = text.replace('["kmtest-locked==1.0"', '["ipykernel==6.29.5", "kmtest-locked==1.0"')
    (project / "pyproject.toml").write_text(text)
    lock(project, links)
    flags = ("--project", str(project), "--find-links", str(links), "--allow", "kmtest-more")
    code = (
        "import ipykernel, kmtest_locked, kmtest_more, subprocess, sys\n"
        "program = 'import ipykernel; print(ipykernel.__version__)'\n"
        "theirs = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)\n"
        "print(ipykernel.__version__.split('.')[0], kmtest_locked.__version__, theirs.stdout)"
    )
    for _ in range(2):  # the second server finds both environments
        async with agent(*flags, "--warm", "1", "--allow-install", "six") as notebook:
            assert (await notebook.run(code)).text.split() == ["7", "1.0", "6.29.5"]
            told = str((await notebook.call("info")).data["environment"])
            assert "in place of 6.29.5" in told
            await notebook.call("install", packages=["six"])
            assert (await notebook.run("import six; six.__name__")).text == "'six'"


@pytest.mark.ways
async def test_the_hashes_of_a_lock_are_enforced(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0"\ndependencies = ["tabulate==0.9.0"]\n'
    )
    words = ["lock", "--directory", str(tmp_path)]
    subprocess.run([uv.find_uv_bin(), *words], check=True, capture_output=True)
    text = (tmp_path / "uv.lock").read_text()
    (tmp_path / "uv.lock").write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:01234567", text))
    async with agent("--project", str(tmp_path)) as notebook:
        said = await notebook.refused("execute", code="1")
        assert "other files of tabulate==0.9.0 than the hashes allow" in said
        assert str(tmp_path) in said
        assert "tabulate" in (await notebook.call("info")).data["problem"]
    (tmp_path / "uv.lock").write_text(text.replace("/tabulate-", "/elsewhere-"))
    async with agent("--project", str(tmp_path)) as notebook:
        assert (await notebook.run("import tabulate; tabulate.__version__")).text == "'0.9.0'"


@pytest.mark.ways
async def test_requirements_make_the_environment_and_errors_name_the_line(
    tmp_path: Path, links: Path
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# ours\nkmtest-locked<2\n-c limits.txt\n")
    (tmp_path / "limits.txt").write_text("kmtest-below<2\n")
    flags = ("--requirements", str(file), "--find-links", str(links), "--profile", "guarded")
    async with agent(*flags, "--warm", "1") as notebook:
        answer = await notebook.run("import kmtest_locked; print(kmtest_locked.__version__)")
        assert answer.text == "1.0"
        assert "kmtest_locked" in (await notebook.call("info")).data["allowed_imports"]
    file.write_text("\n\nkmtest-locked>=9\n")
    async with agent(*flags) as notebook:
        said = await notebook.refused("execute", code="1")
        assert "requirements.txt line 3: kmtest-locked>=9" in said
        assert "no release of kmtest-locked fits" in said


@pytest.mark.ways
@pytest.mark.parametrize("listed", sampled(["--project", "--requirements"], "--requirements"))
async def test_a_session_goes_on_in_its_environment_and_what_that_lacks_by_then_is_named(
    listed: str, project: Path, links: Path, tmp_path: Path
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("kmtest-locked==1.0\n")
    named = project if listed == "--project" else file
    flags = (listed, str(named), "--find-links", str(links), "--template")
    place = Place(tmp_path)
    async with place.life(*flags) as life:
        await life.run("import kmtest_locked, sys\nplain = 41\ntheirs = kmtest_locked\nsys.prefix")
        await place.saved(1)
        first = (await life.run("sys.prefix")).text
        life.kill()
    async with place.life(*flags) as life:
        answer = await life.run("print(sys.prefix)\nplain, theirs.__version__")
        assert answer.text.splitlines()[:2] == [first.strip("'"), "(41, '1.0')"]
        assert lost(answer) == []
        await place.saved(3)
    file.write_text("kmtest-below\n")
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("kmtest-locked==1.0", "kmtest-below"))
    lock(project, links)
    async with place.life(*flags) as life:
        answer = await life.run("plain")
        assert answer.text.startswith("41\n")
        assert sorted(lost(answer)) == ["kmtest_locked", "theirs"]


async def test_no_code_of_a_source_runs(tmp_path: Path) -> None:
    sdist(tmp_path / "links", "kmtest-source", f"open({str(tmp_path / 'ran')!r}, 'w')")
    file = tmp_path / "requirements.txt"
    file.write_text("kmtest-source\n")
    flags = ("--requirements", str(file), "--find-links", str(tmp_path / "links"))
    async with agent(*flags, "--allow-source-builds") as notebook:
        said = await notebook.refused("execute", code="1")
        assert "kmtest-source has no wheel" in said
        assert "requirements.txt line 1" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command_line", [["doctor", "--json"], ["env", "build"], []])
def test_a_place_in_a_file_is_refused_at_the_start(tmp_path: Path, command_line: list[str]) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("six\n-e .\n")
    words = [sys.executable, "-m", "kernel_mcp", *command_line, "--requirements", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert "requirements.txt line 2: -e takes code from a folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_environment_of_the_operators_is_not_added_to(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "r.txt").write_text("six\n")
    flags = ("--python", str(tmp_path / "venv"), "--requirements", str(tmp_path / "r.txt"))
    words = [sys.executable, "-m", "kernel_mcp", *flags]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert "packages of an environment of yours stay as they are" in done.stderr
