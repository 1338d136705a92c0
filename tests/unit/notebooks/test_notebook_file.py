"""Notebooks as files that others write, too."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kernel_mcp.errors import NotebookError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.notebooks.document import NotebookDocument
from kernel_mcp.notebooks.notebook_file import NotebookFile
from tests.unit.notebooks.test_document import FOREIGN

HALF = len(FOREIGN) // 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.ipynb"


@pytest.fixture
def found(tmp_path: Path) -> NotebookFile:
    return NotebookFile(Workspace(tmp_path), "a.ipynb", lambda _path, _size, _data: None)


def without_first(document: NotebookDocument) -> None:
    document.remove(0)


def test_a_file_that_is_being_written_in_place_is_waited_for(
    path: Path, found: NotebookFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("")
    rest = [FOREIGN[:HALF], FOREIGN[HALF:]]

    def written(_pause_s: float) -> None:
        with path.open("a") as file:
            file.write(rest.pop(0))

    monkeypatch.setattr(time, "sleep", written)
    found.change(without_first)
    assert [cell.id for cell in found.read().cells] == ["load"]
    assert not rest


@pytest.mark.parametrize(
    "text", [FOREIGN[:HALF], FOREIGN.replace('"nbformat": 4', '"nbformat": 3')]
)
def test_what_nobody_writes_is_refused_at_once(
    path: Path, found: NotebookFile, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(text)
    if text == FOREIGN[:HALF]:
        os.utime(path, (time.time() - 60, time.time() - 60))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(NotebookError, match="no notebook that can be read"):
        found.change(without_first)
    assert path.read_text() == text


def test_a_file_that_nobody_may_write_is_not_replaced(path: Path, found: NotebookFile) -> None:
    path.write_text(FOREIGN)
    path.chmod(0o444)
    with pytest.raises(NotebookError, match="is read-only"):
        found.check_writable()
    with pytest.raises(NotebookError, match="is read-only"):
        found.change(without_first)
    assert (path.read_text(), path.stat().st_mode & 0o777) == (FOREIGN, 0o444)
