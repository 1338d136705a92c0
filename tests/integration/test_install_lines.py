"""`%pip install` and its kin in cells, and what running code hears that tries the same."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import pytest

from tests.integration.agent import Agent
from tests.integration.servers import Servers
from tests.unit.packages.wheels import wheel

pytestmark = [pytest.mark.anyio]

OPEN = ("--allow", "*")
RUNNING = """
import os, subprocess, sys
done = [
    subprocess.run([sys.executable, "-m", "pip", "install", "kmtest-good"], capture_output=True),
    subprocess.run(["pip", "install", "kmtest-good"], capture_output=True),
    subprocess.run("uv pip install kmtest-good", shell=True, capture_output=True),
]
[(each.returncode, each.stdout, b"tool `install`" in each.stderr) for each in done]
"""


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A folder with wheels that nobody else has."""
    folder = tmp_path / "links"
    for version in ("1.0", "2.0"):
        wheel(folder, "kmtest-good", version)
    wheel(folder, "kmtest-other")
    wheel(folder, "kmtest-broken", files={"kmtest_broken.py": "import kmtest_missing_part"})
    return folder


def local(links: Path, *flags: str) -> tuple[str, ...]:
    return ("--allow-install", "*", "--find-links", str(links), *flags)


async def test_a_cell_installs_and_goes_on_with_what_came(links: Path, servers: Servers) -> None:
    code = (
        "print('first')\n%pip install -q kmtest-good==1.0 \\\n    kmtest-other\n"
        "import kmtest_good, kmtest_other\nkmtest_good.__version__, 1 / 0"
    )
    async with servers.agent(*local(links)) as notebook:
        told: list[str | None] = []
        answer = await notebook.call(
            "execute", code=code, on_progress=lambda _value, _total, text: told.append(text)
        )
        assert answer.text.startswith(
            "first\nInstalled kmtest-good 1.0: import kmtest_good works in this session. "
            "Installed kmtest-other 1.0: import kmtest_other works in this session.\n"
        )
        assert "line 5" in answer.text
        assert any("Resolved" in (text or "") for text in told)
        again = await notebook.run("kept = !pip install -U kmtest-good\nkept[0]")
        assert "kmtest-good 1.0 was there already" in again.text
        assert "give its version" in again.text
        assert (await notebook.run("%pip install json\n7")).text.endswith("\n7")
        await notebook.call("export_notebook")
        assert (await notebook.call("check_syntax", code=code)).data["valid"]


async def test_what_cannot_be_installed_ends_the_cell_before_it_begins(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links, *OPEN)) as notebook:
        for line, words in (
            ("!pip install kmtest-absent", "no package 'kmtest-absent'"),
            ("%pip install kmtest-good kmtest-broken", "No module named 'kmtest_missing_part'"),
            ("!pip install -r needed.txt", "read that file"),
        ):
            answer = await notebook.call("execute", code=f"ran = True\n{line}")
            assert answer.failed
            assert (answer.status, answer.cell["phase"]) == ("error", "install")
            assert words in answer.text
            assert "No line of this cell was run." in answer.text
        assert "NameError" in (await notebook.call("execute", code="ran")).text
        listed = (await notebook.call("list_packages")).data["packages"]
        assert [each["name"] for each in listed if each["source"] == "installed"] == []


async def test_where_nothing_may_be_installed_the_operators_flag_is_told(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.call("execute", code="ran = 1\n%pip install rich")
        assert "--allow-install rich" in answer.text
        assert answer.status == "error"
        report = (await notebook.call("check_syntax", code="%pip install rich\nx = 1")).data
        assert not report["valid"]
        assert "--allow-install rich" in report["summary"]


async def test_running_code_is_told_of_the_tool(links: Path, servers: Servers) -> None:
    async with servers.agent(*local(links, *OPEN)) as notebook:
        answer = await notebook.run(RUNNING)
        assert answer.text == str([(1, b"", True)] * 3)
        for code in (
            "for name in ['kmtest-good']:\n    !pip install {name}",
            "for name in ['kmtest-good']:\n    %pip install {name}",
            "if True:\n    found = !pip install kmtest-good",
            "%%bash\npip install kmtest-good",
            "get_ipython().system('python -m pip install kmtest-good')",
        ):
            answer = await notebook.call("execute", code=code)
            assert answer.status == "error", code
            assert "tool `install`" in answer.text
            assert "NAME" not in answer.text
        assert "ipykernel" in (await notebook.run("%pip list")).text
        assert "ipykernel" in (await notebook.run("!pip freeze | grep ipykernel")).text


@pytest.mark.ways
async def test_a_script_may_install_too(links: Path, servers: Servers) -> None:
    async with servers.agent(*local(links)) as notebook:
        script = "!pip install kmtest-good\nimport kmtest_good\nprint(kmtest_good.__version__)"
        answer = await notebook.call("run_script", script=script)
        assert answer.text.split("\n")[:2][-1] == "2.0"


@pytest.mark.ways
async def test_a_cell_that_installs_can_be_stopped_while_others_wait(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        url = f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple"
        async with servers.agent("--allow-install", "*", "--index-url", url) as notebook:
            with anyio.fail_after(120):
                await notebook.run("x = 41")
                answer = await notebook.run("x = 0\n%pip install rich", wait=0)
                assert answer.status == "running"
                assert "its packages are being installed" in answer.text
                queued = await notebook.run("x += 1", wait=0)
                assert queued.status == "queued"
                await anyio.wait_readable(silent_index)
                stopped = await notebook.call("interrupt")
                assert stopped.status == "interrupted"
                assert "no line of it was run" in stopped.text
                assert (await notebook.run("x")).text.startswith("42")
                await cancelled(notebook, silent_index)
                assert (await notebook.run("x")).text.startswith("42")


async def cancelled(notebook: Agent, index: socket.socket) -> None:
    """Cancel the call of a cell while it installs."""
    index.accept()[0].close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: notebook.call("execute", code="x = 0\n!pip install rich"))
        await anyio.wait_readable(index)
        tasks.cancel_scope.cancel()
