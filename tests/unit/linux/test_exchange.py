"""One folder takes the place of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.linux import safe_tree
from kernel_mcp.linux.safe_tree import take_place


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    newcomer, place = tmp_path / "newcomer", tmp_path / "place"
    newcomer.mkdir()
    place.mkdir()
    (newcomer / "own").touch()
    return newcomer, place


def test_the_folder_that_was_there_is_found_under_the_other_name(
    folders: tuple[Path, Path],
) -> None:
    newcomer, place = folders
    (place / "before").touch()
    assert take_place(newcomer, place) == newcomer
    assert (place / "own").exists()
    assert (newcomer / "before").exists()


def test_without_exchange_an_empty_folder_is_replaced(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, place = folders
    monkeypatch.setattr(safe_tree, "_renameat2", safe_tree._without)
    assert take_place(newcomer, place) is None
    assert (place / "own").exists()
    assert not newcomer.exists()


def test_without_exchange_a_full_folder_stays(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, place = folders
    (place / "before").touch()
    monkeypatch.setattr(safe_tree, "_renameat2", safe_tree._without)
    with pytest.raises(OSError, match="not empty"):
        take_place(newcomer, place)
    assert (place / "before").exists()


def test_a_place_that_does_not_exist_is_named(folders: tuple[Path, Path]) -> None:
    newcomer, place = folders
    place.rmdir()
    with pytest.raises(FileNotFoundError, match="place"):
        take_place(newcomer, place)
    assert (newcomer / "own").exists()
