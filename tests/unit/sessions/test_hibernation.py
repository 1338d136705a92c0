"""Sessions that hibernate and wake, with kernels that answer as they are told."""

from __future__ import annotations

import resource
from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import HibernationError
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.sessions import snapshot
from kernel_mcp.sessions.hibernation import (
    IDLE,
    MAKE_ROOM,
    TRIALS,
)
from kernel_mcp.sessions.session import RESTORE_DESCRIPTORS
from kernel_mcp.sessions.words import described, listing, reasons
from tests.unit.sessions.notebook import notebook

pytestmark = [pytest.mark.anyio]


async def test_variables_come_back_and_the_answer_names_them(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        nb.source.unpicklable["lock"] = "thread lock"
        for code in ("a = 1", "b = 2", "lock = x"):
            await nb.run(code)
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.state == "hibernated"
        assert nb.source.living == 0
        assert len(nb.dumps) == 1
        cell = await nb.run("c = 3")
        assert nb.session.state == "idle"
        assert nb.source.kernels[-1].variables == {"a": "1", "b": "2", "c": "3"}
        (notice,) = cell.notices
        assert notice == (
            "This session had been hibernated after 1 h idle to make room for another session. "
            f"Back: a, b (2). Not back: lock (thread lock): create it again. {Kernel.starts_anew}"
        )
        outcome = cell.meta("s", omitted=0, outputs=[])
        assert (outcome["state_kept"], outcome["lost"]) == (False, ["lock"])
        assert "lock" in outcome["cause"]
        assert nb.dumps == []
        assert (await nb.run("d = 4")).notices == []


@pytest.mark.parametrize("reason", [IDLE, MAKE_ROOM])
async def test_no_session_is_put_to_sleep_that_lacks_descriptors_to_wake(
    tmp_path: Path, reason: str
) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + RESTORE_DESCRIPTORS - 4, hard))
        try:
            with pytest.raises(HibernationError, match="too few to bring the session back"):
                await nb.hibernate(reason)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert nb.session.state == "idle"
        await nb.run("b = 2")
        assert nb.source.kernels[0].variables == {"a": "1", "b": "2"}
        assert await nb.hibernate(reason)


