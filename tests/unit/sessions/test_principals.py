"""Quotas of principals, none of which takes from another."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.errors import SessionLimitReached, SessionNotFound, WorkspaceError
from kernel_mcp.identity import LOCAL, RUN, Forbidden, Principal
from kernel_mcp.linux.proc import Usage
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.principals import Others, Overseer, Principals, Use, weights
from kernel_mcp.units import GIB, MIB
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource, new_manager

pytestmark = pytest.mark.anyio

SHARED: dict[str, Any] = {"http": ("127.0.0.1", 0), "tokens": Path("/tokens")}


def caller(name: str, *, client: str = "", known: bool = True, **quotas: Any) -> Caller:
    who = Principal(name, quotas=Quotas(**quotas), grants=())
    default = "default" if known else ""
    return Caller(name, default, who, known, client, ResponseContext())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def manager(folder: Path, clock: FakeClock, **settings: Any) -> SessionManager:
    return new_manager(folder, FakeSource(), clock, **{**SHARED, **settings})


def test_no_principal_has_all_sessions_where_there_may_be_several() -> None:
    alone = Principals(Settings(max_sessions=9))
    assert alone.quotas(LOCAL).sessions == 9
    several = Principals(Settings(max_sessions=9, **SHARED))
    assert (several.quotas("ada").sessions, several.quotas("ada").asleep) == (5, 32)


def test_a_principals_own_quotas_are_before_those_of_the_server() -> None:
    found = Principals(Settings(quotas=Quotas(sessions=3, cells=7)))
    found.seen(Principal("ada", quotas=Quotas(sessions=1)))
    assert (found.quotas("ada").sessions, found.quotas("ada").cells) == (1, 7)
    assert found.quotas("ben").sessions == 3


def test_a_session_has_no_more_than_its_principal() -> None:
    own = Limits(memory_bytes=4 * GIB, cpus=2.0)
    found = Principals(Settings(quotas=Quotas(memory=GIB, cpu=0.5)))
    limits = found.limits("ada", None, own)
    assert limits is not None
    assert (limits.memory_bytes, limits.cpus) == (GIB, 0.5)
    less = found.limits("ada", Limits(memory_bytes=64 * MIB, cpus=0.1), own)
    assert less is not None
    assert (less.memory_bytes, less.cpus) == (64 * MIB, 0.1)
    assert Principals(Settings()).limits("ada", None, own) is None


async def test_one_principals_sessions_never_make_room_for_anothers(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada, ben = caller("ada"), caller("ben", sessions=9)
    sessions = manager(tmp_path, clock, max_sessions=4)
    async with sessions.running():
        hers = await sessions.create(ada)
        his = [await sessions.create(ben) for _ in range(3)]
        clock.now += 60
        more = [await sessions.create(ben) for _ in range(3)]
        assert hers.lifecycle.awake
        assert [each.lifecycle.awake for each in (*his, *more)] == [False] * 3 + [True] * 3


async def test_who_has_nothing_to_put_to_sleep_waits_for_no_one_elses(
    tmp_path: Path, clock: FakeClock
) -> None:
    sessions = manager(tmp_path, clock, max_sessions=2)
    async with sessions.running():
        others = [await sessions.create(caller(name)) for name in ("ada", "ben")]
        with pytest.raises(SessionLimitReached, match="no room for one more now") as raised:
            await sessions.create(caller("cyd"))
        assert "ada" not in str(raised.value)
        assert [each.state for each in others] == ["new", "new"]


async def test_a_quota_of_sessions_is_named_with_what_to_do(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada = caller("ada", sessions=1)
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        (await sessions.create(ada)).submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(SessionLimitReached, match=r"quota `sessions`.*close_session"):
            await sessions.create(ada)
        await sessions.create(caller("ben"))


async def test_sleepers_are_dropped_among_ones_own_alone(tmp_path: Path, clock: FakeClock) -> None:
    ada, ben = caller("ada"), caller("ben", sessions=1, asleep=1)
    sessions = manager(tmp_path, clock, quotas=Quotas(asleep=2))
    async with sessions.running():
        hers = await sessions.create(ada)
        await sessions.admission.hibernate(hers)
        for _ in range(4):
            await sessions.create(ben)
            clock.now += 1
        assert hers.state == "hibernated"
        own = sessions.directory.owned_by(ben.principal)
        asleep = [each for each in own if each.state == "hibernated"]
        assert len(asleep) == 1


async def test_copies_of_kernels_are_given_up_among_ones_own_alone(
    tmp_path: Path, clock: FakeClock
) -> None:
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        hers, also = [await sessions.create(caller("ada")) for _ in range(2)]
        his = await sessions.create(caller("ben"))
        copies, more, other = [
            each.kernel_state.checkpoints._idle_checkpoints for each in (hers, also, his)
        ]
        assert copies is more is not other


async def test_foreign_and_unknown_sessions_have_one_answer(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada, ben = caller("ada"), caller("ben")
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        hers = await sessions.create(ada, name="hers")
        gone = await sessions.create(ada, name="gone")
        await sessions.close(gone)
        texts = set()
        for key in (hers.handle, "hers", gone.handle, "gone", "s-unknown00000", "never"):
            with pytest.raises(SessionNotFound) as raised:
                await sessions.resolve(ben, key)
            assert type(raised.value) is SessionNotFound
            texts.add(str(raised.value).replace(repr(key), "X"))
        assert len(texts) == 1
        assert sessions.directory.owned_by(ben.principal) == []
        same = await sessions.create(ben, name="hers")
        assert same is not hers
        assert await sessions.resolve(ben, "hers") is same


async def test_each_principal_has_a_default_session_and_its_clients_share_it(
    tmp_path: Path, clock: FakeClock
) -> None:
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        first = await sessions.resolve(caller("ada", client="a"), "")
        assert await sessions.resolve(caller("ben", client="a"), "") is not first
        clock.now += 180
        other = caller("ada", client="b")
        assert await sessions.resolve(other, "") is first
        (told,) = other.response.remarks
        assert told.startswith("default session, last used by another client 3 min ago; create_ses")
        for client in ("a", "b"):
            again = caller("ada", client=client)
            assert await sessions.resolve(again, "") is first
            assert again.response.remarks == []


async def test_who_cannot_be_told_apart_gets_a_handle_to_pass_on(
    tmp_path: Path, clock: FakeClock
) -> None:
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        first, second = caller(LOCAL, known=False), caller(LOCAL, known=False)
        one = await sessions.resolve(first, "")
        two = await sessions.resolve(second, "")
        assert one is not two
        preamble = (
            f'[session {one.handle}: pass session="{one.handle}" to keep using these variables]'
        )
        assert first.response.preamble == preamble
        third = caller(LOCAL, known=False)
        assert await sessions.resolve(third, one.handle) is one
        assert third.response.preamble == ""


async def test_more_cells_at_once_than_the_quota_are_refused(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada = caller("ada", cells=2)
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        one, two = await sessions.create(ada), await sessions.create(ada)
        sessions.check_cells(ada)
        one.submit("a", 60)
        two.submit("b", 60)
        with pytest.raises(SessionLimitReached, match="quota `cells`"):
            sessions.check_cells(ada)
        sessions.check_cells(caller("ben", cells=2))


async def test_workspaces_of_one_principal_share_its_disk(tmp_path: Path, clock: FakeClock) -> None:
    ada = caller("ada", disk=2 * MIB)
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        one, two = await sessions.create(ada), await sessions.create(ada)
        one.workspace.quota.most = two.workspace.quota.most = 64 * MIB
        work = anyio.to_thread.run_sync
        await work(one.workspace.write_file, "a", "x" * MIB)
        with pytest.raises(WorkspaceError, match="quota `disk`"):
            await work(two.workspace.write_file, "b", "x" * (MIB + MIB // 2))
        await work(two.workspace.write_file, "b", "x" * (MIB // 2))
        his = await sessions.create(caller("ben"))
        await work(his.workspace.write_file, "b", "x" * 3 * MIB)


async def test_kept_workspaces_are_in_a_folder_of_their_principal(
    tmp_path: Path, clock: FakeClock
) -> None:
    sessions = new_manager(tmp_path, FakeSource(), clock, keep=True, by_principal=True, **SHARED)
    async with sessions.running():
        hers = await sessions.create(caller("ada"), name="data")
        his = await sessions.create(caller("a/../b"), name="data")
    assert hers.workspace.root == tmp_path / "w/ada/data"
    assert his.workspace.root.parent.parent == tmp_path / "w"
    assert his.workspace.root.parent.name.startswith("p-")


def test_a_token_without_the_scope_adds_no_packages() -> None:
    with pytest.raises(Forbidden, match="kernel:install"):
        Principal("ada", frozenset({RUN})).require("kernel:install", "Adding packages")
    Principal("ada").require("kernel:install", "Adding packages")


def test_principals_have_equal_parts_however_many_kernels_compute() -> None:
    class Named:
        def __init__(self, handle: str) -> None:
            self.handle = handle

    def kernels(owner: str, *own: float) -> list[Any]:
        return [(Named(f"{owner}{number}"), weight) for number, weight in enumerate(own)]

    found = weights({"a": kernels("a", 0.125, 0.125, 0.125, 0.125), "b": kernels("b", 0.125)})
    assert sum(found[f"a{number}"] for number in range(4)) == found["b0"]
    found = weights({"a": kernels("a", 1.0, 0.125), "b": kernels("b", 1.0)})
    assert found["a0"] + found["a1"] == pytest.approx(found["b0"])
    assert found["a0"] == pytest.approx(8 * found["a1"])


async def test_who_is_dismissed_has_no_session_there_until_it_comes_back(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada, ben = caller("ada"), caller("ben")
    sessions = manager(tmp_path, clock)
    async with sessions.running():
        hers, his = await sessions.create(ada), await sessions.create(ben)
        sessions.dismiss("ada")
        assert (hers.state, his.state) == ("closed", "new")
        with pytest.raises(SessionNotFound, match="your access was changed"):
            await sessions.create(ada)  # as one that was on its way
        with anyio.fail_after(60):
            while sessions.directory.owned_by(ada.principal):  # files are removed in threads
                await anyio.sleep(0.01)
        sessions.welcome("ada")
        assert (await sessions.create(ada)).state == "new"


class Meter:
    """The limits of a kernel, as a quota of its principal meets them."""

    def __init__(self) -> None:
        self.awake, self.weight = True, 1.0
        self.quotas = [self]
        self.measured, self.bytes = self, 0
        self.interrupted: list[str] = []
        self.killed: list[str] = []
        self.weighed: tuple[float, float] | None = None

    def exceed(self, cause: str) -> None:
        self.interrupted.append(cause)

    def kill_for(self, cause: str) -> None:
        self.killed.append(cause)

    def weigh(self, weight: float, cpus: float) -> None:
        self.weighed = (weight, cpus)


class Kernel:
    def __init__(self, meter: Meter) -> None:
        self.handle = self
        self.exit = None
        self.limits = meter

    def usage(self) -> Usage:
        return Usage(memory_bytes=self.limits.bytes)


class Working:
    """A session whose cell runs."""

    def __init__(self, handle: str, owner: str) -> None:
        self.handle, self.owner, self.state = handle, owner, "busy"
        self.meter = Meter()
        self.kernel = Kernel(self.meter)


def working(handle: str, owner: str) -> Any:
    return Working(handle, owner)


def test_the_cell_that_writes_beyond_the_quota_is_interrupted_and_one_that_makes_room_is_not() -> (
    None
):
    writer, tidy = working("s-1", "ada"), working("s-2", "ada")
    found = Overseer(Principals(Settings(quotas=Quotas(disk=100))), lambda: [writer, tidy])
    writer.meter.bytes, tidy.meter.bytes = 30, 60
    found.look()
    assert writer.meter.interrupted == tidy.meter.interrupted == []
    writer.meter.bytes = 80
    found.look()
    (cause,) = writer.meter.interrupted
    assert "quota `disk`" in cause
    assert tidy.meter.interrupted == []
    tidy.meter.bytes = 50
    found.look()
    assert len(writer.meter.interrupted) == 1
    assert tidy.meter.interrupted == []


def test_the_processors_of_a_quota_are_those_of_all_kernels_that_compute() -> None:
    one, two = working("s-1", LOCAL), working("s-2", LOCAL)
    Overseer(Principals(Settings(quotas=Quotas(cpu=1.5))), lambda: [one, two]).share()
    assert one.meter.weighed == two.meter.weighed == (1.0, 0.75)


class Elsewhere(Others):
    """Another server, where ada has sessions, each of which has been idle for some seconds."""

    def __init__(self, *idle_s: float, cells: int = 0) -> None:
        self.idle_s = sorted(idle_s)
        self.stale = 0
        """Sessions that it has said to have, and has no more."""
        self.given_up: list[float] = []
        self.cells = cells

    def use(self, principal: str) -> Use:
        return Use(sessions=len(self.idle_s), cells=self.cells)

    async def claim(self, principal: str, kind: str, own: int, most: int) -> bool:
        return own + len(self.idle_s) + self.stale <= most

    async def idlest(
        self, principal: str, kind: str, without: Collection[str]
    ) -> tuple[str, float] | None:
        self.stale = 0
        return ("there", self.idle_s[-1]) if self.idle_s else None

    async def evict_one(self, where: str, principal: str, kind: str) -> bool:
        self.given_up.append(self.idle_s.pop())
        return True


async def test_a_quota_of_sessions_counts_those_on_other_servers_and_the_idlest_of_all_gives_way(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada, there = caller("ada", sessions=3), Elsewhere(10, 100)
    sessions = new_manager(tmp_path, FakeSource(), clock, others=there)
    async with sessions.running():
        first = await sessions.create(ada)
        clock.now += 60
        second = await sessions.create(ada)
        assert there.given_up == [100]
        await sessions.create(ada)
        assert there.given_up == [100]
        assert [each.lifecycle.awake for each in (first, second)] == [False, True]


async def test_what_others_have_no_more_makes_nothing_give_way(
    tmp_path: Path, clock: FakeClock
) -> None:
    ada, there = caller("ada", sessions=1), Elsewhere()
    there.stale = 1
    sessions = new_manager(tmp_path, FakeSource(), clock, others=there)
    async with sessions.running():
        await sessions.create(ada)
        assert there.given_up == []


async def test_a_quota_that_nobody_gave_is_that_of_each_server(
    tmp_path: Path, clock: FakeClock
) -> None:
    there = Elsewhere(*range(100))
    sessions = new_manager(tmp_path, FakeSource(), clock, others=there)
    async with sessions.running():
        await sessions.create(caller("ada"))
        assert there.given_up == []


async def test_who_has_all_sessions_in_use_is_refused_wherever_they_are(
    tmp_path: Path, clock: FakeClock
) -> None:
    class Busy(Elsewhere):
        async def idlest(
            self, principal: str, kind: str, without: Collection[str]
        ) -> tuple[str, float] | None:
            return None

    sessions = new_manager(tmp_path, FakeSource(), clock, others=Busy(0, 0))
    async with sessions.running():
        with pytest.raises(SessionLimitReached, match=r"All 2 sessions .*quota `sessions`"):
            await sessions.create(caller("ada", sessions=2))
        assert sessions.sessions == []


def test_cells_on_other_servers_count() -> None:
    found = Principals(Settings(quotas=Quotas(cells=4)), Elsewhere(cells=3))
    found.check_cells("ada", ())
    found = Principals(Settings(quotas=Quotas(cells=4)), Elsewhere(cells=4))
    with pytest.raises(SessionLimitReached, match="4 cells of yours"):
        found.check_cells("ada", ())


async def test_a_kernel_that_has_ended_has_no_memory(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeKernel, "usage", lambda _kernel: Usage(memory_bytes=800))
    sessions = new_manager(tmp_path, FakeSource(), clock)
    async with sessions.running():
        session = await sessions.create(caller("ada", memory=1000))
        await session.submit("a = 1", 0.0).finished.wait()
        found = sessions.admission.uses()["ada"]
        assert (found.memory, found.largest) == (800, 800)
        assert session.kernel is not None
        session.kernel.kill()
        found = sessions.admission.uses()["ada"]
        assert (found.memory, found.largest) == (0, 0)
