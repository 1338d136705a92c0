"""The tools for sessions as a whole."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp import __version__
from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.units import MIB
from tests.integration.agent import lost
from tests.unit.tools.served import BESIDE, served
from tests.unit.tools.test_toolbox import ABOUT_A_SESSION, BRANCH_TOOLS

pytestmark = [pytest.mark.anyio]


async def test_a_further_session_has_variables_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        made = (await server.call("create_session", name="second")).data
        assert made["name"] == "second"
        await server.call("execute", code="y = 2", session=made["session"])
        names = []
        for handle in ("", made["session"]):
            listed = (await server.call("list_variables", session=handle)).data["variables"]
            names.append([each["name"] for each in listed])
        assert names == [["x"], ["y"]]


async def test_a_name_is_as_good_as_a_handle_for_every_tool(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        made = (await server.call("create_session", name="b")).data
        handle = made["session"]
        assert "Pass the handle or the name" in made["note"]
        assert (await server.call("execute", code="x = 1", session="b")).cell["session"] == handle
        await server.call("write_file", path="a.txt", content="text", session="b")
        uri = "kernel://b/cells/1"
        for tool, arguments in {**ABOUT_A_SESSION, "read_file": {"path": uri}}.items():
            if tool == "close_session":
                continue
            answer = await server.call(tool, **arguments, session="b")
            assert answer.failed == (tool in BRANCH_TOOLS), (tool, answer.text)  # of fakes
            data = answer.result.structured_content
            assert data is None or data["session"] == handle
        for path in ("cells/1", "files/a.txt", "notebook"):
            assert (await server.agent.client.read_resource(f"kernel://b/{path}")).contents
        server.session.notifications.add("All is gone.")
        assert "[kernel-mcp] All is gone." in (await server.call("info", session="b")).text
        (listed,) = (await server.call("list_sessions")).data["sessions"]
        assert (listed["session"], listed["name"]) == (handle, "b")
        taken = await server.agent.refused("create_session", name="b")
        assert "session='b'" in taken
        assert (await server.call("close_session", session="b")).data["session"] == handle
        unknown = "There is no session 'b': it was never yours"
        assert unknown in await server.agent.refused("close_session", session="b")
        assert not (await server.call("create_session", name="b")).failed


async def test_a_session_has_the_limits_that_it_asks_for(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        made = (
            await server.call("create_session", name="b", memory="200M", cpu="0.5", timeout="30s")
        ).data
        assert made["note"].endswith("Limits: memory 200 MiB, 0.5 processors, 30 s for a cell.")
        session = server.session
        assert session.request.limits == replace(Limits(), memory_bytes=200 * MIB, cpus=0.5)
        assert session.timeout_s == 30
        await server.call("execute", code="x = 1", session="b")
        await server.call("execute", code="x = 1", session="b", timeout=5)
        assert [cell.timeout_s for cell in session.cells] == [30, 5]
        told = (await server.call("info", session="b")).data
        limits = {name: told["limits"][name] for name in ("memory_mb", "cpus", "cell_timeout_s")}
        assert limits == {"memory_mb": 200, "cpus": 0.5, "cell_timeout_s": 30}
        assert "memory 200 MiB by RLIMIT_AS and the sandbox's cgroup" in told["sandbox_enforces"]

        made = (await server.call("create_session", memory="2G", cpu="1m")).data
        assert made["note"].endswith("2 processors, 60 s of their time for a cell.")
        await server.call("create_session", memory="2G", cpu=2)
        assert server.session.request.limits is None, "any spare kernel has these"
        assert server.session.request.ordinary


async def test_a_kernel_is_started_ahead_where_its_environment_is_there(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("create_session")
        assert not server.source.kernels
        await server.call("list_packages")  # which has the environment built
        await server.call("create_session")
        await server.session.scheduler.begun.wait()
        assert len(server.source.kernels) == 1
        assert not server.session.cells


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "n" * 65}, "takes 1 to 64 letters"),
        ({"packages": ["rich"]}, "--allow-install rich"),
        ({"packages": ["https://host/x"]}, "names a place"),
        ({"packages": 5}, "has to be a list of strings"),
        ({"python": "2.7"}, "from 3.10 to 3.15"),
        ({"python": "/bin/python"}, "a path is the operator's choice"),
    ],
)
async def test_a_session_that_may_not_be_is_not_made(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    async with served(tmp_path) as server:
        answer = await server.call("create_session", **arguments)
        assert answer.failed
        assert words in answer.text
        assert not server.manager.sessions


async def test_a_session_whose_environment_cannot_be_built_is_closed_again(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        server.store.failure = EnvironmentBuildError("nothing fits")
        answer = await server.call("create_session", packages=[BESIDE])
        assert (answer.failed, answer.text) == (True, "nothing fits")
        assert not server.manager.sessions


async def test_more_sessions_than_the_operator_lets_run_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, max_sessions=1) as server:
        await server.hanging()
        answer = await server.call("create_session")
        assert answer.failed
        assert "--max-sessions" in answer.text


async def test_the_list_says_what_each_session_does(tmp_path: Path) -> None:
    async with served(tmp_path, max_sessions=8) as server:
        nothing = {"notices": [], "sessions": [], "limit": 8}
        assert (await server.call("list_sessions")).data == nothing
        await server.call("execute", code=f"say {'long ' * 30}\nand more")
        server.clock.now += 5
        (idle,) = (await server.call("list_sessions")).data["sessions"]
        assert (idle["state"], idle["age_s"], idle["idle_s"], idle["cells"]) == ("idle", 5, 5, 1)
        assert idle["last_cell"].startswith("1 [ok] say long")
        assert idle["last_cell"].endswith("…")
        assert "more" not in idle["last_cell"]
        await server.hanging()
        await server.call("execute", code="x = 1", wait=0)
        server.clock.now += 3
        (busy,) = (await server.call("list_sessions")).data["sessions"]
        assert (busy["state"], busy["idle_s"], busy["queued"]) == ("busy", 0, 1)
        assert (busy["running_cell"], busy["running_s"]) == (2, 3)


async def test_the_list_tells_the_losses_of_all_sessions_once(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.opened()
        await server.call("create_session")
        await server.call("execute", code="x = 1", session=server.session.handle)
        await server.died()
        first, second = (await server.call("list_sessions")).data["sessions"]
        assert (first["notices"], first["lost"]) == ([], [])
        assert "Lost: x." in second["notices"][0]
        assert second["lost"] == ["x"]
        again = (await server.call("list_sessions")).data["sessions"]
        assert [each["notices"] for each in again] == [[], []]


async def test_a_closed_session_is_gone_with_its_kernel_and_its_files(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.call("write_file", path="a.txt", content="a")
        session = server.session
        answer = await server.call("close_session")
        assert answer.data["session"] == session.handle
        assert "its files were removed" in answer.data["note"]
        assert not server.source.living
        assert not session.workspace.root.exists()
        assert "never yours" in await server.agent.refused("close_session", session=session.handle)


async def test_variables_are_listed_and_said_to_be_none(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        none = (await server.call("list_variables")).data
        assert (none["variables"], none["note"]) == (
            [], "No variables have been defined in this session.",
        )  # fmt: skip
        await server.call("execute", code="x = 1")
        server.source.omitted = 7
        some = (await server.call("list_variables")).data
        (x,) = some["variables"]
        assert (x["name"], x["type"], x["preview"]) == ("x", "str", "1")
        assert (some["omitted"], some["note"][:7]) == (7, "7 more:")
        assert None not in x.values()
        server.source.mute = True
        assert "did not answer" in await server.agent.refused("list_variables")


async def test_many_variables_are_listed_in_pages_of_lines(tmp_path: Path) -> None:
    async with served(tmp_path, max_output=3000) as server:
        for number in range(60):
            await server.call("execute", code=f"x{number} = 1")
        first = await server.call("list_variables")
        shown = len(first.data["variables"])
        assert len(first.text) + len(json.dumps(first.data)) <= 3000
        assert first.text.startswith("x0  str  1\nx1  str  1\n")
        assert f"{60 - shown} more: read on with offset={shown}" in first.data["note"]
        assert first.data["note"] in first.text
        none = await server.call("list_variables", match="y*")
        assert none.text == "No variable is named like 'y*'."
        assert "count from 0" in await server.agent.refused("list_variables", offset=-1)


async def test_the_list_of_variables_repeats_a_loss_once_and_remarks_on_hibernation(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.died()
        assert "Lost: x." in (await server.call("list_files")).text
        assert "Told before: " in (await server.call("list_variables")).data["note"]
        assert "Told before: " not in (await server.call("list_variables")).data["note"]
        await server.call("execute", code="y = 2")
        server.clock.now += 10
        await IdleHibernator(server.manager, 5.0, server.clock).hibernate_expired()
        asleep = (await server.call("list_variables")).data
        assert [each["name"] for each in asleep["variables"]] == ["y"]
        assert "hibernated" in asleep["note"]
        assert (await server.call("list_sessions")).data["sessions"][0]["state"] == "hibernated"


async def test_info_describes_server_environment_and_kernel(tmp_path: Path) -> None:
    async with served(tmp_path, timeout_s=7.0) as server:
        found = (await server.call("info")).data
        assert found["interpreter"] == str(server.store.python)
        assert found["uv_version"] == "0.9.0"
        limits = {name: found["limits"][name] for name in ("max_cell_timeout_s", "output_chars")}
        assert limits == {"max_cell_timeout_s": 3600, "output_chars": 30_000}
        assert found["server_version"] == __version__
        assert found["sandbox"] == "none"
        assert "workspace 1 GiB by a watchdog" in found["sandbox_enforces"]
        assert "no boundary" in found["sandbox_gaps"][0]
        assert (found["packages"], found["packages_more"], found["sandbox_found"]) == ([], 1, [])
        assert "math" in found["allowed_imports"]
        assert found["limits"]["cell_timeout_s"] == 7
        assert found["workspace"] == str(server.session.workspace.root)
        assert (found["audit_log"], found["ignored_settings"]) == ("off", "")
        await server.call("execute", code="x = 1")
        found = (await server.call("info")).data
        assert found["sandbox_found"] == ["the kernel is a fake"]
        server.store.python.unlink()
        server.store.failure = EnvironmentBuildError("nothing fits")
        without = (await server.call("info")).data
        assert (found["problem"], without["problem"]) == ("", "nothing fits")
        assert (without["interpreter"], without["packages"]) == ("", [])
        alike = ("limits", "policy", "sandbox", "allowed_imports", "workspace", "server_version")
        assert [without[each] for each in alike] == [found[each] for each in alike]
        assert without["python"] == platform.python_version()


async def test_closing_a_session_whose_kernel_is_dead_names_what_was_lost(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.died()
        answer = await server.call("close_session")
        (word,) = answer.data["notices"]
        assert word.endswith("Lost: x.")
        assert answer.text.count("Lost: x") == 1
        assert lost(answer) == ["x"]
        quiet = (await server.call("execute", code="y = 1")).cell["session"]
        answer = await server.call("close_session", session=quiet)
        assert answer.data["notices"] == []
        assert "Lost" not in answer.text


async def test_every_reader_of_an_answer_is_told_of_a_loss_once(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        for tool in ("list_variables", "list_sessions", "list_files", "info", "execute", "reset"):
            await server.call("execute", code="x = 1")
            await server.died()
            answer = await server.call(tool, **({"code": "say y"} if tool == "execute" else {}))
            assert answer.text.count("Lost: x") == 1, answer.text
            structured = answer.result.structured_content
            if structured is not None:
                assert json.dumps(structured).count("Lost: x") == 1, tool
