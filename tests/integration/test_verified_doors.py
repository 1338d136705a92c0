"""Replays reach nothing that is not theirs, and code of cells cannot make one lie."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.integration.agent import Agent, Answer, agent
from tests.integration.servers import Servers
from tests.integration.test_network_door import Pages
from tests.integration.test_tool_servers import JOIN, listed

pytestmark = pytest.mark.anyio


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


async def verdict(notebook: Agent, **arguments: Any) -> tuple[str, str, str]:
    """Verify, and return verdict, cause and text."""
    answer: Answer = await notebook.call("verify", wait=300, **arguments)
    meta = answer.result.meta or {}
    assert "kernel-mcp/verification" in meta, answer.text
    found = meta["kernel-mcp/verification"]
    return found["verdict"], found["cause"], answer.text


async def test_no_replay_has_the_network(port: int) -> None:
    async with agent("--network", f"127.0.0.1:{port}", "--allow", "*") as notebook:
        code = f"import urllib.request as u\nu.urlopen('http://127.0.0.1:{port}').read()[:4]"
        assert "b'page'" in (await notebook.run(code)).text
        found, cause, text = await verdict(notebook)
    assert (found, cause) == ("failed", "network"), text
    assert "Not repeated: In[1] needs the network" in text


async def test_no_replay_writes_to_a_mount(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("1")
    place = str(tmp_path / "data")
    async with agent("--mount", f"{place}:rw", "--allow", "*") as notebook:
        await notebook.run(f"open('{place}/a.txt').read()")
        found, cause, text = await verdict(notebook)
        assert found == "reproduced", text
        await notebook.run(f"open('{place}/b.txt', 'x').write('b')")
        (tmp_path / "data" / "b.txt").unlink()
        found, cause, text = await verdict(notebook)
    assert (found, cause) == ("failed", "read_only"), text
    assert not (tmp_path / "data" / "b.txt").exists()


async def test_no_replay_calls_tools(servers: Servers, tmp_path: Path) -> None:
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.list_*")
    async with servers.agent(*flags) as notebook:
        await notebook.run(JOIN)
        calls = len((tmp_path / "log").read_text())
        found, cause, text = await verdict(notebook)
        assert (found, cause) == ("failed", "tools"), text
        assert len((tmp_path / "log").read_text()) == calls


async def test_the_session_and_its_files_stay_as_they_are(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("n = 1\nopen('n.txt', 'w').write('first')")
        await notebook.run("n += 1\nopen('n.txt', 'a').write('again')\nn")
        assert (await verdict(notebook))[0] == "reproduced"
        assert "2" in (await notebook.run("n")).text
        read = await notebook.call("read_file", path="n.txt")
        assert read.text == "firstagain"
        listing = await notebook.call("list_sessions")
        assert listing.text.count('"session"') <= 2, listing.text


async def test_two_calls_that_follow_it_get_the_same_answer(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("x = 41")
        await notebook.run("x + 1")
        said: list[str] = []

        async def follow() -> None:
            said.append((await notebook.call("verify")).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            tasks.start_soon(follow)
        assert [text for text in said if "Reproduced: 2 of 2 cells" in text] == said


async def test_it_goes_on_in_the_background_and_interrupt_stops_it(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("import time")
        await notebook.run("time.sleep(1.5)\n'slept'")
        answer = await notebook.call("verify", wait=0)
        assert "Call verify again to follow; interrupt stops." in answer.text
        refused = await notebook.refused("verify", path="other.ipynb")
        assert "are being verified" in refused
        assert "is being stopped" in (await notebook.call("interrupt")).text
        with anyio.fail_after(60):
            assert "was stopped" in await notebook.refused("verify", wait=50)
        assert (await verdict(notebook))[0] == "reproduced"


CLEARS = """ip = get_ipython()
for name in list(ip.events.callbacks):
    ip.events.callbacks[name].clear()
import sys
sys.setprofile(None); sys.settrace(None)
"""
FORGES = """import gc
k = get_ipython().kernel
k._recorder._files = {'in.csv': ['r', '0' * 16], 'x' * 10**6: ['r', 'y']}
k._recorder._on = False
k._recorder.end = lambda: {'files': [[1, 2], 'a', None, ['a', 'r']], 'time': 'never', 'pid': [],
                           'random': 3, 'fresh': True, 'seed': {'a': 1}}
"""


async def test_a_cell_that_clears_hooks_is_still_recorded(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="in.csv", content="1")
        await notebook.run(CLEARS)
        await notebook.run("open('in.csv').read()")
        await notebook.call("write_file", path="in.csv", content="2")
        found, cause, text = await verdict(notebook)
    assert (found, cause) == ("differs", "file_changed"), text


async def test_a_forged_record_decides_no_verdict(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 4")
        await notebook.run(FORGES)
        await notebook.run("import os\nint.from_bytes(os.urandom(4), 'big')")
        await notebook.run("x")
        found, cause, text = await verdict(notebook)
    assert (found, cause) == ("differs", "entropy"), text


async def test_a_cell_that_differs_by_its_place_is_found(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("import sys, os\nhash('a')\n'original' if hash('a') else 0")
        await notebook.run(
            "seen = os.listdir.__module__ if hasattr(os.listdir, '__module__') else ''\nseen"
        )
        found, _, text = await verdict(notebook)
    assert found in ("differs", "fragile"), text


async def test_a_cell_that_hangs_in_replays_is_stopped_and_said(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run(
            "import os, time\nif type(os.listdir).__name__ == 'function':\n    time.sleep(3600)"
        )
        found, cause, text = await verdict(notebook)
    assert (found, cause) == ("failed", "time_limit"), text


async def test_cells_that_were_cut_short_are_not_repeated(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1\nx")
        await notebook.call("execute", code="while True: pass", timeout=1)
        found, _, text = await verdict(notebook)
    assert found == "reproduced", text
    assert "Left out: In[2] (not repeated: it ended as timeout)" in text
    assert "1 of 2 cells" in text
