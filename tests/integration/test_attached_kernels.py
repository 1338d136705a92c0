"""Sessions in kernels that people have open, however these are reached."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext

from tests.integration.agent import Agent, Answer, agent, command, lost, notices
from tests.integration.jupyter_kernels import JupyterServer, Opened, by_file, jupyter_server
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

Open = Callable[[], AbstractAsyncContextManager[Opened]]
OUTSIDE = "[kernel-mcp] outside the sandbox, in an external kernel: "
FOREVER = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
async def jupyter() -> AsyncIterator[JupyterServer]:
    """One server for all notebooks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        async with jupyter_server(Path(path)) as server:
            yield server


@pytest.fixture(scope="module")
def connection() -> Iterator[Path]:
    """The connection file of one kernel after another: one server joins them all."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path) / "kernel.json"


class Way:
    """One way to reach a person's kernel, and the server of the agents that do."""

    def __init__(self, opened: Open, servers: Servers) -> None:
        self.opened, self._servers = opened, servers

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[tuple[Agent, Opened]]:
        """An agent whose session `theirs` has joined the kernel."""
        async with (
            self.opened() as theirs,
            self._servers.agent("--attach", theirs.flag) as notebook,
        ):
            answer = await notebook.call("create_session", name="theirs", attach=theirs.place)
            assert not answer.failed, answer.text
            assert "outside the sandbox" in answer.data["note"]
            yield notebook, theirs


WAYS = ("file", "server")


@pytest.fixture(params=sampled(WAYS, "file"))
def way(
    request: pytest.FixtureRequest, jupyter: JupyterServer, connection: Path, servers: Servers
) -> Way:
    opened: Open = partial(by_file, connection) if request.param == "file" else jupyter.notebook
    return Way(opened, servers)


async def cell(notebook: Agent, code: str, **options: float) -> Answer:
    return await notebook.run(code, session="theirs", **options)


