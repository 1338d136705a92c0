"""The replacements of pip and uv in the processes of a session."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kernel_specs.restricted.config import InstallationError, refuse_installation
from kernel_specs.restricted.confine import SHIMS
from kernel_specs.shims.pip import ADVICE

PROGRAMS = os.pathsep.join((f"{SHIMS}/bin", str(Path(sys.executable).parent), "/usr/bin", "/bin"))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": PROGRAMS, "PYTHONPATH": str(SHIMS)}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ("pip", "install", "polars"),
        ("pip3", "install", "-q", "polars"),
        ("uv", "pip", "install", "polars"),
        ("uv", "add", "polars"),
        ("python3", "-m", "pip", "uninstall", "polars"),
        ("pip",),
    ],
)
def test_a_process_that_wants_to_install_is_told_of_the_tool(command: tuple[str, ...]) -> None:
    done = run(*command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{ADVICE}\n")
    assert "tool `install`" in ADVICE


def test_who_asks_for_the_version_is_not_told_of_installations() -> None:
    for command in (("pip", "--version"), ("python3", "-m", "pip", "-V"), ("uv", "--version")):
        done = run(*command)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no pip" in done.stdout


def test_packages_are_listed_and_shown_as_pip_does() -> None:
    assert f"pytest=={version('pytest')}\n" in run("pip", "freeze").stdout
    assert ["pytest", version("pytest")] in map(str.split, run("pip", "list").stdout.splitlines())
    assert f"Version: {version('pytest')}\n" in run("uv", "pip", "show", "pytest").stdout
    missing = run("pip", "show", "kmtest-none")
    assert missing.returncode == 1
    assert "not found: kmtest-none" in missing.stderr


@pytest.mark.parametrize(
    "command",
    [
        "pip install polars",
        "/usr/bin/python3.12 -m pip install -q polars",
        "cd x; uv add polars",
        "true && sudo pip3 install polars",
        "conda install -y polars",
        "pip uninstall -y polars",
        "python -m pip --quiet download polars",
        "uv sync",
    ],
)
def test_a_shell_command_that_installs_is_an_error(command: str) -> None:
    with pytest.raises(InstallationError, match="tool `install`"):
        refuse_installation(command)


@pytest.mark.parametrize(
    "command",
    [
        "pip list",
        "pip freeze | grep polars",
        "python -m pip show install-x",
        "uv pip -q list",
        "conda list",
        "pip --version",
        "echo pip install x",
        "grep 'pip install' notes",
        "which pip",
        "pip-audit x",
    ],
)
def test_any_other_command_is_not(command: str) -> None:
    refuse_installation(command)
