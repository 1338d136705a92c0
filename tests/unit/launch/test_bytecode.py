"""Bytecode beside the sources that kernels start from."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.rundir import compile_guest

pytestmark = pytest.mark.anyio

HERE = KernelEnvironment(Path(sys.executable), (), version=platform.python_version())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "inner" / "b.py").write_text("B = 2\n")
    return tmp_path


def compiled(folder: Path) -> dict[str, float]:
    return {path.name.split(".")[0]: path.stat().st_mtime for path in folder.rglob("*.pyc")}


async def test_all_sources_are_compiled_once(folder: Path) -> None:
    await compile_guest(HERE, folder)
    before = compiled(folder)
    assert set(before) == {"a", "b"}
    await compile_guest(HERE, folder)
    assert compiled(folder) == before


async def test_a_changed_source_is_compiled_again(folder: Path) -> None:
    await compile_guest(HERE, folder)
    source = folder / "a.py"
    source.write_text("A = 'changed'\n")
    later = source.stat().st_mtime + 10
    os.utime(source, (later, later))
    await compile_guest(HERE, folder)
    (bytecode,) = (folder / "__pycache__").iterdir()
    assert b"changed" in bytecode.read_bytes()


async def test_what_cannot_be_compiled_is_no_failure(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "__pycache__").write_text("in the way")
    with caplog.at_level("INFO"):
        await compile_guest(HERE, folder)
    assert "compile their own start" in caplog.text
