"""Where uv looks for interpreters, and what is made of its last words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kernel_mcp.environments.interpreters import Interpreters
from kernel_mcp.environments.uv import Sources, Uv, UvResult
from kernel_mcp.errors import EnvironmentBuildError


def test_the_interpreters_of_pyenv_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "versions" / "3.12.1" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").touch()
    uv = Uv("uv", {"PYENV_ROOT": str(tmp_path), "PATH": "/bin"}, tmp_path)
    assert uv._env["PATH"] == f"{folder}:/bin"


def test_a_pyenv_that_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", closed)
    uv = Uv("uv", {"PYENV_ROOT": "/root/.pyenv", "PATH": "/bin"}, tmp_path)
    assert uv._env["PATH"] == "/bin"


def test_no_project_brings_an_interpreter(tmp_path: Path) -> None:
    for venv in ("venv", "active"):
        (tmp_path / venv / "bin").mkdir(parents=True)
        (tmp_path / venv / "pyvenv.cfg").touch()
    (tmp_path / "conda/bin").mkdir(parents=True)
    (tmp_path / "conda/conda-meta").mkdir()
    environ = {
        "PATH": f"{tmp_path}/active/bin:{tmp_path}/conda/bin::.:bin:./bin:/bin",
        "PYENV_ROOT": ".pyenv",
        "VIRTUAL_ENV": str(tmp_path / "active"),
        "CONDA_PREFIX": str(tmp_path / "venv"),
    }
    uv = Uv("uv", environ, tmp_path)
    assert uv._env["PATH"] == "/bin"
    assert not {"VIRTUAL_ENV", "CONDA_PREFIX"} & uv._env.keys()


@pytest.mark.anyio
async def test_no_project_above_the_cache_configures_uv(tmp_path: Path) -> None:
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    uv = Uv(str(program), {}, tmp_path / "project/cache")
    assert (await uv.query([])).output == "/"
    assert (await uv.run([])).output == "/"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "No solution found\n Because nosuch was not found in the package registry",
            "no package 'nosuch'",
        ),
        (
            "Because nosuch was not found in the provided package locations and you require it",
            "no package 'nosuch'",
        ),
        (
            "No solution found\n Because x was not found in the cache and you require x",
            "--offline) and x is not in its cache",
        ),
        (
            "is disabled, but the requested data wasn't found in the cache for: `https://x/p.whl`",
            "p.whl is not in its cache",
        ),
        ("error: error sending request for url\n dns error", "--index-url"),
        ("failed to copy: No space left on device (os error 28)", "disk is full"),
        ("Failed to build `thing==1.0`\n The build backend returned an error", "building it from"),
        ("Because only thing<=1 is available and you require thing>2", "no release of thing"),
        ("hint: Wheels are required for `thing`", "no wheel"),
        ("No solution found: Because a depends on b<1 and you require b>2", "contradict"),
        (
            "cause: Package `x` was included as a URL dependency. Consider adding `x @ file:///x`",
            "takes x from a place of its own choice",
        ),
        ("something new", "uv failed"),
    ],
)
def test_a_failure_says_what_to_do(said: str, cause: str) -> None:
    assert cause in UvResult(1, said).cause()


def test_long_words_are_cut_at_the_start() -> None:
    said = UvResult(1, "x" * 10_000 + "the end").said()
    assert len(said) < 2000
    assert said.endswith("the end")


def test_a_success_lacks_no_wheel() -> None:
    assert not UvResult(0, "Wheels are required for x").lacks_wheel


def test_sources_become_options_and_folders() -> None:
    found = Sources("file:///mirror", True, ("/wheels", "https://x/wheels"))
    assert found.options() == [
        *("--default-index", "file:///mirror"),
        *("--find-links", "/wheels", "--find-links", "https://x/wheels"),
        "--offline",
    ]
    assert [str(folder) for folder in found.folders()] == ["/mirror", "/wheels"]
    assert Sources().options() == []


@pytest.mark.anyio
async def test_an_interpreter_is_fetched_only_where_that_is_permitted(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = tmp_path / "uv"
    offer = json.dumps([{"version": "3.15.2", "path": None}])
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        f"case \"$*\" in *only-downloads*) echo '{offer}' ;; *) exit 2 ;; esac\n"
    )
    program.chmod(0o755)
    interpreters = Interpreters(Uv(str(program), os.environ, tmp_path))
    for fetch, words in ((False, "sessions may fetch none"), (True, "none could be fetched")):
        with pytest.raises(EnvironmentBuildError, match=rf"no Python 3\.15 .*{words}"):
            await interpreters.find("3.15", fetch=fetch)
        assert ("python install --no-bin 3.15" in calls.read_text()) is fetch
    assert await interpreters.offered("3.15") == "3.15.2"
    offline = Interpreters(Uv(str(program), os.environ, tmp_path, Sources(offline=True)))
    assert await offline.offered("3.15") == ""
