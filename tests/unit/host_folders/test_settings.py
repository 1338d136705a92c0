"""Paths in settings of the host, and where they lead."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kernel_mcp.host_folders import settings
from kernel_mcp.host_folders.links import below, links_on


def named(tmp_path: Path, name: str, value: str) -> set[str]:
    """Return what one setting of Git names below a folder."""
    base = str(tmp_path)
    found = settings.named_by([(name, value)], [base], [f"{base}/home"], [base])
    return {path.removeprefix(f"{base}/") for path in found if path.startswith(base)}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("core.hookspath", "tools/hooks", "tools/hooks"),
        ("core.hookspath", "~/hooks", "home/hooks"),
        ("core.hookspath", ".", "pre-commit"),
        ("core.fsmonitor", "./mon.sh -x", "mon.sh"),
        ("filter.a.clean", "python3 -m tools clean.py %f", "clean.py"),
        ("filter.a.process", "'my tools/run' now", "my tools/run"),
        ("alias.st", "!f() { ./own/st; }; f", "own/st"),
        ("alias.st", "!cd $(git rev-parse --show-toplevel)/there && sh there/x", "there/x"),
        ("credential.https://host.helper", "/abs/elsewhere", ""),
        ("hook.some-day.command", "sub/run", "sub/run"),
        ("branch.main.merge", "refs/heads/main", ""),
        ("remote.origin.url", "../other/repo.git", ""),
        ("remote.origin.url", "ext::./tools/fetch %S x", "tools/fetch"),
        ("url.ext::sh tools/fetch %S.insteadof", "https://host/", "tools/fetch"),
        ("alias.lg", "log --graph src/x", ""),
        ("user.name", "a/b", ""),
    ],
)
def test_settings_of_git_name_paths(tmp_path: Path, name: str, value: str, wanted: str) -> None:
    found = named(tmp_path, name, value)
    assert wanted in found if wanted else not found


def test_existing_folders_are_no_programs(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert named(tmp_path, "alias.t", "!pytest src/deep") == set()


def test_includes_count_on_any_condition() -> None:
    entries = [("include.path", "../a"), ("includeif.gitdir:~/x/.path", "b"), ("core.path", "c")]
    assert list(settings.included("/r/.git/config", entries, ())) == ["/r/a", "/r/.git/b"]


def test_repositories_are_found_by_what_leads_to_them(tmp_path: Path) -> None:
    (tmp_path / "main/.git/worktrees/w").mkdir(parents=True)
    (tmp_path / "w").mkdir()
    (tmp_path / "w/.git").write_text(f"gitdir: {tmp_path}/main/.git/worktrees/w\n")
    (tmp_path / "main/.git/worktrees/w/commondir").write_text("../..\n")
    (tmp_path / "main/.git/worktrees/w/gitdir").write_text(f"{tmp_path}/w/.git\n")
    wanted = settings.Repository(
        f"{tmp_path}/w", f"{tmp_path}/main/.git/worktrees/w", f"{tmp_path}/main/.git"
    )
    assert settings.repository_at(f"{tmp_path}/w/.git") == wanted
    assert settings.repository_in(wanted.folder) == wanted
    assert settings.repository_around(f"{tmp_path}/w/data/deep") == wanted
    assert f"{tmp_path}/main/.git/config" in wanted.settings


def test_scripts_that_hooks_name_are_found(tmp_path: Path) -> None:
    (tmp_path / ".git/hooks").mkdir(parents=True)
    (tmp_path / ".git/hooks/pre-commit").write_text("exec ./tools/lint.sh && python -m pkg.check\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/check.py").touch()
    found = set(settings.referred(f"{tmp_path}/.git", [str(tmp_path)]))
    assert found == {f"{tmp_path}/tools/lint.sh", f"{tmp_path}/pkg/check.py"}


def test_files_that_people_open_themselves_are_named_by_no_editor(tmp_path: Path) -> None:
    for name in (
        ".idea/workspace.xml",
        ".vscode/launch.json",
        ".vscode/tasks.json",
        ".claude/a.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"${{top}}/{name[1:4]}.py")
    for name in ("ide", "vsc", "cla"):
        (tmp_path / f"{name}.py").touch()
    entries = [f"{tmp_path}/{name}" for name in (".idea", ".vscode", ".claude")]
    found = {path for each in entries for path in settings.referred(each, [str(tmp_path)])}
    assert {path for path in found if Path(path).exists()} == {f"{tmp_path}/vsc.py"}


def test_words_are_found_in_linear_time() -> None:
    spent = []
    for size in (10_000, 100_000):
        before = time.process_time()
        assert len(list(settings.words("a/b " * size))) == size
        spent.append(time.process_time() - before)
    assert spent[1] < 30 * max(spent[0], 0.001)


def test_a_way_over_links_is_told_link_by_link(tmp_path: Path) -> None:
    top = str(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a" / "c").symlink_to("../b/none/deep")
    (tmp_path / "loop").symlink_to("loop")
    assert links_on(f"{top}/b/c") == ([f"{top}/b", f"{top}/a/c", f"{top}/b"], f"{top}/a/none/deep")
    assert links_on(f"{top}/loop")[1] == ""
    assert links_on(f"{top}/b/x", lambda _link: False) == ([], f"{top}/b/x")
    assert below(f"{top}/x/y", top) == ("x", "y")
    assert below("/elsewhere", top) is None
