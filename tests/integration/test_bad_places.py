"""Machines that are not ours: no home folder, folders and ports that cannot be had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.unprivileged import as_ordinary_user

PATIENCE_S = 300
OUTSIDE = ("-u", "XDG_CACHE_HOME")


def run(
    *words: str, cwd: Path | None = None, ordinary: bool = False, home: str | None = "as it is"
) -> tuple[int, str]:
    """The exit code of a command and what it says."""
    argv = [sys.executable, "-m", "kernel_mcp", *words]
    if home != "as it is":
        given = ["-u", "HOME"] if home is None else [f"HOME={home}"]
        argv = ["env", *OUTSIDE, *given, *argv]
    done = subprocess.run(
        as_ordinary_user(argv) if ordinary else argv,
        input="",  # as of a client that has gone
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done.returncode, done.stderr + done.stdout


@pytest.fixture
def busy() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.ways
@pytest.mark.parametrize("home", ["/", pytest.param(None, marks=pytest.mark.full)])
def test_who_has_no_home_folder_has_a_sandbox_all_the_same(home: str | None) -> None:
    code, said = run("doctor", "--sandbox", "bwrap", "--no-template", ordinary=True, home=home)
    assert code == 0, said
    assert "this user has no home folder to write to: environments of kernels are kept in" in said
    assert said.splitlines()[-1] == "A server with these flags uses bwrap, which holds."


@pytest.mark.parametrize("words", [(), ("doctor",), ("sessions", "list"), ("--http", "[::1]:0")])
def test_a_working_folder_that_was_removed_is_one_sentence(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "kernel_mcp", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=gone,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    told = [line for line in done.stderr.splitlines() if "trying kernels" not in line]
    assert (done.returncode, len(told)) == (2, 1), done.stderr
    assert "the folder that kernel-mcp was started in has been removed" in told[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--http", "{busy}"), "nothing can listen there (Address already in use)"),
        (("--http", "127.0.0.1:0", "--tokens", "/no/tokens"), "there is no such file"),
        (("--http", "127.0.0.1:0", "--tokens", "/tmp"), "--tokens /tmp: Is a directory"),
        (("--mount", "/no/folder"), "--mount /no/folder: there is no such folder"),
        (("--requirements", "/no/file"), "--requirements: there is no /no/file"),
        (("--state-dir", "/proc/x"), "cannot keep the server's files in /proc/x"),
        (("--workspace", "/proc/x"), "the workspaces of sessions cannot be kept in /proc/x"),
    ],
)
def test_what_a_server_cannot_have_is_one_sentence_without_a_traceback(
    words: tuple[str, ...], told: str, busy: str
) -> None:
    code, said = run(*(word.format(busy=busy) for word in words))
    assert code == 1, said
    lines = [line for line in said.splitlines() if line.startswith("kernel-mcp: ")]
    assert len(lines) == 1, said
    assert told in lines[0]
    assert "Traceback" not in said, said


@pytest.mark.parametrize("words", [(), ("doctor",)], ids=["server", "doctor"])
@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("ulimit -n 20", "it has no file descriptors left (ulimit -n is 20)"),
        ("ulimit -f 0", "No usable temporary directory found in"),
    ],
)
def test_what_ends_a_start_is_told_to_who_runs_it(
    words: tuple[str, ...], limit: str, told: str
) -> None:
    """No advice for agents, who have sessions to close, and no call for a report of a defect."""
    script = f'{limit} && exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "sh", sys.executable, "-B", "-m", "kernel_mcp", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1, done.stdout
    assert told in done.stdout.splitlines()[-1]
    assert "un it again" in done.stdout
    assert not [word for word in ("close_session", "reset", "defect") if word in done.stdout]


@pytest.mark.ways
def test_doctor_says_which_limit_is_low() -> None:
    script = 'ulimit -n 200 && exec "$@"'
    argv = [sys.executable, "-m", "kernel_mcp", "doctor", "--sandbox", "bwrap", "--no-template"]
    done = subprocess.run(
        ["bash", "-c", script, "sh", *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "the limit of open files (ulimit -n) is 200" in done.stdout
    assert done.stdout.splitlines()[-1] == "A server with these flags uses bwrap, which holds."
