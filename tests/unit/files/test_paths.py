"""Paths that tools are given, as components below the workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.paths import ResolvedPath, check_writable, parts_of
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.host_folders.exposed import ExposedMount

WORKSPACE = Path("/var/lib/kernel-mcp/w1")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a/b.csv", ("a", "b.csv")),
        ("./a//b/../c", ("a", "c")),
        ("", ()),
        ("/workspace", ()),
        ("/workspace/a", ("a",)),
        (f"{WORKSPACE}/a", ("a",)),
    ],
)
def test_paths_are_relative_to_the_workspace(path: str, parts: tuple[str, ...]) -> None:
    assert parts_of(path, WORKSPACE) == parts


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/etc/passwd", "outside the workspace"),
        ("a/../../b", "outside the workspace"),
        ("~/a", "outside the workspace"),
        ("/workspaces", "outside the workspace"),
        ("a\0b", "NUL character"),
        ("a" * 5000, "too long"),
        ("\ud800", "plain Unicode"),
    ],
)
def test_other_paths_are_refused_in_words(path: str, words: str) -> None:
    with pytest.raises(WorkspaceError, match=words):
        parts_of(path, WORKSPACE)


def test_a_relative_name_is_found_in_the_only_mount_that_has_it(tmp_path: Path) -> None:
    for name in ("work", "one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "own.csv").write_text("own")
    for name, files in (("one", ("own.csv", "a.csv", "both.csv")), ("two", ("both.csv",))):
        for file in files:
            (tmp_path / name / file).write_text(f"{name}/{file}")
    mounts = [ExposedMount(Mount(tmp_path / name, f"/{name}", "ro")) for name in ("one", "two")]
    workspace = Workspace(tmp_path / "work", mounts=mounts)
    assert workspace.mounted == ["/one", "/two"]
    names = ("own.csv", "a.csv", "./a.csv", "both.csv", "none.csv", "../a.csv", "/one/a.csv", "")
    found = [workspace.only_elsewhere(name) for name in names]
    assert found == ["", "/one/a.csv", "/one/a.csv", "", "", "", "", ""]
    page = workspace.read_file("a.csv")
    assert (page.path, page.page and page.page.text) == ("/one/a.csv", "one/a.csv")
    several = r"no file .both\.csv. in the workspace, .* /one/both\.csv and /two/both\.csv\."
    with pytest.raises(WorkspaceError, match=several):
        workspace.read_file("both.csv")


def test_only_files_of_writable_mounts_may_be_written(tmp_path: Path) -> None:
    def refusal(rights: str, *parts: str) -> str:
        shown = ExposedMount(Mount(tmp_path, "/data", rights))
        shown.covers[(".env",)] = "file"
        place = ResolvedPath("/data/" + "/".join(parts), -1, parts, shown)
        with shown.open_folder() as root:
            place = ResolvedPath(place.path, root, parts, shown)
            try:
                check_writable(shown, place)
            except WorkspaceError as error:
                return str(error)
        return ""

    assert "mounted read-only" in refusal("ro", "plain")
    assert refusal("rw", "plain") == ""
    assert "is covered" in refusal("rw", ".env")
    assert "stays read-only" in refusal("rw", ".git", "hooks", "x")
