"""The tools that run code."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.output.outputs import Position
from kernel_mcp.sessions import cell as cells
from kernel_mcp.sessions import history
from kernel_mcp.sessions.cell import Status, StopReason
from kernel_mcp.tools import results
from kernel_mcp.tools.cells import MAX_CODE_CHARS
from tests.integration.agent import Answer
from tests.unit.fake_kernels import FakeSource
from tests.unit.packages.wheels import requirements
from tests.unit.tools.served import BESIDE, Served, served

pytestmark = [pytest.mark.anyio]


async def test_execute_answers_with_what_the_cell_has_put_out(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        answer = await server.call("execute", code="say hello")
        assert (answer.text, answer.status, answer.failed) == ("hello", "ok", False)
        assert answer.cell["state_kept"]
        assert answer.cell["session"] == server.session.handle
        failed = await server.call("execute", code="raise trouble")
        assert "Error: trouble" in failed.text
        assert (failed.status, failed.failed) == ("error", True)
        assert len(server.source.kernels) == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("execute", {"code": " \n"}, "The code is empty"),
        ("execute", {"code": "1" * (MAX_CODE_CHARS + 1)}, "takes at most 1,000,000"),
        (
            "execute",
            {"code": "1", "timeout": 0},
            "`timeout` is the number 0: expected a time above zero",
        ),
        ("execute", {"code": "1", "timeout": -1}, "`timeout` is the number -1: expected a time"),
        ("execute", {"code": "1", "wait": 1e9}, "wait=1e+09 is not usable"),
        ("execute", {"code": "1", "wait": "long"}, "is the string 'long': expected a time"),
        ("execute", {}, "execute needs `code`"),
        ("wait", {"wait": -1}, "`wait` is the number -1: expected"),
        ("reset", {"files": "perhaps"}, "has to be true or false"),
        ("check_syntax", {}, "check_syntax needs `code`"),
        ("run_script", {"script": ""}, "The code is empty"),
        (
            "run_script",
            {"script": "1", "timeout": -1},
            "`timeout` is the number -1: expected a time",
        ),
        ("run_script", {"script": "1", "dependencies": ["rich"]}, "--allow-install rich"),
        ("run_script", {"script": "1", "python": "2.7"}, "python='2.7'"),
        ("run_script", {"script": "# /// script\n# dependencies = 1\n# ///"}, "dependencies"),
    ],
)
async def test_what_cannot_be_used_is_refused_before_anything_is_begun(
    tmp_path: Path, tool: str, arguments: dict[str, Any], words: str
) -> None:
    async with served(tmp_path) as server:
        answer = await server.call(tool, **arguments)
        assert answer.failed
        assert words in answer.text
        assert not server.manager.sessions


async def test_a_cell_that_takes_longer_is_followed_and_interrupted(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.hanging()
        waited = await server.call("wait", wait=0)
        assert waited.status == "running"
        assert "Call wait for more output, interrupt to stop it" in waited.text
        second = await server.call("execute", code="x = 1", wait=0)
        assert "queued: cell 2 begins after 1 other cell." in second.text
        earlier = await server.call("wait", wait=0)
        assert "This is cell 1, which an earlier call had started" in earlier.text
        assert "Call wait again for cell 2" in earlier.text
        stopped = await server.call("interrupt")
        assert (stopped.status, stopped.cell["cell"]) == ("interrupted", 1)
        assert "Variables are kept." in stopped.text
        last = await server.call("wait")
        assert (last.status, last.cell["cell"]) == ("ok", 2)


async def test_wait_shows_the_cell_that_is_followed_and_not_an_older_one(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.hanging()
        await server.call("execute", code="raise old", wait=0)
        await server.call("execute", code="say new", wait=0)
        await server.call("interrupt")
        for cell in server.session.cells:
            await cell.finished.wait()
        answer = await server.call("wait")
        assert (answer.cell["cell"], answer.failed) == (3, False)
        assert answer.text.startswith("new")
        earlier = await server.call("wait")
        assert (earlier.cell["cell"], earlier.failed) == (2, True)


async def test_there_is_nothing_to_follow_or_stop_where_nothing_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        for tool in ("wait", "interrupt"):
            assert "no cell has been executed" in (await server.call(tool)).text
        await server.call("execute", code="x = 1")
        for tool in ("wait", "interrupt"):
            answer = await server.call(tool)
            assert answer.text.startswith("[kernel-mcp] Nothing is running. Cell 1 was the last")
            assert "kernel-mcp/cell" not in (answer.result.meta or {})


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [("execute", {"code": "wait"}, StopReason.CANCEL), ("wait", {}, None)],
)
async def test_a_call_that_is_given_up_stops_the_cell_it_has_started_and_no_other(
    tmp_path: Path, tool: str, arguments: dict[str, Any], reason: StopReason | None
) -> None:
    async with served(tmp_path) as server:
        if tool == "wait":
            await server.hanging()
        async with anyio.create_task_group() as calls:
            calls.start_soon(lambda: server.call(tool, **arguments))
            cell = await server.running()
            calls.cancel_scope.cancel()
        for _ in range(10):  # for the word of it to arrive
            await server.call("list_sessions")
        assert cell.stop_reason is reason
        if reason is None:
            assert cell.status is Status.RUNNING
        else:
            await cell.finished.wait()
            assert cell.status is Status.INTERRUPTED


async def let_go(server: Served, number: int) -> None:
    """Let the running cell end by itself."""
    server.source.kernels[-1].interrupt()
    cell = server.session.cells[number - 1]
    await cell.finished.wait()
    while server.session.queue.current is cell:
        await anyio.lowlevel.checkpoint()


async def test_the_end_of_a_cell_whose_call_has_gone_is_told_once_by_any_tool(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        await server.hanging()
        assert "has ended" not in (await server.call("list_files")).text
        await let_go(server, 1)
        told = await server.call("list_files")
        (word,) = told.data["notices"]
        assert word.endswith(
            "cell 1, which was running, has ended: ok; `wait` with cell=1 shows it"
        )
        assert word in told.text
        assert "has ended" not in (await server.call("execute", code="say next")).text
        shown = await server.call("wait")
        assert (shown.cell["cell"], shown.status) == (1, "ok")
        await server.call("execute", code="wait", wait=0)
        await server.running()
        await let_go(server, 3)
        assert "has ended" not in (await server.call("wait", cell=3)).text
        assert "has ended" not in (await server.call("list_files")).text
        await server.call("execute", code="wait", wait=0)
        await server.running()
        for number in range(7):
            await server.call("execute", code=f"say {number}", wait=0)
        await let_go(server, 4)
        await server.session.cells[10].finished.wait()
        (word,) = (await server.call("list_files")).data["notices"]
        assert "3 other cells have ended; cell 7, which was running, has ended: ok; cell 8," in word
        assert word.endswith("`wait` with cell=N shows it")


async def test_the_end_of_a_cell_whose_call_was_cancelled_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        async with anyio.create_task_group() as calls:
            calls.start_soon(lambda: server.call("execute", code="wait"))
            cell = await server.running()
            calls.cancel_scope.cancel()
        await cell.finished.wait()
        answer = await server.call("execute", code="say next")
        assert "cell 1, whose call was cancelled, has ended: interrupted" in answer.text
        assert "has ended" not in (await server.call("list_files")).text
        assert "Nothing is running" in (await server.call("wait")).text
        shown = await server.call("wait", cell=1)
        assert (shown.cell["cell"], shown.status) == (1, "interrupted")


async def test_while_a_call_waits_for_a_cell_no_other_tells_its_end(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        answers: list[Answer] = []

        async def execute() -> None:
            answers.append(await server.call("execute", code="wait"))

        async with anyio.create_task_group() as calls:
            calls.start_soon(execute)
            await server.running()
            server.source.kernels[-1].interrupt()
            assert "has ended" not in (await server.call("list_files")).text
        assert "has ended" not in (await server.call("list_files")).text
        assert answers[0].status == "ok"


async def test_an_answer_that_was_revoked_has_told_no_end(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="say one")
        session = server.session
        results._mark_undelivered(weakref.ref(session), 1, Position())
        assert "cell 1, which was running, has ended: ok" in (await server.call("list_files")).text
        assert (await server.call("wait", cell=1)).text == "one"


async def test_wait_and_interrupt_take_the_number_of_a_cell(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        assert "has run none so far" in await server.agent.refused("wait", cell=1)
        await server.call("execute", code="say one")
        for _ in range(2):
            again = await server.call("wait", cell=1)
            assert (again.text.splitlines()[-1], again.status) == ("one", "ok")
        await server.call("execute", code="wait", wait=0)
        await server.running()
        queued = await server.call("execute", code="say three", wait=0)
        assert queued.text.startswith("[kernel-mcp] queued")
        for tool in ("wait", "interrupt"):
            for number in (9, -1):
                assert f"no cell {number}: it has cells 1 to 3" in await server.agent.refused(
                    tool, cell=number
                )
        over = await server.call("interrupt", cell=1)
        assert "Cell 1 is not running: it ended with ok." in over.text
        dropped = await server.call("interrupt", cell=3)
        assert (dropped.cell["cell"], dropped.status) == (3, "interrupted")
        assert "it was stopped before it began" in dropped.text
        running = await server.call("wait", wait=0)
        assert (running.cell["cell"], running.status) == (2, "running")
        assert "(no output)" not in running.text
        stopped = await server.call("interrupt", cell=2)
        assert (stopped.cell["cell"], stopped.status) == (2, "interrupted")


async def test_output_is_reported_to_whoever_asks_for_progress(tmp_path: Path) -> None:
    told: list[str | None] = []
    async with served(tmp_path) as server:
        await server.agent.call(
            "execute", code="say hello", on_progress=lambda _n, _of, text: told.append(text)
        )
    assert told == ["hello"]


async def test_a_silent_cell_is_reported_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "BEAT_S", 0.01)
    told: list[str | None] = []

    async with served(tmp_path) as server, anyio.create_task_group() as calls:

        def take(_count: float, _of: float | None, text: str | None) -> None:
            told.append(text)
            server.clock.now += 40
            if len(told) == 2:
                calls.start_soon(lambda: server.call("interrupt"))

        answer = await server.agent.call("execute", code="wait", on_progress=take)
        assert answer.status == "interrupted"
    assert told[:2] == ["cell 1: running for 0 s", "cell 1: running for 40 s"]


async def test_a_silent_cell_that_waits_says_what_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "BEAT_S", 0.01)
    source = Building()
    told: dict[str, list[str | None]] = {"first": [], "second": []}
    async with served(tmp_path, source) as server, anyio.create_task_group() as calls:

        def follow(code: str, key: str) -> None:
            def take(_count: float, _of: float | None, text: str | None) -> None:
                told[key].append(text)
                if "cell 1: waiting for its kernel for 0 s" in told["first"] and told["second"]:
                    source.built.set()

            calls.start_soon(lambda: server.agent.call("execute", code=code, on_progress=take))

        follow("x = 1", "first")
        follow("x = 2", "second")
    assert told["second"][0] == "cell 2: queued for 0 s"


class Building(FakeSource):
    """A source whose kernels wait for an environment."""

    def __init__(self) -> None:
        super().__init__()
        self.built = anyio.Event()

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        await progress("Downloading: 1 of 2")
        await self.built.wait()
        return await super().start(request, progress)


async def test_a_cell_that_waits_for_its_kernel_says_what_is_being_prepared(tmp_path: Path) -> None:
    told: list[str | None] = []
    source = Building()
    async with served(tmp_path, source) as server:
        waiting = await server.call("execute", code="say hello", wait=0)
        assert waiting.status == "running"
        assert "kernels are being prepared (Downloading: 1 of 2); cell 1 begins" in waiting.text
        assert "cell 1 goes on" not in waiting.text

        def take(_count: float, _of: float | None, text: str | None) -> None:
            told.append(text)
            source.built.set()

        ended = await server.agent.call("wait", on_progress=take)
        assert (ended.status, ended.text) == ("ok", "hello")
    assert told == ["Downloading: 1 of 2", "hello"]


async def test_check_syntax_knows_what_the_session_defines(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        assert (await server.call("check_syntax", code="x")).data["diagnostics"] == []
        (unknown,) = (await server.call("check_syntax", code="\nx + y")).data["diagnostics"]
        assert (unknown["severity"], unknown["line"], unknown["column"]) == ("warning", 2, 5)
        for broken in ("def f(:", "import socket"):
            assert not (await server.call("check_syntax", code=broken)).data["valid"]
        assert len(server.session.cells) == 1


@pytest.mark.parametrize("told", ["nothing", "not all"])
async def test_check_syntax_calls_no_name_unknown_where_the_kernel_does_not_tell_all(
    tmp_path: Path, told: str
) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        server.source.mute, server.source.omitted = told == "nothing", 3
        assert (await server.call("check_syntax", code="x + y")).data["diagnostics"] == []


async def test_reset_names_what_is_lost_and_keeps_files_unless_told(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.call("write_file", path="a.txt", content="a")
        answer = await server.call("reset")
        assert "has a fresh kernel" in answer.text
        assert answer.text.count("Lost: x.") == 1
        assert (answer.result.meta or {})["kernel-mcp/lost"]["lost"] == ["x"]
        assert "Lost" not in (await server.call("list_files")).text
        assert server.session.workspace.list_files().entries
        answer = await server.call("reset", files=True, packages=True)
        assert "The workspace is now empty. The packages" in answer.text
        assert not server.session.workspace.list_files().entries
        assert "Lost" not in answer.text


async def test_a_reset_that_cannot_start_a_kernel_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        server.source.refuse = "beside"
        answer = await server.call("reset")
        assert answer.failed
        assert "no kernel today" in answer.text
        assert [v["name"] for v in (await server.call("list_variables")).data["variables"]] == ["x"]


async def test_a_script_has_a_session_for_itself_which_is_gone_afterwards(tmp_path: Path) -> None:
    class Writing(FakeSource):
        """Its kernels are in a workspace with a file."""

        async def start(self, request: Any, tell: Any) -> Any:
            (request.workspace / "out.txt").write_text("1234")
            return await super().start(request, tell)

    async with served(tmp_path, Writing()) as server:
        answer = await server.call("run_script", script="\ufeffsay hello")
        assert answer.text.startswith("hello")
        assert "the script wrote out.txt (4 bytes): gone with its session" in answer.text
        assert not server.manager.sessions
        assert server.source.asked == ["kernel_mcp_script_request"]
        again = await server.call("list_files", session=answer.cell["session"])
        assert "never yours" in again.text


async def test_the_record_of_a_script_outlives_its_session_for_ten_minutes(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        text = "line " * 20_000
        answer = await server.call("run_script", script=f"say {text}")
        (link,) = answer.links
        record = f"{link.uri}.json"
        assert "the addresses in this answer can be read for 10 minutes" in answer.text
        assert not server.manager.sessions
        assert (await server.call("read_file", path=link.uri)).text.startswith("line line")
        content = (await server.agent.client.read_resource(record)).contents[0]
        found = json.loads(content.text)  # type: ignore[union-attr]
        assert {**found, "omitted": 0} == {**answer.cell, "omitted": 0, "client": ""}
        assert len(found["stdout"]) < 31_000
        assert found["omitted"] == len(text) - 30_000
        assert "never yours" in await server.agent.refused(
            "execute", code="1", session=found["session"]
        )
        server.clock.now += 601
        assert "never yours" in await server.agent.refused("read_file", path=link.uri)


async def test_only_so_many_records_of_scripts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_KEPT", 2)
    async with served(tmp_path) as server:
        answers = [await server.call("run_script", script=f"say {n}") for n in range(3)]
        paths = [f"kernel://{answer.cell['session']}/cells/1" for answer in answers]
        assert "never yours" in await server.agent.refused("read_file", path=paths[0])
        assert [(await server.call("read_file", path=path)).text for path in paths[1:]] == [
            "1",
            "2",
        ]
        (folder,) = {path.parent for path in tmp_path.rglob(answers[2].cell["session"])}
        assert {path.name for path in folder.iterdir()} == {
            answer.cell["session"] for answer in answers[1:]
        }


async def test_the_outcome_of_a_script_holds_its_streams_and_how_far_it_came(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        failed = await server.call("run_script", script="raise trouble")
        outcome = failed.cell
        assert (outcome["phase"], outcome["exit_code"], outcome["stdout"]) == ("run", 1, "")
        assert "Error: trouble" in outcome["stderr"]
        for script, options, phase in (
            (" ", {}, "check"),
            ("# /// script\n# dependencies = 1\n# ///", {}, "check"),
            ("1", {"dependencies": ["rich"]}, "check"),
        ):
            refused = await server.call("run_script", script=script, **options)
            assert refused.failed
            assert refused.cell.keys() == outcome.keys()
            assert (refused.cell["phase"], refused.cell["exit_code"]) == (phase, None)
            assert refused.cell["cause"] == refused.text
        server.source.refuse = "own"
        refused = await server.call("run_script", script="1")
        assert (refused.cell["phase"], refused.cell["status"]) == ("start", "error")


async def test_a_script_that_cannot_be_run_leaves_no_session(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        server.source.refuse = "own"
        answer = await server.call("run_script", script="say hello")
        assert answer.failed
        assert "no kernel today" in answer.text
        assert not server.manager.sessions


async def test_the_packages_of_a_script_are_there_before_it_runs(tmp_path: Path) -> None:
    script = f"# /// script\n# dependencies = ['{BESIDE}']\n# ///\nsay hello"
    async with served(tmp_path) as server:
        assert (await server.call("run_script", script=script)).status == "ok"
        assert server.store.asked[-1] == (BESIDE,)
        assert server.source.requests[0].packages == requirements(BESIDE)


async def test_the_cell_after_a_death_runs_on_a_fresh_kernel_and_tells_it(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.died()
        answer = await server.call("execute", code="say again")
        assert answer.text.startswith("again")
        assert "Lost: x." in answer.text
        assert (answer.cell["lost"], answer.cell["state_kept"]) == (["x"], False)
        answer = await server.call("execute", code="say more")
        assert (answer.text, answer.cell["lost"]) == ("more", [])


async def test_check_syntax_judges_a_script_as_run_script_would(tmp_path: Path) -> None:
    script = "# /// script\n# dependencies = ['rich']\n# ///\nimport rich\nkept"
    async with served(tmp_path) as server:
        await server.call("execute", code="kept = 1")
        report = (await server.call("check_syntax", code=script)).data
        assert [(each["kind"], each["line"]) for each in report["diagnostics"]] == [
            ("pep723", 2), ("import", 4), ("name", 5),
        ]  # fmt: skip
        assert "--allow-install rich" in report["summary"]
        arguments = {"code": "import kmtest\nkept", "dependencies": "kmtest"}
        report = (await server.call("check_syntax", **arguments)).data
        assert [each["kind"] for each in report["diagnostics"]] == ["name"]
        assert report["valid"]
        report = (await server.call("check_syntax", code="1", python="2.7")).data
        assert "from 3.10 to" in report["diagnostics"][0]["message"]
        report = (await server.call("check_syntax", code="1", dependencies=["-r x"])).data
        assert not report["valid"]


async def test_check_syntax_judges_installations_of_a_cell(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        found = (await server.call("check_syntax", code="!pip install kmtest\nimport kmtest")).data
        assert found["valid"]
        found = (await server.call("check_syntax", code="x = 1\n%pip install rich")).data
        (problem,) = found["diagnostics"]
        assert (problem["kind"], problem["line"]) == ("install", 2)
        assert problem["source_line"] == "%pip install rich"
        assert "--allow-install rich" in problem["message"]


async def test_what_kept_a_cell_from_running_stands_in_its_record_and_notebook(
    tmp_path: Path,
) -> None:
    source = FakeSource()
    source.refuse = "own"
    async with served(tmp_path, source) as server:
        answer = await server.call("execute", code="say hello")
        assert answer.text == "no kernel today"
        assert answer.cell["outputs"] == ["application/vnd.jupyter.error"]
        place, told = f"kernel://{server.session.handle}", "LaunchError: no kernel today"
        record = json.loads((await server.call("read_file", path=f"{place}/cells/1.json")).text)
        assert record["stderr"] == f"{told}\n"
        assert {name: record[name] for name in answer.cell} == answer.cell
        assert told in (await server.call("read_file", path=f"{place}/cells/1")).text
        book = json.loads((await server.call("read_file", path=f"{place}/notebook")).text)
        assert book["cells"][0]["outputs"][0]["evalue"] == "no kernel today"
        source.refuse = ""
        for _ in range(3):
            await server.call("execute", code="x = 1")
        assert "no kernel today" in (await server.call("wait", cell=1)).text
