"""Cells call tools over the socket of their kernel, in every sandbox and however it was started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.landlock import LandlockSandbox
from kernel_mcp.sandbox.select import NoSandbox
from tests.integration.containers import detect
from tests.integration.landlock_kernel import Notebook, notebook
from tests.integration.template.bench import bench
from tests.unit.guest.importable.gateway import Gateway

pytestmark = [pytest.mark.anyio]

CALLS = """
import asyncio, os, warnings
import tools
warnings.simplefilter("ignore")  # of a fork beside threads
from tools import crm

print(crm.echo(a=1), tools is __import__("mcp_tools"), list(tools.servers()))
print(await asyncio.gather(*(crm.echo.aio(n=n) for n in range(3))))
print([each["n"] for each in map(lambda n: crm.echo(n=n), range(50))] == list(range(50)))
pid = os.fork()
if not pid:
    print(crm.echo(child=True), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
POOLS = """
import multiprocessing
for way in ("fork", "spawn"):
    with multiprocessing.get_context(way).Pool(2) as pool:
        print(sorted(each["x"] for each in pool.map(echo, range(10), chunksize=1)))
"""
DEFINED = "def echo(x):\n    from tools import crm\n    return crm.echo(x=x)\n"
PRINTED = (
    "{'a': 1} True ['crm', 'git-hub']\n[{'n': 0}, {'n': 1}, {'n': 2}]\nTrue\n{'child': True}\n"
)


def gateway_of(book: Notebook) -> Gateway:
    return Gateway(Path(book.handle.sockets.connection.tools))


async def calls_tools(book: Notebook, *, pools: bool = True) -> None:
    made = gateway_of(book)
    cell = await book.run(CALLS)
    assert (cell.text, cell.error) == (PRINTED, "")
    if pools:  # Landlock permits none
        await book.run(DEFINED)
        cell = await book.run(POOLS)
        assert (cell.text, cell.error) == (f"{list(range(10))}\n" * 2, "")
    made.close()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(BwrapSandbox.detect, id="bwrap"),
        pytest.param(LandlockSandbox.detect, id="landlock"),
        pytest.param(partial(detect, "podman"), id="container", marks=pytest.mark.ways),
        pytest.param(NoSandbox, id="none", marks=pytest.mark.ways),
    ],
)
async def test_cells_of_a_cold_kernel_call_tools(backend: Callable[[], Sandbox]) -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=backend(), tools=True) as book:
            await calls_tools(book, pools=backend != LandlockSandbox.detect)
        assert list(runs.tools.iterdir()) == []


async def test_cells_of_a_forked_kernel_call_tools() -> None:
    async with bench() as made:
        folder, launcher = made.workspaces, made.launcher
        async with notebook(made.runs, launcher=launcher, folder=folder, tools=True) as book:
            await calls_tools(book)
        assert list(made.runs.tools.iterdir()) == []


async def test_an_interrupt_cancels_the_call_of_a_cell() -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=BwrapSandbox.detect(), tools=True) as book:
            made = gateway_of(book)
            cells = []

            async def run() -> None:
                cells.append(await book.run("from tools import crm\ncrm.wait(n=1)"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(2):
                    await anyio.to_thread.run_sync(made.events.get)
                book.handle.interrupt()
            assert made.events.get() == ("cancelled", {"n": 1})
            assert cells[0].error.startswith("KeyboardInterrupt")
            assert (await book.run("print(crm.echo(a=1))")).text == "{'a': 1}\n"
            made.close()


async def test_errors_show_no_frames_of_ours_and_descriptions_are_shown() -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=BwrapSandbox.detect(), tools=True) as book:
            made = gateway_of(book)
            made.answers["answer"] = lambda _: ({"error": {"kind": "refused", "text": "no"}}, ())
            run = book.kernel.submit("from tools import crm\ncrm.answer()", lambda event: None)
            await run.finished.wait()
            assert run.failure is not None
            first, frame, last = run.failure.traceback
            assert first == "Traceback (most recent call last):"
            # Python 3.13 marks the call with carets
            assert frame.splitlines()[:2] == [
                "  Cell In[1], line 2, in <module>",
                "    crm.answer()",
            ]
            assert last == "mcp_tools.ToolRefused: no"
            shown = await book.run("crm.list_orders?\nhelp(crm.list_orders)")
            assert "Newest first." in shown.text
            made.close()


async def test_the_socket_shows_no_path_of_the_host() -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=BwrapSandbox.detect(), tools=True) as book:
            cell = await book.run(
                "import mcp_tools, os, socket\n"
                "print(socket.socket(fileno=os.dup(mcp_tools.fileno())).getsockname())"
            )
            assert cell.text.startswith("/proc/self/fd/")
            assert str(runs.path.parent) not in cell.text


async def test_without_tools_there_is_no_such_module_and_no_socket() -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=BwrapSandbox.detect()) as book:
            assert book.handle.sockets.connection.tools == ""
            assert (await book.run("import tools")).error.startswith("ModuleNotFoundError")


async def test_a_file_of_the_session_has_the_short_name() -> None:
    with RunDirectory.create() as runs:
        async with notebook(runs, sandbox=BwrapSandbox.detect(), tools=True) as book:
            made = gateway_of(book)
            (book.workspace / "tools.py").write_text("own = True\n")
            cell = await book.run(
                "import tools, mcp_tools\nprint(tools.own, mcp_tools.crm.echo(a=1))"
            )
            assert (cell.text, cell.error) == ("True {'a': 1}\n", "")
            made.close()
