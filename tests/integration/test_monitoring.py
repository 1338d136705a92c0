"""Files for operators' own programs, tried with them: logrotate, Prometheus, promtool."""

from __future__ import annotations

import getpass
import grp
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import lacking
from tests.integration.httpclient import http_agent
from tests.integration.httpserver import ROOT
from tests.integration.test_http_operations import Operated, operating

pytestmark = [pytest.mark.anyio, pytest.mark.full]

MONITORING = ROOT / "packaging/monitoring"


def program(name: str) -> str:
    """The path of an operator's program."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    return found or lacking("containers", f"needs {name}")


def rotate(operated: Operated, folder: Path) -> None:
    """Rotate the audit trail as the file for logrotate says, with the names of this machine."""
    text = (MONITORING / "logrotate").read_text()
    trail = "/var/lib/kernel-mcp/audit.jsonl"
    assert trail in text
    own = f"su {getpass.getuser()} {grp.getgrgid(os.getgid()).gr_name}"
    text = text.replace(trail, str(operated.folder / "audit"))
    text = text.replace("su kernel-mcp kernel-mcp", own)
    (folder / "rotation").write_text(text)
    (folder / "rotation").chmod(0o644)
    words = [program("logrotate"), "--force", "--state", str(folder / "state"), "rotation"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_rotation_needs_no_signal_and_a_signal_ends_nothing(tmp_path: Path) -> None:
    with operating() as operated:
        await operated.ready()
        async with http_agent(operated.server) as notebook:
            await notebook.run("1")
            rotate(operated, tmp_path)
            operated.server.signal(signal.SIGHUP)
            assert (await notebook.run("2")).text == "2"
        former = (operated.folder / "audit.1").read_text()
        assert (former.count('"event": "cell"'), former.count("server_start")) == (1, 1)
        assert [line["event"] for line in operated.trail].count("cell") == 1
        rotate(operated, tmp_path)
        assert (operated.folder / "audit.2.gz").exists()
