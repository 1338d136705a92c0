"""Git's answers about settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.host_folders.secrets import FIXED
from kernel_mcp.launch.git_settings import GitSettingsQuery, GitUnavailable
from kernel_mcp.sandbox.select import PlainBuilder

pytestmark = pytest.mark.anyio


class Confined(PlainBuilder):
    """Runs Git as it is."""

    confined = True


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExposedMount:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    shown = ExposedMount(Mount(project, "/data", "rw"))
    shown.covers[(".git",)] = FIXED
    return shown


async def test_settings_are_read_with_all_that_they_include(
    shown: ExposedMount, tmp_path: Path
) -> None:
    top = shown.mount.host
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.gitconfig").write_text("[core]\n\thooksPath = hooks-of-all\n")
    (top / ".git/objects/info").mkdir(parents=True)
    (top / ".git/objects/info/alternates").write_text("../../lent/objects\n")
    (top / ".git/config").write_text(
        '[include]\n\tpath = ../one\n[includeIf "onbranch:x"]\n\tpath = ../two\n'
        "[core]\n\tbare\n\tsshCommand = ssh -F ./sub/conf\n"
    )
    (top / "one").write_text('[filter "f"]\n\tclean = \\\n\tby/one\n[broken')
    (top / "two").write_text("[include]\n\tpath = three\n")
    answer = await GitSettingsQuery(Confined).ask(shown, again=False)
    assert {"/".join(path) for path in answer.paths} == {
        *("hooks-of-all", "one", "two", "three", "sub/conf", "by/one", "lent/objects")
    }
    assert str(top / "three") in answer.read
    (told,) = answer.messages(shown)
    assert told["last"]
    assert ("one",) in told["sources"]


async def test_hooks_outside_the_mount_are_read_for_what_they_run_in_it(
    shown: ExposedMount, tmp_path: Path
) -> None:
    top = shown.mount.host
    hooks = tmp_path / "home/hooks"
    hooks.mkdir(parents=True)
    (tmp_path / "home/.gitconfig").write_text("[core]\n\thooksPath = ~/hooks\n")
    (hooks / "pre-commit").write_text("#!/bin/sh\nexec ./tools/check.sh\n")
    (hooks / "post-commit").symlink_to(top / "tools/linked")
    (top / "tools").mkdir()
    (top / "tools/linked").touch()
    answer = await GitSettingsQuery(Confined).ask(shown, again=False)
    assert {"/".join(path) for path in answer.paths} == {"tools/check.sh", "tools/linked"}


async def test_hooks_in_the_mount_that_settings_name_are_read_for_what_they_run(
    shown: ExposedMount,
) -> None:
    top = shown.mount.host
    (top / ".git/config").write_text(
        "[core]\n\thooksPath = own/hooks\n\tfsmonitor = own/monitor\n\tattributesFile = attrs\n"
    )
    (top / "own/hooks").mkdir(parents=True)
    (top / "own/hooks/pre-commit").write_text("#!/bin/sh\nexec scripts/lint.sh\n")
    (top / "own/monitor").write_text("#!/bin/sh\n. ./own/lib.sh\n")
    (top / "attrs").write_text("src/made.py text\n")
    (top / "src").mkdir()
    (top / "src/made.py").touch()
    named = {"own/hooks", "own/monitor", "attrs"}
    answer = await GitSettingsQuery(Confined).ask(shown, again=False)
    found = {"/".join(path) for path in answer.paths}
    assert found >= {*named, "scripts/lint.sh", "own/lib.sh"}
    assert "src/made.py" not in found
    answer = await GitSettingsQuery(Confined).ask(
        shown, again=True
    )  # code may have made them by now
    assert {"/".join(path) for path in answer.paths} == named


async def test_links_that_code_may_have_made_lead_nowhere(shown: ExposedMount) -> None:
    top = shown.mount.host
    (top / ".git/config").write_text("[core]\n\thooksPath = named\n")
    (top / "named").symlink_to("src")
    asking = GitSettingsQuery(Confined)
    assert (await asking.ask(shown, again=True)).paths == (("named",),)
    assert ("src",) in (await asking.ask(shown, again=False)).paths


async def test_without_git_or_a_sandbox_nothing_is_known(
    shown: ExposedMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown.mount.host / ".git/config").write_text("[core]\n\tbare = false\n")
    with pytest.raises(GitUnavailable, match="sandbox"):
        await GitSettingsQuery(PlainBuilder).ask(shown, again=False)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(GitUnavailable, match="PATH"):
        await GitSettingsQuery(Confined).ask(shown, again=False)
