"""The file tree of the sandbox as bubblewrap options."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.sandbox.mounts import Features, runtime_options, scratch_options


def bound(options: list[str]) -> list[str]:
    return [options[at + 2] for at, option in enumerate(options) if option == "--ro-bind"]


def made(options: list[str]) -> list[str]:
    return [options[at + 1] for at, option in enumerate(options) if option == "--dir"]


def test_a_runtime_is_bound_where_it_is_below_parents_that_all_may_pass(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    options = runtime_options([folder])
    assert bound(options) == [str(folder)]
    assert made(options)[-1] == str(tmp_path)
    assert all(
        options[at - 2 : at] == ["--perms", "0755"]
        for at, option in enumerate(options)
        if option == "--dir"
    )


def test_what_lies_in_usr_or_in_another_runtime_is_not_bound_twice(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    options = runtime_options([Path("/usr/bin"), tmp_path / "a" / "b", tmp_path / "a"])
    assert bound(options) == [str(tmp_path / "a")]


def test_a_linked_runtime_is_bound_under_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    options = runtime_options([tmp_path / "link"])
    assert bound(options) == [str(tmp_path / "link"), str(tmp_path / "real")]


@pytest.mark.parametrize("path", ["/", "/tmp", "/proc", "/workspace", "relative", "/etc"])
def test_folders_that_would_open_the_sandbox_are_refused(path: str) -> None:
    with pytest.raises(LaunchError, match="cannot be made readable"):
        runtime_options([Path(path)])


def test_a_link_to_the_root_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(LaunchError, match="cannot be made readable"):
        runtime_options([tmp_path / "link"])


def test_a_runtime_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not exist"):
        runtime_options([tmp_path / "gone"])


def test_scratch_space_is_limited_where_bubblewrap_can() -> None:
    new, old = Features(size=True, disable_userns=True), Features(size=False, disable_userns=False)
    assert scratch_options("/tmp", 5, new) == ["--size", "5", "--perms", "1777", "--tmpfs", "/tmp"]
    assert scratch_options("/tmp", 0, new) == ["--perms", "1777", "--tmpfs", "/tmp"]
    assert scratch_options("/tmp", 5, old) == ["--perms", "1777", "--tmpfs", "/tmp"]
