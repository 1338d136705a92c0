"""Code in a writable mount that wants the host's Git to run it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import anyio
import pytest

from tests.escape.test_mounted_folders import (
    PATIENCE_S,
    Project,
    opened,
    project,
    way,
    where_owners_write,
)
from tests.integration.unprivileged import USER
from tests.sampled import sampled

__all__ = ("project", "way")

pytestmark = [pytest.mark.anyio]

PLANT = """
import json, os
os.chdir(ROOT)
def attempt(work):
    try:
        work()
    except OSError:
        pass
def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o755)
def beside(path, text):
    write("prepared", text)
    os.rename("prepared", path)
def anew(path, text):
    os.unlink(path)
    write(path, text)
def folder(path, text):
    os.rename(os.path.dirname(path), "was")
    write(path, text)
def over_a_link(path, text):
    write("elsewhere/" + os.path.basename(path), text)
    os.symlink(os.path.abspath("elsewhere"), os.path.dirname(path))
for path in PATHS:
    text = SETTINGS if path.endswith(".settings") else SCRIPT
    for way in (write, beside, anew, folder, over_a_link):
        attempt(lambda: way(path, text))
print(json.dumps("tried"))
"""


class Host:
    """The user whose folder a project is, at work with Git."""

    def __init__(self, project: Project) -> None:
        self.root = project.root
        self.home = project.root.parent / "of-the-user"
        self.home.mkdir(exist_ok=True)
        self.marker = project.root.parent / "of-the-user" / "marker"
        self.own()

    def own(self) -> None:
        """Make it the user's."""
        if os.geteuid() == 0:
            os.chown(self.home, USER, USER)
            for top, folders, files in os.walk(self.root):
                for name in (*folders, *files):
                    os.chown(Path(top) / name, USER, USER, follow_symlinks=False)

    def git(self, *words: str, check: bool = True, cwd: str = "") -> str:
        """Run Git as that user."""
        argv = ["git", *words]
        if os.geteuid() == 0:
            argv = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *argv]
        done = subprocess.run(
            argv,
            cwd=self.root / cwd,
            env={
                "HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
                "GIT_EDITOR": "true",
                **{
                    f"GIT_{who}_{what}": "x@y"
                    for who in ("AUTHOR", "COMMITTER")
                    for what in ("NAME", "EMAIL")
                },
            },
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            text=True,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout + done.stderr

    def works(self, cwd: str = "") -> None:
        """Do what people do all day."""
        (self.root / cwd / "tracked.txt").write_text("changed")
        for words in (
            ["status"],
            ["diff", "--ext-diff"],
            ["add", "-A"],
            ["diff", "--cached"],
            ["commit", "-q", "-m", "more"],
            ["log", "-p", "-2", "--show-signature"],
            ["checkout", "-q", "-b", "other"],
            ["merge", "-q", "--no-edit", "HEAD"],
            ["stash"],
            ["fetch", "origin"],
            ["st"],
        ):
            self.git(*words, check=False, cwd=cwd)

    def payload(self, paths: list[str]) -> str:
        """Return the code that plants programs at paths."""
        script = f"#!/bin/sh\ntouch {self.marker}\nexit 0\n"
        settings = f'[core]\n\tfsmonitor = "touch {self.marker}; false"\n'
        return (
            f"ROOT, PATHS = {str(self.root)!r}, {paths!r}\n"
            f"SCRIPT, SETTINGS = {script!r}, {settings!r}\n{PLANT}"
        )


NAMED = {
    "core.hooksPath": ("tools/hooks", "tools/hooks/post-commit"),
    "include.path": ("../shared.settings", "shared.settings"),
    "includeIf.gitdir:~/nowhere/.path": ("../nowhere.settings", "nowhere.settings"),
    "includeIf.onbranch:other.path": ("../branch.settings", "branch.settings"),
    "core.fsmonitor": ("tools/monitor.sh", "tools/monitor.sh"),
    "core.sshCommand": ("./tools/ssh -v", "tools/ssh"),
    "core.pager": ("tools/pager", "tools/pager"),
    "core.editor": ("sh tools/editor.sh", "tools/editor.sh"),
    "filter.own.clean": ("tools/clean %f", "tools/clean"),
    "filter.own.smudge": ("sh ./tools/smudge.sh", "tools/smudge.sh"),
    "diff.own.textconv": ("python3 conv.py", "conv.py"),
    "diff.external": ("tools/differ", "tools/differ"),
    "merge.own.driver": ("tools/driver %O %A %B", "tools/driver"),
    "gpg.program": ("tools/gpg", "tools/gpg"),
    "credential.helper": ("!./tools/helper", "tools/helper"),
    "alias.st": ("!tools/alias", "tools/alias"),
    "remote.origin.uploadpack": ("tools/upload", "tools/upload"),
}


def planted(project: Project, paths: list[str]) -> list[str]:
    """Return those of `paths` that contain the code's script."""
    return [path for path in paths if "touch" in _text(project.root / path)]


@where_owners_write
@pytest.mark.parametrize(
    "there",
    [pytest.param(True, id="there"), pytest.param(False, id="absent", marks=pytest.mark.ways)],
)
async def test_what_git_settings_name_cannot_be_made_to_run_code(
    way: str, there: bool, project: Project
) -> None:
    host = Host(project)
    host.git("init", "-q")
    project.write(".git/config", "[core]\n\trepositoryformatversion = 0\n")
    project.write(".gitattributes", "*.txt filter=own diff=own merge=own\n")
    project.write("tracked.txt", "first\n")
    host.own()
    host.git("remote", "add", "origin", str(project.root.parent / "of-the-user" / "bare"))
    host.git("add", "tracked.txt", ".gitattributes")
    host.git("commit", "-q", "-m", "first")
    for name, (value, path) in NAMED.items():
        if there:
            text = "" if path.endswith(".settings") else "#!/bin/sh\nexit 0\n"
            project.write(path, text, mode=0o755)
        host.git("config", name, value)
    host.own()
    paths = [path for _, path in NAMED.values()]
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        await notebook.agent.run(host.payload(paths), session=notebook.session)
        with anyio.fail_after(60):  # news of a change takes a moment, longer on a busy machine
            while planted(project, paths):
                await notebook.agent.call("info")
        told = (await notebook.agent.call("info")).data["mounts"][0]
    host.works()
    assert not host.marker.exists(), told


some = pytest.mark.parametrize(
    "way",
    sampled(["root forked", "ordinary cold", "ordinary forked"], "ordinary forked"),
    indirect=True,
)
"""Tests of what a server does about changes of a folder, however its kernels were started."""


def begun(host: Host, cwd: str = "") -> None:
    """Make a repository with a commit."""
    (host.root / cwd).mkdir(exist_ok=True)
    host.own()
    host.git("init", "-q", cwd=cwd)
    (host.root / cwd / "tracked.txt").write_text("first")
    host.own()
    host.git("add", "tracked.txt", cwd=cwd)
    host.git("commit", "-q", "-m", "first", cwd=cwd)


@some
async def test_hooks_that_are_elsewhere_cannot_be_made_to_run_code(
    way: str, project: Project
) -> None:
    """Links to folders that are tracked, repositories around, below and beside, local hooks."""
    host = Host(project)
    shutil.rmtree(project.root / ".git")
    room = "room"
    begun(host)
    begun(host, room)
    (project.root / room / "tracked-hooks").mkdir()
    shutil.rmtree(project.root / room / ".git/hooks")
    (project.root / room / ".git/hooks").symlink_to("../between")
    (project.root / room / "between").symlink_to("tracked-hooks")
    host.git("config", "core.hooksPath", "room/outer-hooks")
    project.write("room/.pre-commit-config.yaml", "entry: ./own/check.sh\n")
    project.write("room/own/check.sh", "")
    host.git("init", "-q", "--separate-git-dir", "room/apart", "room/linked")
    host.git("init", "-q", "--bare", "room/bare")
    host.own()
    paths = [
        *("tracked-hooks/post-commit", "between/post-commit", "outer-hooks/post-commit"),
        *("own/check.sh", "apart/hooks/post-checkout", "bare/hooks/post-receive"),
        *("apart/config.settings", ".git/hooks/post-commit", "planted/hooks/fsmonitor"),
    ]
    plant = (
        "import os\n"
        "for top in ('planted', '.'):\n"
        "    try:\n"
        "        for name in ('objects', 'refs'): os.makedirs(f'{top}/{name}', exist_ok=True)\n"
        "        open(f'{top}/config', 'w').write(SETTINGS)\n"
        "        open(f'{top}/HEAD', 'w').write('ref: refs/heads/main')\n"
        "    except OSError: pass\n"
        "try:\n"
        "    os.unlink('between'); os.mkdir('evil'); os.symlink('evil', 'between')\n"
        "    write('evil/post-commit', SCRIPT)\n"
        "except OSError as error: print(error)\n"
    )
    async with opened(way, "--mount", f"{project.root / room}:rw") as notebook:
        payload = host.payload(paths).replace(
            repr(str(project.root)), repr(str(project.root / room))
        )
        await notebook.agent.run(payload + plant, session=notebook.session)
        told = (await notebook.agent.call("info")).data["mounts"][0]
    host.own()
    host.works()
    host.works(room)
    host.git("status", check=False, cwd="room/planted")
    host.git("status", check=False, cwd="room/bare")
    assert not host.marker.exists(), told


@some
async def test_settings_that_change_while_code_runs_are_asked_about_again(
    way: str, project: Project
) -> None:
    host = Host(project)
    shutil.rmtree(project.root / ".git")
    shutil.rmtree(project.root / "plain")
    begun(host)
    env = {"GIT_CONFIG_GLOBAL": str(host.home / ".gitconfig")}
    async with opened(way, "--mount", f"{project.root}:rw", env=env) as notebook:
        for setting in (
            ["core.hooksPath", "later-hooks"],
            ["--global", "core.fsmonitor", "./mon.sh"],
        ):
            host.git("config", *setting)
        code = host.payload(["later-hooks/post-commit", "mon.sh"])
        with anyio.fail_after(PATIENCE_S):
            told = ""
            while not ("later-hooks (now" in told and "mon.sh (now" in told):
                await notebook.agent.run(code, session=notebook.session)
                told = (await notebook.agent.call("info")).data["mounts"][0]
    host.git("config", "--global", "--unset", "core.fsmonitor")
    host.works()
    assert not host.marker.exists(), told


@some
async def test_rights_to_the_folder_stay_and_what_agents_obey_is_told(
    way: str, project: Project
) -> None:
    project.write("AGENTS.md", "be good")
    project.own()
    mode = project.root.stat().st_mode
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        answer = await notebook.agent.run(
            f"import os, subprocess\nos.chdir({str(project.root)!r})\n"
            "for _ in range(100): os.chmod('.', 0o777)\n"
            "subprocess.run(['chmod', 'a+rwx', '.'])\n"
            "open('AGENTS.md', 'w').write('be evil')\n"
            "os.makedirs('.github/workflows'); open('.github/workflows/x.yml', 'w').write('x')",
            session=notebook.session,
        )
        assert answer.status == "ok", answer.text
        with anyio.fail_after(PATIENCE_S):
            while project.root.stat().st_mode != mode:
                await notebook.agent.run("1", session=notebook.session)
        with anyio.fail_after(PATIENCE_S):
            told = answer.text
            while not ("AGENTS.md" in told and ".github" in told):
                told += (await notebook.agent.run("1", session=notebook.session)).text


OBEYED = {
    "held": "H = open(NAME, 'a'); H.write('evil'); H.flush()",
    "shorter": "os.truncate(NAME, 1)",
    "other-name": "os.link(NAME, 'x'); open('x', 'a').write('evil')",
    "link": "os.unlink(NAME); os.symlink('data', NAME)",
    "hard-link": "os.unlink(NAME); os.link('data', NAME)",
    "removed": "os.unlink(NAME)",
    "folder-away": "os.rename('../folder-away', '../moved')",
    "new-folder": "os.mkdir('z'); open('z/q', 'w').close(); os.rename('z/q', 'z/' + NAME)",
    "goal": "open('data', 'a').write('evil')",
    "goal-replaced": "os.rename('other', 'data')",
}
"""Ways to change what agents obey, each in a folder of its own; in two a link leads to the data."""


@pytest.mark.parametrize("later", [pytest.param(False, marks=pytest.mark.full), True])
@some
async def test_what_agents_obey_is_told_however_it_is_changed(
    way: str, later: bool, project: Project
) -> None:
    """Also of what a program of the host has saved since; what the host changes is not told."""
    name = "CLAUDE.md"

    def write() -> None:
        for folder in (*OBEYED, "of-the-host", "moved-by-the-host"):
            for each in ("data", "other", *(() if folder.startswith("goal") else (name,))):
                project.write(f"{folder}/{each}", "be good")
            if folder.startswith("goal"):
                (project.root / folder / name).symlink_to("data")
        project.own()

    if not later:
        write()
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        agent, session = notebook.agent, notebook.session
        if later:
            write()
        with anyio.fail_after(PATIENCE_S):
            while (await agent.call("list_sessions")).data["sessions"][-1]["idle_s"] < 1:
                pass
        top = str(project.root)
        told = ""
        for folder, code in OBEYED.items():
            place = f"import os\nNAME = {name!r}\nos.chdir({top + '/' + folder!r})\n"
            told += (await agent.run(f"{place}{code}", session=session)).text
        wanted = {f"{folder}/{'data' if 'goal' in folder else name}" for folder in OBEYED}
        wanted -= {f"{folder}/{name}" for folder in ("new-folder", "folder-away")}
        wanted |= {f"new-folder/z/{name}", "folder-away"}
        with anyio.fail_after(PATIENCE_S):
            while left := {each for each in wanted if f"{each} was changed" not in told}:
                told += (await agent.run("1", session=session)).text
        assert not left
        if not way.startswith("root"):
            return
        begun, done = project.root / "begun", project.root / "done"
        wait = f"while not os.path.exists({str(done)!r}): time.sleep(0.01)\ntime.sleep(0.5)"
        code = f"import time\nopen({str(begun)!r}, 'w').close()\n{wait}"
        answers = []

        async def run() -> None:
            answers.append(await agent.run(code, session=session))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not begun.exists():
                await anyio.sleep(0.01)
            own = project.root / "of-the-host" / name
            with own.open("a") as file:
                file.write("as the user says")
                file.flush()
                os.truncate(own, 5)
            own.unlink()
            project.write(f"of-the-host/{name}", "be better")
            project.write("of-the-host/deeper/AGENTS.md", "be better")
            (project.root / "moved-by-the-host").rename(project.root / "of-the-user")
            done.touch()
        assert "obey" not in answers[0].text


REPOSITORY = """
import os
os.chdir(f"{ROOT}/{FOLDER}")
for name in ("objects", "refs", "files"):
    os.makedirs(name, exist_ok=True)
for name, text in FILES.items():
    with open(name, "w") as file:
        file.write(text)
"""


@some
async def test_no_folder_becomes_a_repository_by_code_or_file_tools(
    way: str, project: Project
) -> None:
    """The host or code made the folder, before or after the start; a later session tries, too."""
    host = Host(project)
    project.write("holds/.envrc", "x")
    project.own()
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        agent = notebook.agent
        for name in ("made", "tools"):
            (project.root / name).mkdir()
        project.own()
        with anyio.fail_after(PATIENCE_S):
            while (await agent.call("list_sessions")).data["sessions"][-1]["idle_s"] < 1:
                pass

        def files(folder: str) -> dict[str, str]:
            settings = (
                "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"
                f"\tworktree = {project.root}/{folder}/files\n"
                f'\tfsmonitor = "touch {host.marker}; false"\n'
            )
            return {"files/a": "a", "config": settings, "HEAD": "ref: refs/heads/main\n"}

        for turn in range(3):
            session = (await agent.call("create_session")).data["session"]
            for folder in ("holds", "made"):
                place = f"ROOT, FOLDER = {str(project.root)!r}, {folder!r}\n"
                code = f"{place}FILES = {files(folder)!r}\n{REPOSITORY}"
                told = (await agent.run(code, session=session)).text
                with anyio.fail_after(PATIENCE_S):
                    while f"{folder}/HEAD has appeared" not in told:
                        told += (await agent.run("1", session=session)).text
                host.git("status", check=False, cwd=folder)
                assert not host.marker.exists(), (turn, folder)
        for name in ("objects/x", "refs/x"):
            await agent.call("write_file", path=f"{project.root}/tools/{name}", content="")
        made = {name: f"{project.root}/tools/{name}" for name in files("tools")}
        for name in ("files/a", "config"):
            await agent.call("write_file", path=made[name], content=files("tools")[name])
        await agent.refused("write_file", path=made["HEAD"], content=files("tools")["HEAD"])
        await agent.refused("write_file", path=f"{project.root}/tools/pyvenv.cfg", content="")
    host.git("status", check=False, cwd="tools")
    assert not host.marker.exists()


PLANT_ON = """
import os, threading, time
def plant():
    while time.sleep(0.005) is None:
        try:
            with open(f"{ROOT}/.mcp.json", "x") as file:
                file.write("{}")
        except OSError:
            pass
"""


@some
async def test_who_plants_over_and_over_is_ended_beside_other_sessions(
    way: str, project: Project
) -> None:
    """A root server knows whose kernel it is, also once the cell has ended; else all are ended."""
    root = way.startswith("root")
    start = "threading.Thread(target=plant, daemon=True).start()" if root else "plant()"
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        agent = notebook.agent
        other = (await agent.call("create_session")).data["session"]
        await agent.run("kept = 41", session=other)
        answers = {}

        async def run(name: str, code: str, session: str) -> None:
            answers[name] = await agent.run(code, session=session)

        going = str(project.root / "going")
        wait = f"import os, time\nwhile os.path.exists({going!r}): time.sleep(0.1)"
        project.write("going", "")
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "other", wait, other)
                code = f"ROOT = {str(project.root)!r}\n{PLANT_ON}{start}"
                await run("planter", code, notebook.session)
                told = answers["planter"].text
                while "appeared in a mounted folder" not in told:
                    told = (await agent.run("1", session=notebook.session)).text
                (project.root / "going").unlink()
        assert len(list(project.root.glob(".mcp.json.set-aside-*"))) < 60, told
        if root:
            assert answers["other"].status == "ok"
            assert (await agent.run("kept + 1", session=other)).text.startswith("42")
        else:
            assert "Which of 2 sessions" in answers["other"].text


