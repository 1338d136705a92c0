"""Servers with a sandbox chosen by name, or by what the machine has, through a real client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mcp.client import Client

from kernel_mcp.sandbox.landlock import landlock_available
from tests.integration.agent import Agent, agent, command
from tests.integration.unprivileged import as_ordinary_user

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
pytestmark = [pytest.mark.anyio]
NEEDS_LANDLOCK = pytest.mark.skipif(
    (reason := landlock_available()) is not None, reason=str(reason)
)


@pytest.fixture
def without_bubblewrap(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has everything but bubblewrap."""
    program = shutil.which("setpriv")
    if program is not None:
        (tmp_path / "setpriv").symlink_to(program)
    return {"PATH": str(tmp_path), "HOME": str(Path.home())}


@NEEDS_LANDLOCK
async def test_landlock_serves_when_it_is_named() -> None:
    async with agent("--sandbox", "landlock", "--allow", "*", "--warm", "2") as notebook:
        info = (await notebook.call("info")).data
        assert info["sandbox"] == "landlock"
        assert any("no process namespace" in gap for gap in info["sandbox_gaps"])
        await notebook.call("write_file", path="in.txt", content="here")
        assert (await notebook.run("x = open('in.txt').read(); x")).text == "'here'"
        answer = await notebook.run("import socket; socket.create_connection(('127.0.0.1', 22), 1)")
        assert answer.status == "error"
        answer = await notebook.run("open('/etc/shadow')")
        assert "Permission denied" in answer.text
        assert (await notebook.run("import os; os._exit(3)")).status == "killed"
        assert (await notebook.run("open('in.txt').read()")).text == "'here'"


@NEEDS_LANDLOCK
async def test_without_bubblewrap_the_weaker_one_is_taken_where_that_was_accepted(
    without_bubblewrap: dict[str, str],
) -> None:
    flags = ("--sandbox", "bwrap,landlock", "--warm", "0")
    async with Client(command(*flags, env=without_bubblewrap)) as client:
        notebook = Agent(client)
        assert (await notebook.call("info")).data["sandbox"] == "landlock"
        assert (await notebook.run("6 * 7")).text == "42"


def test_without_bubblewrap_a_server_refuses_and_says_what_to_do(
    without_bubblewrap: dict[str, str],
) -> None:
    start = command(env=without_bubblewrap)
    done = subprocess.run(
        [start.command, *start.args],
        env=start.env,
        cwd=start.cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "bubblewrap is not installed" in done.stderr
    assert "Install" in done.stderr
    assert ("--sandbox bwrap,landlock" in done.stderr) == (landlock_available() is None)


@NEEDS_LANDLOCK
@AS_ROOT
def test_an_ordinary_user_with_a_full_bounding_set_gets_a_weaker_sandbox_that_holds() -> None:
    script = (
        "import logging, os, sys\n"
        "from pathlib import Path\n"
        "from kernel_mcp.sandbox.select import proven_sandbox\n"
        "from kernel_mcp.sandbox.self_test import thorough_checks\n"
        "status = Path('/proc/self/status').read_text()\n"
        "assert int(status.partition('CapBnd:')[2].split()[0], 16), 'no ordinary user has this'\n"
        "os.environ['PATH'] = '/nowhere'\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "sandbox = proven_sandbox('bwrap', 'landlock')\n"
        "excused = sandbox.report().unpromised\n"
        "failed = [c for c in thorough_checks(sandbox) if not c.passed and c.name not in excused]\n"
        "print(sandbox.name, failed)\n"
    )
    done = subprocess.run(
        as_ordinary_user([sys.executable, "-c", script]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["landlock []"], done.stderr
    assert "WARNING:kernel_mcp.sandbox.select:kernels get the landlock" in done.stdout
    assert "bubblewrap is not installed" in done.stdout
