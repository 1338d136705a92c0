"""The self-test of a sandbox before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel_mcp.sandbox.self_test import prepared_self_test


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with something in it."""
    folder = tmp_path / "home"
    (folder / "project/data").mkdir(parents=True)
    (folder / "project-of-others").mkdir()
    (folder / "link").symlink_to("project")
    (folder / "notes.txt").write_text("private")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def tried(home: Path, *shown: Path) -> Sequence[str]:
    """The entries of the home folder that must not be seen."""
    with prepared_self_test(shown, calls=False) as probe:
        paths = [Path(each) for each in probe.task["hidden"]]
    return sorted(each.name for each in paths if each.parent == home)


def test_the_home_folder_is_tried_but_for_the_way_to_what_is_shown(home: Path) -> None:
    every = ["link", "notes.txt", "project", "project-of-others"]
    assert tried(home) == every
    assert tried(home, home.parent / "elsewhere") == every
    assert tried(home, home / "project/data") == ["link", "notes.txt", "project-of-others"]
    assert tried(home, home / "notes.txt") == ["link", "project", "project-of-others"]


def test_paths_of_the_system_are_tried_but_for_the_way_to_what_is_shown(home: Path) -> None:
    def of_the_system(*shown: Path) -> list[str]:
        with prepared_self_test(shown, calls=False) as probe:
            return [each for each in probe.task["hidden"] if not each.startswith(str(home))]

    assert of_the_system() == ["/etc/shadow", "/etc/ssh", "/var/log", "/sys/kernel"]
    assert of_the_system(Path("/var/log/app")) == ["/etc/shadow", "/etc/ssh", "/sys/kernel"]


def test_links_to_what_is_shown_are_not_tried(home: Path) -> None:
    assert tried(home, home / "project") == ["notes.txt", "project-of-others"]
    assert tried(home, home / "link/data") == ["notes.txt", "project-of-others"]


def test_a_home_folder_that_is_shown_as_a_whole_is_tried(home: Path) -> None:
    assert tried(home, home) == ["notes.txt", "project", "project-of-others"]