BURST = """
import os
os.chdir(ROOT)
for number in range(20_000):
    os.mkdir(f"z{number}")
for number in range(10_000, 10_006):
    top = f"z{number}/a/b"
    for path in (".claude/settings.json", ".mcp.json", ".git/hooks/post-commit"):
        try:
            os.makedirs(os.path.dirname(f"{top}/{path}"), exist_ok=True)
            open(f"{top}/{path}", "w").write("{}")
        except OSError:
            pass  # it has been set aside meanwhile
"""
HIDDEN = (".claude", ".mcp.json", ".git")


@pytest.mark.ways
@some
async def test_a_burst_of_new_folders_hides_nothing_that_code_plants(
    way: str, project: Project
) -> None:
    """It is more than Linux keeps, and lasts longer to look through than the cell runs."""
    (project.root / "room").mkdir()
    project.own()
    async with opened(way, "--mount", f"{project.root / 'room'}:rw") as notebook:
        code = f"ROOT = {str(project.root / 'room')!r}\n{BURST}"
        answer = await notebook.agent.run(code, session=notebook.session)
        assert answer.status == "ok", answer.text
        places = [project.root / f"room/z{number}/a/b" for number in range(10_000, 10_006)]
        with anyio.fail_after(PATIENCE_S):
            while left := [
                path for top in places for path in map(top.joinpath, HIDDEN) if path.exists()
            ]:
                await anyio.sleep(0.2)
        assert not left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
