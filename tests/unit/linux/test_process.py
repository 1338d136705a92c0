"""Programs that are found and started, and the signals that a process inherits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_mcp.linux.process import (
    find_program,
    foreign_environment,
    import_nothing_from,
    own_module,
    own_places,
)


def planted(folder: Path, name: str) -> Path:
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("entry", ["", ".", "bin", "./bin"])
def test_programs_of_the_current_folder_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    (project / "bin").mkdir(parents=True)
    other.mkdir()
    monkeypatch.chdir(project)
    planted(project, "tool")
    planted(project / "bin", "tool")
    monkeypatch.setenv("PATH", entry)
    assert find_program("tool") is None
    monkeypatch.setenv("PATH", os.pathsep.join([entry, str(other)]))
    expected = planted(other, "tool")
    assert find_program("tool") == str(expected)


def test_programs_of_a_project_are_not_found_by_its_whole_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "bin", elsewhere):
        folder.mkdir(parents=True)
    planted(project / "bin", "tool")
    (tmp_path / "link").symlink_to(project / "bin")
    (project / "out").symlink_to(elsewhere)
    expected = planted(elsewhere, "tool")
    monkeypatch.chdir(project)
    entries = [project / "bin", tmp_path / "link", project / "out", f"{elsewhere}/../project/bin"]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, [*entries, elsewhere])))
    assert find_program("tool") == str(expected)
    assert foreign_environment()["PATH"] == str(elsewhere)
    # nobody's project: the home folder and those above it
    for home in (project, project / "below"):
        monkeypatch.setenv("HOME", str(home))
        assert find_program("tool") == str(project / "bin" / "tool")


def test_programs_of_virtual_environments_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active one of a project, in a folder of which the server starts."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "project/.venv"
    below = tmp_path / "project/below"
    for folder in (elsewhere, root / "bin", below):
        folder.mkdir(parents=True)
    (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    planted(root / "bin", "tool")
    (tmp_path / "link").symlink_to(root / "bin")
    expected = planted(elsewhere, "tool")
    monkeypatch.chdir(below)
    entries = ["/", root / "bin", tmp_path / "link", elsewhere]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, entries)))
    assert find_program("tool") == str(expected)
    assert foreign_environment()["PATH"] == f"/{os.pathsep}{elsewhere}"


@pytest.mark.parametrize("module", ["kernel_mcp", "kernel_mcp.commands.doctor.trials"])
def test_modules_of_the_current_folder_do_not_pass_for_this_project(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / "kernel_mcp").mkdir()
    for name in ("kernel_mcp/__init__", "kernel_mcp/__main__", "anyio", "json", "runpy", "mcp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')\n")
    done = subprocess.run(
        own_module(module, "env", "list", "--cache-dir", str(tmp_path / "c")),
        input="{}",
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "hijacked" not in done.stderr
    said = "0 environments" if module == "kernel_mcp" else "KeyError"
    assert said in done.stdout + done.stderr


def test_a_folder_on_the_path_of_modules_stays_there(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import sys; print(sys.argv[1:])\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(tmp_path)])}
    done = subprocess.run(
        own_module("beside", "word"), env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['word']\n"
    assert sys.executable == own_module("beside")[0]


CODE = """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from kernel_mcp.linux.process import plain_signals
plain_signals()
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
left = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
print(sorted(signal.Signals(number).name for number in left))
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_no_signal_stays_blocked_and_none_ignored_that_ends_a_program() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split("'")[1::2] == ["SIGPIPE", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGXFSZ"]
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_are_overwritten_where_other_users_read_them() -> None:
    code = (
        "import sys; from pathlib import Path; from kernel_mcp.linux import process\n"
        "process.overwrite_arguments([('A=', 'hunter2')])\n"
        "print(Path('/proc/self/cmdline').read_bytes().split(b'\\0')[3:], sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "--env", "A=hunter2", "B=x"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[b'--env', b'A=*******', b'B=x', b''] " + repr(words[3:])


TAKEN = """
import os, pathlib, subprocess, sys
from kernel_mcp.linux.process import take_variable
assert take_variable("TOKEN") == "hunter2-hunter2", "value"
assert take_variable("TOKEN") is None
assert os.environ["XTOKEN"] == "hunter3"
for environ in (pathlib.Path("/proc/self/environ").read_bytes(), subprocess.check_output("env")):
    assert b"hunter2" not in environ
    assert b"TOKEN=hunter3" in environ
"""


@pytest.mark.parametrize("first", [True, False])
def test_a_variable_that_was_taken_is_in_no_environment_any_more(first: bool) -> None:
    own = {"TOKEN": "hunter2-hunter2"}
    others = {**os.environ, "XTOKEN": "hunter3"}
    environ = {**own, **others} if first else {**others, **own}
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_modules_come_from_nowhere_that_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing, other = str(tmp_path / "src"), str(tmp_path.with_name("other"))
    libraries = [each for each in sys.path if each.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [changing, *sys.path, other])
    before = list(sys.path)
    # a mount that holds the environment of this server does not cost it its packages
    import_nothing_from([tmp_path, Path(sys.prefix).parent])
    assert {*before} - {*sys.path} <= {changing, str(Path(sys.prefix).parent)}
    assert changing not in sys.path
    assert {other, *libraries} <= {*sys.path}
    monkeypatch.setenv("PATH", f"{tmp_path}:relative:")
    own = {Path(sys.prefix), Path(sys.base_prefix).resolve(), tmp_path.resolve()}
    assert own <= {*own_places()}
    assert Path("relative").resolve() not in own_places()
