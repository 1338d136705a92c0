"""User ids for the kernels of a root server."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.users import PREFERRED_BLOCKS, IdentityPool, IdMap, find_block


def id_map(*rows: tuple[int, int, int]) -> IdMap:
    return IdMap(
        spans=tuple(range(inside, inside + count) for inside, _, count in rows),
        maps_root_to_root=any(inside == outside == 0 for inside, outside, _ in rows),
    )


WHOLE = id_map((0, 0, 4294967295))
CONTAINER = id_map((0, 100000, 65536))


def test_a_map_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "uid_map"
    file.write_text("         0          0 4294967295\n")
    assert IdMap.read(file) == WHOLE


def test_the_whole_machine_gets_a_block_that_nobody_hands_out() -> None:
    assert find_block(WHOLE, WHOLE) == PREFERRED_BLOCKS[0]


def test_a_container_gets_a_block_inside_its_map() -> None:
    assert find_block(CONTAINER, CONTAINER) == PREFERRED_BLOCKS[1]


def test_a_small_map_gives_its_last_ids_and_never_nobody() -> None:
    small = id_map((0, 100000, 2000))
    block = find_block(small, small)
    assert block is not None
    assert block == range(1984, 2000)
    up_to_nobody = id_map((0, 0, 1), (64000, 64000, 1536))
    block = find_block(up_to_nobody, up_to_nobody)
    assert block is not None
    assert 65534 not in block


def test_no_block_where_only_one_id_is_mapped_or_groups_are_not() -> None:
    single = id_map((0, 1000, 1))
    assert find_block(single, single) is None
    assert find_block(WHOLE, single) is None


def test_two_servers_never_share_an_id(tmp_path: Path) -> None:
    servers = [IdentityPool(range(5000, 5003), tmp_path / "uids") for _ in range(2)]
    taken = [(server, server.acquire()) for server in (*servers, servers[0])]
    assert sorted(identity.uid for _, identity in taken) == [5000, 5001, 5002]
    with pytest.raises(SandboxUnavailable, match="close sessions"):
        servers[1].acquire()
    for server, identity in taken:
        server.release(identity)
    again = servers[1].acquire()
    assert again.uid == again.gid == 5000
    servers[1].release(again)


def test_ids_of_other_servers_are_tried_once_and_not_for_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, pool = (IdentityPool(range(5000, 5100), tmp_path / "uids") for _ in range(2))
    for _ in range(50):
        other.acquire()
    tried: list[object] = []
    monkeypatch.setattr(fcntl, "flock", lambda *how, flock=fcntl.flock: tried.append(flock(*how)))
    assert [pool.acquire().uid for _ in range(20)] == list(range(5050, 5070))
    assert len(tried) <= 50 + 20
    assert pool.acquire(5010).uid == 5070
    pool.release(Identity(5060, 5060))
    for uid in range(5071, 5100):
        assert pool.acquire().uid == uid
    assert pool.acquire().uid == 5060


def test_the_preferred_id_is_taken_where_it_is_free(tmp_path: Path) -> None:
    pool = IdentityPool(range(5000, 5003), tmp_path / "uids")
    first = pool.acquire(5002)
    second = pool.acquire(5002)
    outside = pool.acquire(0)
    assert [first.uid, second.uid, outside.uid] == [5002, 5000, 5001]
    for identity in (first, second, outside):
        pool.release(identity)


def test_a_release_closes_the_lock(tmp_path: Path) -> None:
    pool = IdentityPool(range(5000, 5003), tmp_path / "uids")
    before = len(list(Path("/proc/self/fd").iterdir()))
    pool.release(pool.acquire())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_kernels_of_one_holder_share_an_id_until_the_last_has_gone(tmp_path: Path) -> None:
    pool = IdentityPool(range(5000, 5003), tmp_path / "uids")
    first = pool.acquire(0, "a folder")
    second = pool.acquire(first.uid, "a folder")
    stranger = pool.acquire(first.uid, "another folder")
    assert second == first
    assert stranger.uid != first.uid
    pool.release(first)
    assert pool.acquire(first.uid, "another folder").uid != first.uid
    pool.release(second)
    assert pool.acquire(first.uid, "another folder").uid == first.uid
