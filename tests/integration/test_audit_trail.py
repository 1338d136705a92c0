"""The audit log of a real server about a session."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent import agent

pytestmark = [pytest.mark.anyio]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_trail_of_a_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    busy = "n = 0\nwhile n < 3_000_000: n += 1\nprint('done')"
    flags = ("--audit-log", str(path), "--profile", "guarded", "--allow", "os")
    async with agent(*flags) as notebook:
        assert (await notebook.call("info")).data["audit_log"] == "on"
        await notebook.run(busy)
        await notebook.run("import subprocess")
        await notebook.call("write_file", path="in/a.txt", content="hello")
        await notebook.refused("write_file", path="../b.txt", content="hello")
        await notebook.call("export_notebook")
        await notebook.run("import os; os._exit(3)")
        await notebook.call("close_session")
    found = lines(path)
    assert [line["event"] for line in found] == [
        *("server_start", "session_start", "cell", "refusal", "cell", "file", "file"),
        *("cell", "kill", "session_end", "server_end"),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    of_session = found[1:-1]
    assert len({line["session"] for line in of_session}) == 1
    assert {line["who"] for line in of_session} == {"local"}
    start, _, cell, refusal, refused, file, notebook_file, _, kill, end, _ = found
    assert (start["sandbox"], start["allow"]) == ("bwrap", ["os"])
    assert cell["code_sha256"] == hashlib.sha256(busy.encode()).hexdigest()
    assert (cell["status"], cell["output_chars"]) == ("ok", 5)
    assert 0 < cell["cpu_s"] <= cell["duration_s"] * 8
    assert cell["memory_bytes"] > 0
    assert any("subprocess" in reason for reason in refusal["reasons"])
    assert (refused["status"], refused["cell"]) == ("error", 2)
    assert (file["path"], file["size"]) == ("in/a.txt", 5)
    assert file["sha256"] == hashlib.sha256(b"hello").hexdigest()
    assert notebook_file["path"] == "notebook.ipynb"
    assert (kill["cell"], "code 3" in kill["cause"]) == (3, True)
    assert end["cells"] == 3


@pytest.mark.ways
async def test_the_trail_names_what_checkpoints_are_used_for(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    flags = ("--audit-log", str(path), "--allow", "*", "--warm", "0")
    persist = ("--persist", "1G,1d", "--state-dir", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)
    async with agent(*flags, *persist, pauses=False) as notebook:
        kept = (await notebook.call("create_session", name="kept")).data["session"]
        await notebook.run("x = 1", session=kept)
        await notebook.run("x = 2", session=kept, checkpoint=True)
        await notebook.run("import os; os.kill(os.getpid(), 9)", session=kept)
        await notebook.run("y = 3", session=kept, checkpoint=True)
        assert not (await notebook.call("undo", session=kept)).failed
        begun = await notebook.call("branch", session=kept, n=2)
        assert not begun.failed, begun.text
        first = [line for line in lines(path) if line["event"] == "branch"][-1]["branches"]
        assert len(first) == 2
        assert not (await notebook.call("adopt", branch=first[0])).failed
    found = [line for line in lines(path) if line.get("session") == kept]
    told = {line["event"]: line for line in found}
    assert told["checkpoint"]["cell"] >= 1
    assert told["revival"]["cell"] == 1
    assert told["kill"]["cell"] == 3
    assert told["undo"]["cells"]
    assert told["branch"]["branches"] == first
    assert told["adopt"]["branch"] == first[0]
    async with agent(*flags, *persist) as notebook:
        again = await notebook.call("create_session", name="kept", resume=True)
        assert not again.failed, again.text
        assert (await notebook.run("print(x)", session=again.data["session"])).text.startswith("1")
    (resumed,) = [line for line in lines(path) if line["event"] == "resume"]
    assert resumed["session"] == again.data["session"]
    assert resumed["saved"]
    assert resumed["cells"] >= 1