def other_notices(answer: Answer) -> list[str]:
    """Those besides the one that every answer has."""
    said = notices(answer)
    assert [each for each in said if each.startswith(OUTSIDE)] == said[-1:]
    return said[:-1]


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_both_work_with_the_same_variables(way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        await theirs.run("x = 41")
        answer = await cell(notebook, "x += 1\nprint('hi')\nx")
        assert (answer.status, answer.text.splitlines()[:2]) == ("ok", ["hi", "42"])
        assert other_notices(answer) == ["[kernel-mcp] another client of this kernel ran: x = 41"]
        await theirs.run("assert x == 42")
        listed = await notebook.call("list_variables", session="theirs")
        assert [each["preview"] for each in listed.data["variables"] if each["name"] == "x"] == [
            "42"
        ]
        failed = await cell(notebook, "1/0")
        assert (failed.status, failed.failed) == ("error", True)
        assert "ZeroDivisionError" in failed.text


async def test_pictures_and_long_output_come_as_from_any_kernel(way: Way) -> None:
    async with way.joined() as (notebook, _):
        code = "from IPython.display import Image, display\nimport base64\n"
        dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # noqa: E501
        code += f"display(Image(base64.b64decode({dot!r}), format='png'))\n"
        answer = await cell(notebook, code + "for n in range(20_000): print(n)")
        assert len(answer.images) == 1
        assert answer.cell["omitted"] > 0


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_code_asks_the_person_and_no_answer_interrupts_it(way: Way) -> None:
    answers = [{"action": "accept", "content": {"answer": "Ada"}}, {"action": "decline"}]

    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        return types.ElicitResult.model_validate(answers.pop(0))

    async with (
        way.opened() as theirs,
        Client(
            command("--warm", "0", "--attach", theirs.flag), elicitation_callback=elicit
        ) as client,
    ):
        notebook = Agent(client)
        await notebook.call("create_session", name="theirs", attach=theirs.place)
        assert "'ADA'" in (await cell(notebook, "x = input('Name? ').upper(); x")).text
        answer = await cell(notebook, "y = input('Name? ')")
        assert "1 declined" in answer.text
        assert answer.status != "ok"
        assert "'ADA'" in (await cell(notebook, "x")).text


async def test_a_cell_is_interrupted_and_the_kernel_goes_on(way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        await theirs.run("x = 1")
        answer = await cell(notebook, FOREVER, timeout=1)
        assert answer.status == "timeout"
        assert "KeyboardInterrupt" in answer.text
        assert (await cell(notebook, "x")).text.startswith("1\n")


async def test_a_cell_that_does_not_stop_is_left_and_never_killed(folder: Path, way: Way) -> None:
    stubborn = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 1\n"
        f"while not pathlib.Path({str(folder / 'go')!r}).exists(): time.sleep(0.05)\n"
        "x = 2\nprint('of the first')"
    )
    async with way.joined() as (notebook, _):
        answer = await cell(notebook, stubborn, timeout=1)
        assert answer.status == "timeout"
        assert "goes on in the attached kernel" in answer.text
        waits = await cell(notebook, "x", wait=0.2)
        assert waits.status == "running"
        (folder / "go").touch()
        done = await notebook.call("wait", session="theirs")
        assert (done.status, done.text.splitlines()[0]) == ("ok", "2")
        assert "of the first" not in done.text


async def test_a_persons_cell_is_neither_stopped_nor_received(folder: Path, way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        theirs.begin(
            "import pathlib, time\nprint('theirs', flush=True)\n"
            f"while not pathlib.Path({str(folder / 'go')!r}).exists(): time.sleep(0.01)\nx = 7"
        )
        while "ran: import pathlib" not in (await notebook.call("list_sessions")).text:
            await anyio.lowlevel.checkpoint()
        answer = await cell(notebook, "x = 8\nprint('ours')", timeout=0.5)
        assert answer.status == "timeout"
        assert "Another client's cell" in answer.text
        assert "was not run" in answer.text
        assert "ours" not in answer.text
        assert "theirs\n" not in answer.text
        stopped = await cell(notebook, "x = 9", wait=0)
        assert stopped.status == "running"
        ended = await notebook.call("interrupt", session="theirs")
        assert ended.status == "interrupted"
        (folder / "go").touch()
        assert (await cell(notebook, "x")).text.startswith("7\n")


def until(path: Path, then: str) -> str:
    """Code that waits for a file."""
    looks = f"while not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)"
    return f"import pathlib, time\n{looks}\n{then}"


async def overheard(notebook: Agent, code: str) -> None:
    """Wait until the server has heard of a cell of the person's."""
    while code not in (await notebook.call("list_sessions")).text:
        await anyio.lowlevel.checkpoint()


async def test_a_cell_stays_here_while_others_wait_in_the_kernel(folder: Path, way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        theirs.begin(f"first = 1; {until(folder / 'one', 'x = 1')}")
        theirs.begin(f"second = 2; {until(folder / 'two', 'x = 2')}")
        await overheard(notebook, "first")
        assert (await cell(notebook, "x = 'ours'", wait=0)).status == "running"
        (folder / "one").touch()
        await overheard(notebook, "second")
        assert (await notebook.call("interrupt", session="theirs")).status == "interrupted"
        (folder / "two").touch()
        assert (await cell(notebook, "x")).text.startswith("2\n")


async def test_a_cell_waits_for_one_that_ran_before_the_session(
    folder: Path, way: Way, servers: Servers
) -> None:
    async with way.opened() as theirs, servers.agent("--attach", theirs.flag) as notebook:
        # the first web socket has its server ask the kernel
        first = await notebook.call("create_session", attach=theirs.place)
        await notebook.call("close_session", session=first.data["session"])
        theirs.begin(until(folder / "go", "x = 1"))
        second = await notebook.call("create_session", name="theirs", attach=theirs.place)
        assert not second.failed, second.text
        answer = await cell(notebook, "x = 'ours'", timeout=0.5)
        assert answer.status == "timeout"
        assert "was not run" in answer.text
        listed = await notebook.refused("list_variables", session="theirs")
        assert "between cells" in listed
        (folder / "go").touch()
        assert (await cell(notebook, "x")).text.startswith("1\n")


async def test_what_a_thread_prints_later_is_no_cell_that_runs(folder: Path, way: Way) -> None:
    thread = (
        "import pathlib, threading, time\ndef tell():\n"
        f"    while not pathlib.Path({str(folder / 'go')!r}).exists(): time.sleep(0.01)\n"
        "    print('late', flush=True)\n"
        f"    pathlib.Path({str(folder / 'told')!r}).touch()\n"
        "threading.Thread(target=tell).start()"
    )
    async with way.joined() as (notebook, theirs):
        await theirs.run(thread)
        (folder / "go").touch()
        while not (folder / "told").exists():
            await anyio.sleep(0.01)  # a file tells nobody that it is there
        answer = await cell(notebook, "6 * 7", timeout=20)
        assert answer.status == "ok"
        assert "Another client's cell" not in answer.text


async def test_names_of_builtins_hide_no_loss(way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        await theirs.run("list, type, len, str, globals, getattr, exec = range(7)")
        listed = await notebook.call("list_variables", session="theirs")
        assert {each["name"] for each in listed.data["variables"]} >= {"list", "type", "exec"}
        await notebook.call("list_variables", session="theirs")  # answered behind the names
        await theirs.restart()
        told = await cell(notebook, "1")
        while not lost(told):
            told = await cell(notebook, "1")
        assert set(lost(told)) >= {"list", "type", "exec"}


async def test_a_name_of_megabytes_costs_no_connection(way: Way) -> None:
    async with way.joined() as (notebook, _):
        await cell(notebook, "globals()['x' * 20_000_000] = y = 1")
        listed = await notebook.call("list_variables", session="theirs")
        assert [each["name"] for each in listed.data["variables"]] == ["y"]
        assert listed.data["omitted"] == 1
        assert lost(await cell(notebook, "y")) == []


async def test_what_others_made_after_the_last_cell_is_named_when_lost(way: Way) -> None:
    async with way.joined() as (notebook, theirs):
        await cell(notebook, "ours = 1")
        await theirs.run("made_later = 2")
        while "made_later" not in (await notebook.call("list_sessions")).text:
            await anyio.lowlevel.checkpoint()
        for _ in range(2):  # a kernel answers in order: by then it has been asked for its names
            await notebook.call("list_variables", session="theirs")
        await theirs.restart()
        told = await cell(notebook, "1")
        while not lost(told):
            told = await cell(notebook, "1")
        assert set(lost(told)) >= {"ours", "made_later"}


@pytest.mark.parametrize("how", ["restart", "end", "die"])
async def test_what_is_lost_with_the_kernel_is_told(way: Way, how: str) -> None:
    async with way.joined() as (notebook, theirs):
        await theirs.run("theirs_too = 1")
        pid = int((await cell(notebook, "ours = 2\nimport os\nos.getpid()")).text.splitlines()[0])
        if how == "die":
            os.kill(pid, signal.SIGKILL)
        else:
            await (theirs.restart() if how == "restart" else theirs.end())
        answer = await cell(notebook, "ours")
        told = answer
        while "NameError" in answer.text and not lost(told):  # the end was not heard of yet
            told = await cell(notebook, "1")
        assert set(lost(told)) >= {"ours", "theirs_too"}
        assert told.cell["state_kept"] is False


async def test_a_kernel_that_dies_in_a_cell_is_told(way: Way) -> None:
    async with way.joined() as (notebook, _):
        await cell(notebook, "x = 1")
        answer = await cell(notebook, "import os\nos.kill(os.getpid(), 9)")
        assert (answer.status, answer.failed) == ("killed", True)
        assert "x" in lost(answer)


async def test_what_takes_a_kernel_of_this_server_says_so(way: Way) -> None:
    calls: dict[str, dict[str, object]] = {
        "reset": {},
        "install": {"packages": ["six"]},
        "list_packages": {},
        "undo": {},
        "branch": {},
        "list_files": {},
        "write_file": {"path": "a", "content": "x"},
    }
    async with way.joined() as (notebook, theirs):
        await theirs.run("x = 1")
        for tool, arguments in calls.items():
            text = await notebook.refused(tool, session="theirs", **arguments)
            assert f"{tool} is not available" in text
        about = await notebook.call("info", session="theirs")
        assert (about.data["sandbox"], about.data["sandbox_enforces"]) == ("none", [])
        assert (await cell(notebook, "x")).text.startswith("1\n")
        asked = await notebook.run("x", session="theirs", checkpoint=True)
        assert "only this server's own Python kernels have checkpoints" in asked.text
        assert not (await notebook.call("export_notebook", session="theirs")).failed
        own = await notebook.run("'x' in globals()")
        assert (own.text, notices(own)) == ("False", [])


async def test_the_end_of_a_session_or_server_leaves_the_kernel(folder: Path, way: Way) -> None:
    async with way.opened() as theirs:
        flags = ("--attach", theirs.flag, "--state-dir", str(folder / "s"))
        async with agent(*flags) as notebook:
            await notebook.call("create_session", name="theirs", attach=theirs.place)
            await cell(notebook, "x = 1")
            closed = await notebook.call("close_session", session="theirs")
            assert "goes on with its variables" in closed.text
            await notebook.call("create_session", name="theirs", attach=theirs.place)
            assert (await cell(notebook, "x")).text.startswith("1\n")
        await theirs.run("assert x == 1")


async def test_only_what_the_operator_named_is_joined(folder: Path) -> None:
    async with by_file(folder / "named.json") as named, by_file(folder / "other.json") as other:
        async with agent("--attach", named.flag) as notebook:
            text = await notebook.refused("create_session", attach=other.place)
            assert "not what the operator has named" in text
            text = await notebook.refused("create_session", attach=named.place, memory="1G")
            assert "its limits" in text
            assert len((await notebook.call("list_sessions")).data["sessions"]) == 0
        async with agent() as notebook:
            assert "--attach" in await notebook.refused("create_session", attach=named.place)


@pytest.mark.ways
async def test_a_server_tells_which_kernels_it_has_and_never_its_token(
    jupyter: JupyterServer,
) -> None:
    server = jupyter
    async with agent("--attach", server.flag) as notebook:
        assert "No kernel runs" in await notebook.refused("create_session", attach=server.base)
        async with server.notebook() as theirs:
            other = await server.ask("POST", "api/kernels", {"name": "python3"})
            text = await notebook.refused("create_session", attach=server.base)
            assert theirs.place in text
            assert other["id"] in text
            place = f"{server.base}/api/kernels/{other['id']}"
            assert not (await notebook.call("create_session", attach=place, name="theirs")).failed
            shown = await cell(notebook, f"print({server.token!r})")
            assert server.token not in shown.text
            assert server.token not in (await notebook.call("info")).text
    wrong = f"{server.base}/?token=wrong"
    async with agent("--attach", wrong) as notebook:
        text = await notebook.refused("create_session", attach=server.base)
        assert "another token" in text


@pytest.mark.ways
async def test_doctor_tells_what_is_there_and_no_token(
    folder: Path, jupyter: JupyterServer
) -> None:
    gone = folder / "gone.json"
    words = ["doctor", "-v", "--sandbox", "none"]
    words += ["--attach", jupyter.flag, "--attach", str(gone)]
    done = await anyio.run_process([sys.executable, "-m", "kernel_mcp", *words], check=False)
    text = done.stdout.decode()
    assert f"{jupyter.base}: 0 kernels there" in text
    assert f"{gone}: not to be joined now: There is no connection file" in text
    assert jupyter.token not in text + done.stderr.decode()


@pytest.mark.ways
async def test_a_kernel_of_another_language_lacks_what_python_alone_has(folder: Path) -> None:
    async with (
        by_file(folder / "kernel.json") as theirs,
        agent("--attach", theirs.flag) as notebook,
    ):
        await theirs.run("get_ipython().kernel.language_info['name'] = 'R'")
        await notebook.call("create_session", name="x", attach=theirs.place)
        assert "list_variables" in (await notebook.refused("list_variables", session="x"))
        assert (await notebook.run("print(6 * 7)", session="x")).text.startswith("42")