async def test_a_dump_is_proven_in_a_kernel_beside_the_old_one(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        assert [request.beside for request in nb.source.requests] == [False, True]
        assert nb.source.asked[:2] == ["kernel_mcp_save_request", "kernel_mcp_dump_request"]
        assert nb.source.asked[-1] == "kernel_mcp_load_request"


async def test_an_unreadable_variable_costs_only_itself(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        nb.source.unreadable |= {"bad", "worse"}
        for name in ("a", "bad", "b", "worse", "c"):
            await nb.run(f"{name} = 1")
        await nb.hibernate(MAKE_ROOM)
        cell = await nb.run("d = 1")
        assert set(nb.source.kernels[-1].variables) == {"a", "b", "c", "d"}
        assert "Back: a, b, c (3)" in cell.notices[0]
        assert "bad (ValueError: cannot be read), worse (ValueError" in cell.notices[0]


@pytest.mark.parametrize("trouble", ["unpicklable", "unreadable", "fatal", "dump", "load"])
async def test_a_kernel_stays_when_something_would_be_lost_and_nothing_forces_it_out(
    tmp_path: Path, trouble: str
) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.run("bad = 2")
        if trouble == "unpicklable":
            nb.source.unpicklable["bad"] = "thread lock"
        elif trouble == "dump":
            nb.source.dump = "drip"
        elif trouble == "load":
            nb.source.load = "die"
        else:
            getattr(nb.source, trouble).add("bad")
        with pytest.raises(HibernationError):
            await nb.hibernate()
        assert nb.session.state == "idle"
        assert nb.dumps == []
        assert nb.source.living == 1
        cell = await nb.run("b = 3")
        assert cell.notices == []
        assert set(nb.source.kernels[0].variables) == {"a", "bad", "b"}


async def test_a_variable_that_ends_the_kernel_which_wakes_costs_only_itself(
    tmp_path: Path,
) -> None:
    async with notebook(tmp_path) as nb:
        nb.source.fatal |= {"bad", "worse"}
        nb.source.unreadable.add("odd")
        for name in ("a", "bad", "odd", "b", "worse", "c"):
            await nb.run(f"{name} = 1")
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.source.living == 0
        cell = await nb.run("d = 1")
        assert nb.source.living == 1
        assert set(nb.source.kernels[-1].variables) == {"a", "b", "c", "d"}
        assert "Back: a, b, c (3)" in cell.notices[0]
        assert "bad (ended the kernel that read it" in cell.notices[0]
        assert "odd (ValueError: cannot be read)" in cell.notices[0]
        assert set(cell.meta("s", omitted=0, outputs=[])["lost"]) == {"bad", "worse", "odd"}


async def test_a_variable_whose_reading_never_ends_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.01)
    monkeypatch.setattr(snapshot, "ANSWER_S", 0.01)
    async with notebook(tmp_path) as nb:
        nb.source.stuck.add("bad")
        for name in ("a", "bad", "b"):
            await nb.run(f"{name} = 1")
        assert await nb.hibernate(MAKE_ROOM)
        cell = await nb.run("c = 1")
        assert set(nb.source.kernels[-1].variables) == {"a", "b", "c"}
        assert "bad (ended the kernel that read it: its kernel did not answer" in cell.notices[0]


async def test_the_search_for_what_ends_kernels_is_bounded_and_names_the_rest(
    tmp_path: Path,
) -> None:
    async with notebook(tmp_path) as nb:
        names = [f"bad{number}" for number in range(TRIALS + 20)]
        nb.source.fatal |= set(names)
        for name in ("a", *names):
            await nb.run(f"{name} = 1")
        assert await nb.hibernate(MAKE_ROOM)
        cell = await nb.run("b = 1")
        assert len(nb.source.kernels) < TRIALS + 5
        assert set(nb.source.kernels[-1].variables) == {"a", "b"}
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == names
        assert f"{names[-1]} (could not be tried" in cell.notices[0]


async def test_changes_and_files_that_end_with_the_kernel_are_told(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.changed, nb.source.files = {"a": "a copy now"}, ["/tmp/table.csv"]
        assert await nb.hibernate()
        assert nb.session.kernel_state.pending_restore is not None
        assert list(nb.session.kernel_state.pending_restore.gone) == ["/tmp/table.csv"]
        (notice,) = (await nb.run("b = 1")).notices
        assert "Not as before: a (a copy now)." in notice
        assert "Files that ended with the kernel" in notice
        assert "/tmp/table.csv (1)" in notice


async def test_a_cell_that_comes_meanwhile_keeps_the_kernel(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.dump = "hang"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nb.hibernate)
            with anyio.fail_after(60):
                await nb.source.dumping.wait()
                cell = await nb.run("b = 2")
        assert nb.session.state == "idle"
        assert cell.notices == []
        assert nb.source.kernels[0].variables == {"a": "1", "b": "2"}
        assert nb.dumps == []


async def test_a_busy_session_is_not_hibernated(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        nb.session.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert not await nb.hibernate()
        await nb.session.scheduler.interrupt()
        assert nb.session.state == "idle"


async def test_a_kernel_that_dies_while_it_saves_is_told_honestly(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.dump = "die"
        assert await nb.hibernate(MAKE_ROOM)
        cell = await nb.run("b = 1")
        assert (
            "could not be saved: its kernel ended meanwhile (exited with code 7)" in cell.notices[0]
        )
        assert "lost" in cell.notices[0]
        outcome = cell.meta("s", omitted=0, outputs=[])
        assert (outcome["state_kept"], outcome["lost"]) == (False, ["a"])
        assert nb.dumps == []


async def test_a_kernel_that_does_not_stop_saving_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.05)
    monkeypatch.setattr(snapshot, "ANSWER_S", 0.05)
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.dump = "stuck"
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.source.living == 0
        assert "did not answer within" in (await nb.run("b = 1")).notices[0]


def test_no_name_and_no_reason_is_taken_for_the_words_around_it() -> None:
    assert (
        listing(["df", "_", "größe", "Out[3]", "/tmp/a.txt"]) == "df, _, größe, Out[3], /tmp/a.txt"
    )
    assert listing(["x). Not back: all", "a\x1b[2J", "it's"]) == (
        "'x). Not back: all', 'a\\\\x1b[2J', \"it's\""
    )
    assert reasons({"a": "holds (b)", "c": "d) and e (f"}) == "a (holds (b)), c ('d) and e (f')"
    assert described(["n (9 G)"], [{"name": "n (9 G)", "shape": [7]}]) == "'n (9 G)' (7)"
