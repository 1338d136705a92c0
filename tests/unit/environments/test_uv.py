"""Where uv looks for interpreters."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.environments.uv import Uv


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
    environ = {
        "PATH": f"{tmp_path}/active/bin::.:bin:./bin:/bin",
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
