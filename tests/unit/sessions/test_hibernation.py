"""A session sleeps and wakes: what is saved, what is said, and what happens when it goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import HibernationError, LaunchError
from kernel_mcp.sessions import snapshot
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.hibernation import (
    MAKE_ROOM,
    START_ANEW,
    TRIALS,
    Sleep,
    came_back,
    duration,
    nothing_back,
)
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, deliver, new_manager

pytestmark = [pytest.mark.anyio]


@dataclass
class Notebook:
    """One session with a fake source and clock."""

    session: Session
    source: FakeSource
    clock: FakeClock
    folder: Path

    async def run(self, code: str) -> Cell:
        cell = self.session.submit(code, 0.0)
        with anyio.fail_after(60):
            await cell.finished.wait()
        deliver(self.session, cell)
        return cell

    async def hibernate(self, purpose: str = "", after_s: float = 3600.0) -> bool:
        self.clock.now += after_s
        with anyio.fail_after(60):
            return await self.session.hibernate(purpose)

    @property
    def dumps(self) -> list[Path]:
        return list(self.folder.rglob("*.dump"))


@asynccontextmanager
async def notebook(folder: Path) -> AsyncIterator[Notebook]:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(folder, source, clock)
    async with manager.running():
        yield Notebook(await manager.create(Caller()), source, clock, folder)


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
            f"Back: a, b (2). Not back: lock (thread lock): create it again. {START_ANEW}"
        )
        outcome = cell.meta("s", omitted=0, outputs=[])
        assert (outcome["state_kept"], outcome["lost"]) == (False, ["lock"])
        assert "lock" in outcome["cause"]
        assert nb.dumps == []
        assert (await nb.run("d = 4")).notices == []


async def test_a_dump_is_proven_in_a_kernel_beside_the_old_one(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        assert [request.beside for request in nb.source.requests] == [False, True]
        assert nb.source.asked[0] == "kernel_mcp_dump_request"
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


@pytest.mark.parametrize("trouble", ["unpicklable", "unreadable", "deadly", "dump", "load"])
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


async def test_a_variable_that_ends_the_trial_costs_only_itself(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        nb.source.deadly |= {"bad", "worse"}
        nb.source.unreadable.add("odd")
        for name in ("a", "bad", "odd", "b", "worse", "c"):
            await nb.run(f"{name} = 1")
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.sleep is not None
        assert set(nb.session.sleep.gone) == {"bad", "worse", "odd"}
        assert "exited with code 7" in nb.session.sleep.gone["bad"]
        assert nb.source.living == 0
        cell = await nb.run("d = 1")
        assert set(nb.source.kernels[-1].variables) == {"a", "b", "c", "d"}
        assert "Back: a, b, c (3)" in cell.notices[0]


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
        assert nb.session.sleep is not None
        assert list(nb.session.sleep.gone) == ["bad"]
        assert "did not answer" in nb.session.sleep.gone["bad"]


async def test_the_search_for_what_ends_trials_is_bounded_and_names_the_rest(
    tmp_path: Path,
) -> None:
    async with notebook(tmp_path) as nb:
        names = [f"bad{number}" for number in range(TRIALS + 20)]
        nb.source.deadly |= set(names)
        for name in ("a", *names):
            await nb.run(f"{name} = 1")
        assert await nb.hibernate(MAKE_ROOM)
        assert len(nb.source.kernels) < TRIALS + 5
        assert nb.session.sleep is not None
        assert list(nb.session.sleep.gone) == names
        assert "could not be tried" in nb.session.sleep.gone[names[-1]]
        await nb.run("b = 1")
        assert set(nb.source.kernels[-1].variables) == {"a", "b"}


async def test_copies_and_files_that_end_with_the_kernel_are_told(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.copies, nb.source.files = ["a"], ["/tmp/table.csv"]
        assert await nb.hibernate()
        assert nb.session.sleep is not None
        assert list(nb.session.sleep.gone) == ["/tmp/table.csv"]
        (notice,) = (await nb.run("b = 1")).notices
        assert "Copies now, that shared memory with another object: a." in notice
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
        await nb.session.interrupt()
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


async def test_a_dump_that_cannot_be_read_back_counts_as_not_saved(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.load = "die"
        assert await nb.hibernate(MAKE_ROOM)
        nb.source.load = ""
        cell = await nb.run("b = 1")
        assert "could not be read back in a trial" in cell.notices[0]
        assert set(nb.source.kernels[-1].variables) == {"b"}


async def test_a_kernel_that_dies_while_it_wakes_is_replaced(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        nb.source.load = "die"
        cell = await nb.run("b = 1")
        assert "lost" in cell.notices[0]
        assert set(nb.source.kernels[-1].variables) == {"b"}
        assert nb.source.living == 1


async def test_nothing_is_lost_when_the_server_cannot_try_the_dump(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.refuse = "beside"
        with pytest.raises(LaunchError):
            await nb.hibernate()
        assert nb.session.state == "idle"
        assert nb.dumps == []
        assert (await nb.run("b = 1")).notices == []
        assert set(nb.source.kernels[0].variables) == {"a", "b"}


async def test_a_session_whose_kernel_cannot_start_goes_on_sleeping(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        nb.source.refuse = "own"
        assert isinstance((await nb.run("b = 1")).error, LaunchError)
        assert nb.session.state == "hibernated"
        nb.source.refuse = ""
        assert "Back: a (1)" in (await nb.run("b = 1")).notices[0]


async def test_a_session_without_variables_sleeps_without_a_word(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        assert await nb.hibernate()
        assert nb.session.state == "hibernated"
        assert nb.dumps == []
        assert (await nb.run("a = 1")).notices == []


async def test_reset_forgets_what_was_saved(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        lost = await nb.session.reset(packages=False, files=False)
        assert lost is not None
        assert lost.loss is not None
        assert lost.loss.names == ("a",)
        nb.session.ledger.told([lost])
        assert nb.session.state == "idle"
        assert nb.dumps == []
        assert (await nb.run("b = 1")).notices == []
        assert nb.source.kernels[-1].variables == {"b": "1"}


async def test_the_variables_of_a_sleeping_session_can_be_listed(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        nb.source.unreadable.add("bad")
        await nb.run("a = 1")
        await nb.run("bad = 1")
        await nb.hibernate(MAKE_ROOM)
        found = await nb.session.variables()
        assert [item["name"] for item in found["variables"]] == ["a"]
        assert nb.session.sleep is not None
        assert "bad (ValueError" in nb.session.sleep.remark()
        assert nb.session.state == "hibernated"


async def test_a_kernel_that_announces_too_much_is_not_believed(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.size = 10**15
        await nb.hibernate(MAKE_ROOM)
        assert nb.dumps == []
        assert "could not be saved" in (await nb.run("b = 1")).notices[0]


async def test_a_second_sleep_saves_what_the_first_one_brought_back(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        await nb.hibernate()
        await nb.run("b = 2")
        await nb.hibernate()
        assert "Back: a, b (2)" in (await nb.run("c = 3")).notices[0]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1.2, "1 s"), (59, "59 s"), (60, "1 min"), (3599, "1 h"), (3600, "1 h"),
        (5400, "1 h 30 min"), (47 * 3600, "47 h"), (3 * 86400, "3 days"),
    ],
)  # fmt: skip
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_long_lists_of_names_are_counted() -> None:
    names = [f"variable_{number:05}" for number in range(2000)]
    notice = came_back(Sleep(0.0, 60.0, MAKE_ROOM), names, {}).notice
    assert "after 1 min idle to make room for another session" in notice
    assert "more (2000)" in notice
    assert len(notice) < 10_000


def test_hostile_names_stay_on_one_line() -> None:
    notice = came_back(Sleep(0.0, 60.0), ["a\nb"], {"c\u202e": "x\ny"}).notice
    assert "\n" not in notice
    assert "\u202e" not in notice


def test_a_session_that_had_nothing_says_nothing() -> None:
    assert nothing_back(Sleep(0.0, 60.0), "").notice == ""


async def test_a_dump_that_comes_in_drops_is_not_waited_for(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.dump = "drip"
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.sleep is not None
        assert "something else than it had announced" in nb.session.sleep.failure
        assert nb.source.living == 0


async def test_a_dump_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "TRANSFER_S", 0.0)
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.sleep is not None
        assert "did not hand them over" in nb.session.sleep.failure
        assert nb.source.living == 0


def test_lost_names_are_data_and_all_of_them() -> None:
    lost = {f"variable_{number:05}": "thread lock" for number in range(20_000)}
    waking = came_back(Sleep(0.0, 60.0, lost=lost, files=("/tmp/a",)), ["a"], {"b": "why"})
    assert set(waking.lost) == {*lost, "/tmp/a", "b"}
    assert "more" in waking.notice
    assert len(waking.notice) < 20_000


def test_many_results_of_cells_count_as_one_in_a_notice() -> None:
    lost = {f"Out[{number}]": "generator" for number in range(1, 50)}
    assert (
        "Out[1], Out[2], Out[3], Out[4], Out[5], … (generator)" in Sleep(0, 1, lost=lost).remark()
    )
