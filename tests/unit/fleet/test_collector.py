"""Entries removed from the store of a fleet, and those that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.fleet.collector import SETTLED_S, Collector
from kernel_mcp.fleet.session_table import (
    DATA,
    NAMED,
    NAMES,
    SESSIONS,
    SessionRow,
    SessionTable,
    VersionedRow,
    data_of,
)
from kernel_mcp.fleet.signed import NotOurs, Signed
from kernel_mcp.fleet.storage import FolderStorage, ObjectStorage, Storage
from tests.unit.fake_kernels import FakeClock

pytestmark = pytest.mark.anyio

KEPT_S = 1000 * SETTLED_S
KEY = b"key"


class Store:
    """A store with two nodes, one of which is over."""

    def __init__(self, place: Storage) -> None:
        self.place = place
        signed = Signed(place, KEY)
        self.there, self.lost = (
            SessionTable(signed, "there", "1"),
            SessionTable(signed, "lost", "1"),
        )
        self.clock = FakeClock()
        self.collector = Collector(
            self.there, self._is_over, most_s=KEPT_S, clock=self.clock, now=self.clock
        )

    async def _is_over(self, node: str, _life: str) -> bool:
        return node == "lost"

    def files(self, *folders: str) -> int:
        return sum(
            len(self.place.names(f"{folder}/{name}"))
            for folder in folders or (SESSIONS, NAMES, DATA)
            for name in self.place.names(folder)
        )

    def opened(self, rows: SessionTable, handle: str, *, moment: float = 0.0) -> VersionedRow:
        known = rows.open(SessionRow(handle, "ada", name=f"name of {handle}"))
        self.place.create(data_of(handle, "digest"), b"saved")
        return rows.write(VersionedRow(known.version, replace(known.row, saved={"moment": moment})))

    async def pass_by(self, seconds: float) -> None:
        await self.collector.collect()
        self.clock.now += seconds
        await self.collector.collect()


def objects(tmp_path: Path) -> Storage:
    fsspec = pytest.importorskip("fsspec")
    return ObjectStorage(fsspec.filesystem("memory"), f"/{tmp_path.name}")


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(FolderStorage(tmp_path / "s") if request.param == "folder" else objects(tmp_path))


async def test_a_session_that_has_ended_leaves_nothing_once_nobody_can_go_on_with_it(
    store: Store,
) -> None:
    known = store.opened(store.there, "s-ended")
    store.there.forget(known)
    await store.pass_by(SETTLED_S - 1)
    assert store.files() > 0
    store.clock.now += 2
    await store.collector.collect()
    assert store.files() == 0
    assert store.there.find("s-ended") is None


async def test_sessions_of_nodes_that_are_there_stay_for_ever(store: Store) -> None:
    store.opened(store.there, "s-open", moment=1.0)
    await store.pass_by(100 * KEPT_S)
    found = store.there.find_by_name("ada", NAMED, "name of s-open")
    assert found is not None
    assert found.row.handle == "s-open"
    assert store.files(DATA) == 1


@pytest.mark.parametrize("let_go", [True, False], ids=["let go", "lost"])
async def test_a_session_that_nobody_calls_goes_once_it_was_kept_for_long_enough(
    store: Store, let_go: bool
) -> None:
    known = store.opened(store.there if let_go else store.lost, "s-left")
    if let_go:
        rows = store.there
        rows.write(VersionedRow(known.version, known.row.left(store.clock(), ended=True)))
    await store.pass_by(KEPT_S - 1)
    assert store.there.find("s-left") is not None
    store.clock.now += 2
    await store.collector.collect()
    assert store.there.find("s-left") is None
    assert store.files(DATA) == 0
    await store.pass_by(SETTLED_S + 1)
    assert store.files() == 0


@pytest.mark.parametrize("let_go", [True, False], ids=["let go", "lost"])
async def test_one_that_a_node_had_for_long_is_kept_as_long_once_none_has_it(
    store: Store, let_go: bool
) -> None:
    known = store.opened(store.there if let_go else store.lost, "s-slept", moment=1.0)
    store.clock.now = 10 * KEPT_S
    if let_go:
        store.there.write(VersionedRow(known.version, known.row.left(store.clock.now, ended=True)))
    await store.pass_by(KEPT_S - 1)
    found = store.there.find("s-slept")
    assert found is not None
    assert (found.row.ended, found.row.since) == (let_go, 10 * KEPT_S)
    taken = store.there.take(found)
    await store.pass_by(10 * KEPT_S)
    found = store.there.find("s-slept")
    assert found is not None
    assert found.row == replace(taken.row, saved=found.row.saved)
    assert taken.row.since == 0


async def test_what_is_taken_while_it_would_go_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = store.opened(store.there, "s-late")
    found = store.there.write(VersionedRow(known.version, known.row.left(1.0, ended=True)))
    store.clock.now = 10 * KEPT_S
    forget = store.there.forget

    def late(known: VersionedRow) -> None:
        store.there.take(found)
        forget(known)

    monkeypatch.setattr(store.there, "forget", late)
    await store.collector.collect()
    assert store.there.find("s-late") is not None
    assert store.files(DATA) == 1


async def test_a_node_that_has_just_begun_knows_how_long_it_was_kept(store: Store) -> None:
    store.clock.now = 10 * KEPT_S
    for handle, since in (("s-old", -1), ("s-young", 1)):
        known = store.opened(store.there, handle)
        left = known.row.left(store.clock.now - KEPT_S + since, ended=True)
        store.there.write(VersionedRow(known.version, left))
    await store.collector.collect()
    assert store.there.find("s-old") is None
    assert store.there.find("s-young") is not None


async def test_what_was_saved_without_a_row_goes(store: Store) -> None:
    store.place.create(data_of("s-none", "digest"), b"saved")
    await store.pass_by(SETTLED_S - 1)
    assert store.files() == 1
    store.clock.now += 2
    await store.collector.collect()
    assert store.files() == 0


async def test_what_somebody_else_has_written_stays_and_stops_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    SessionTable(Signed(store.place, b"another key"), "there", "1").open(
        SessionRow("s-forged", "eve")
    )
    store.there.forget(store.opened(store.there, "s-ended"))
    await store.pass_by(SETTLED_S + 1)
    assert store.files() == 1
    assert "was not written with a key" in caplog.text


async def test_what_has_an_old_key_is_signed_with_the_new_one_unless_a_node_has_it(
    store: Store,
) -> None:
    held, released = (store.opened(store.there, f"s-{name}") for name in ("held", "released"))
    store.there.write(
        VersionedRow(released.version, released.row.left(store.clock.now, ended=True))
    )
    rotated = SessionTable(Signed(store.place, b"new", KEY), "there", "1")
    collector = Collector(rotated, store._is_over, most_s=KEPT_S, now=store.clock)
    assert await collector.collect() == 0
    new = SessionTable(Signed(store.place, b"new"), "there", "1")
    found = new.find_by_name("ada", NAMED, "name of s-released")
    assert found is not None
    assert found.row.saved == {"moment": 0.0}
    with pytest.raises(NotOurs):
        new.find("s-held")
    rotated.write(held)  # its node signs with the new key when it saves
    assert new.find_by_name("ada", NAMED, "name of s-held") is not None


async def test_only_the_first_node_looks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    looks: list[bool] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            raise KeyboardInterrupt

    async def collect() -> int:
        looks.append(True)
        return 0

    async def is_first() -> bool:
        return len(waits) == 2

    monkeypatch.setattr("kernel_mcp.fleet.collector.anyio.sleep", sleep)
    monkeypatch.setattr(store.collector, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        await store.collector.run(is_first)
    assert looks == [True]
