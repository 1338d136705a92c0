"""The persistence that the settings of a server give."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.sessions.persistence_setup import persistence_in_words, persistence_of


def test_a_store_inside_the_working_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    made, why = persistence_of(Settings(), tmp_path / "work" / "s", "bwrap", lambda names: ())
    assert made is None
    assert "is in the folder" in why
    made, why = persistence_of(Settings(), tmp_path / "s", "bwrap", lambda names: ())
    assert made is not None
    assert made.folder == str(tmp_path / "work")


def test_what_is_kept_and_how_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    made, _ = persistence_of(Settings(), tmp_path / "s", "bwrap", lambda names: ())
    assert persistence_in_words(made, "").startswith("the default session and those with names")
    assert persistence_in_words(None, "off (--persist off)") == "off (--persist off)"
    assert persistence_of(Settings(persist=None), tmp_path, "bwrap", lambda names: ()) == (
        None,
        "off (--persist off)",
    )
