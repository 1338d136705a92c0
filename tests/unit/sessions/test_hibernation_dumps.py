"""Dumps that fail, lie or take too long, and what is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.errors import HibernationError, LaunchError
from kernel_mcp.sessions import snapshot
from kernel_mcp.sessions.hibernation import (
    MAKE_ROOM,
    SavedState,
    nothing_restored,
    restored,
)
from kernel_mcp.sessions.introspection import variables_of
from kernel_mcp.sessions.words import duration
from tests.unit.sessions.notebook import notebook

pytestmark = [pytest.mark.anyio]


async def test_no_idle_kernel_is_given_up_for_a_dump_that_cannot_be_read_back(
    tmp_path: Path,
) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.load = "die"
        with pytest.raises(HibernationError, match="could not be read back in a trial"):
            await nb.hibernate()
        assert nb.dumps == []
        nb.source.load = ""
        assert (await nb.run("b = 1")).notices == []
        assert set(nb.source.kernels[0].variables) == {"a", "b"}


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
        nb.session.notifications.mark_delivered([lost])
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
        found = await variables_of(nb.session)
        assert [item["name"] for item in found["variables"]] == ["a"]
        assert nb.session.kernel_state.pending_restore is not None
        assert "bad (ValueError" in nb.session.kernel_state.pending_restore.remark()
        assert nb.session.state == "hibernated"


async def test_variables_that_are_listed_while_the_session_goes_to_sleep_are_those_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")

        async def too_late(*_: object) -> dict[str, object]:
            assert await nb.hibernate(MAKE_ROOM)
            raise LaunchError("The kernel has ended.")

        monkeypatch.setattr(nb.session.kernel, "describe_variables", too_late)
        found = await variables_of(nb.session)
        assert [item["name"] for item in found["variables"]] == ["a"]


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
    notice = restored(SavedState(0.0, 60.0, MAKE_ROOM), names, {}).notice
    assert "after 1 min idle to make room for another session" in notice
    assert "more (2000)" in notice
    assert len(notice) < 10_000


def test_hostile_names_stay_on_one_line() -> None:
    notice = restored(SavedState(0.0, 60.0), ["a\nb"], {"c\u202e": "x\ny"}).notice
    assert "\n" not in notice
    assert "\u202e" not in notice


def test_a_session_that_had_nothing_says_nothing() -> None:
    assert nothing_restored(SavedState(0.0, 60.0), "").notice == ""


async def test_a_dump_that_comes_in_drops_is_not_waited_for(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        nb.source.dump = "drip"
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.kernel_state.pending_restore is not None
        assert (
            "something else than it had announced"
            in nb.session.kernel_state.pending_restore.failure
        )
        assert nb.source.living == 0


async def test_a_dump_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "TRANSFER_S", 0.0)
    async with notebook(tmp_path) as nb:
        await nb.run("a = 1")
        assert await nb.hibernate(MAKE_ROOM)
        assert nb.session.kernel_state.pending_restore is not None
        assert "did not hand them over" in nb.session.kernel_state.pending_restore.failure
        assert nb.source.living == 0


def test_lost_names_are_data_and_all_of_them() -> None:
    lost = {f"variable_{number:05}": "thread lock" for number in range(20_000)}
    result = restored(SavedState(0.0, 60.0, lost=lost, files=("/tmp/a",)), ["a"], {"b": "why"})
    assert set(result.lost) == {*lost, "/tmp/a", "b"}
    assert "more" in result.notice
    assert len(result.notice) < 20_000


def test_many_results_of_cells_count_as_one_in_a_notice() -> None:
    lost = {f"Out[{number}]": "generator" for number in range(1, 50)}
    assert (
        "Out[1], Out[2], Out[3], Out[4], Out[5], … (generator)"
        in SavedState(0, 1, lost=lost).remark()
    )
