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
