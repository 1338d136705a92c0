"""Removing environments, and notes that are not believed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from kernel_mcp.environments import store as module
from kernel_mcp.environments.build import Terms
from kernel_mcp.environments.folder import exclusive_now
from kernel_mcp.environments.metadata import EnvironmentSpec, note_file
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import EnvironmentBuildError
from tests.unit.environments.kit import SPEC, Kit

pytestmark = pytest.mark.anyio


async def test_prune_takes_the_unused_and_the_half_built(kit: Kit) -> None:
    store = kit.store()
    old = await store.ensure(SPEC)
    new = await store.ensure(EnvironmentSpec.for_allow(["pandas"]))
    half = kit.cache / "envs/python-3.11.7-half"
    half.mkdir()
    month_ago = time.time() - 31 * 86400
    os.utime(note_file(old.python.parent.parent), (month_ago, month_ago))
    assert len(await store.prune(30 * 86400)) == 1  # what is half built; the old one is in use
    half.mkdir()
    store.release(SPEC)
    removed = await store.prune(30 * 86400)
    assert {path.name for path in removed} == {old.python.parent.parent.name, half.name}
    assert [stored.path for stored in store.stored()] == [new.python.parent.parent]


async def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentBuildError, match="--cache-dir"):
        EnvironmentStore(tmp_path / "file" / "cache")


def test_a_cache_that_others_can_write_to_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.joinpath("c").mkdir()
    tmp_path.joinpath("c").chmod(0o777)
    with pytest.raises(EnvironmentBuildError, match=r"others may write to .* --cache-dir"):
        EnvironmentStore(tmp_path / "c")


async def test_what_another_server_uses_and_is_not_whole_is_an_error(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BROKEN_POLLS", 2)
    env = await kit.store().ensure(SPEC)
    note_file(env.python.parent.parent).unlink()
    with anyio.fail_after(20), pytest.raises(EnvironmentBuildError, match="another server"):
        await kit.store().ensure(SPEC)


async def test_the_note_says_neither_what_is_run_nor_what_can_be_read(kit: Kit) -> None:
    store = kit.store()
    env = await store.ensure(SPEC)
    note = note_file(env.python.parent.parent)
    content = json.loads(note.read_text())
    content["interpreter"] |= {"executable": "/bin/evil", "prefix": "/root", "exec_prefix": "/"}
    note.write_text(json.dumps(content))
    assert await store.ensure(SPEC) == env
    assert await kit.store().ensure(SPEC) == env


async def test_a_note_that_a_package_brings_does_not_count(kit: Kit) -> None:
    with pytest.raises(EnvironmentBuildError):
        await kit.store({"FAKE_UV_ERROR": "no", "FAKE_UV_FILES": "kernel-mcp.json"}).ensure(SPEC)
    assert kit.store().stored() == []


@dataclass(frozen=True)
class Evictions:
    """Agents' environments of 1 MiB each, used at these ages in seconds."""

    kit: Kit

    async def made(self, store: EnvironmentStore, name: str, age_s: float) -> Path:
        env = await store.ensure(EnvironmentSpec.for_allow([name]), silence, Terms(agent=True))
        folder = env.python.parent.parent
        content = json.loads(note_file(folder).read_text())
        note_file(folder).write_text(json.dumps({**content, "size": 1 << 20}))
        then = time.time() - age_s
        os.utime(note_file(folder), (then, then))
        return folder


async def test_agents_environments_go_oldest_first_when_they_are_too_many(kit: Kit) -> None:
    store = kit.store(most_bytes=3 << 20)
    made = Evictions(kit)
    folders = [await made.made(store, name, 1000.0 - at) for at, name in enumerate("abcd")]
    assert store.evict() == []  # all of them are in use
    for name in "abcd":
        store.release(EnvironmentSpec.for_allow([name]))
    assert kit.store(most_bytes=3 << 20).evict() == folders[:1]
    assert [found.path for found in store.stored()] == folders[:0:-1]


async def test_what_another_server_uses_is_never_removed(kit: Kit) -> None:
    other, made = kit.store(), Evictions(kit)
    used, idle = [await made.made(other, name, 10.0) for name in ("used", "idle")]
    other.release(EnvironmentSpec.for_allow(["idle"]))
    store = kit.store(most_bytes=1)
    assert store.evict() == [idle]
    assert await store.prune(0.0) == []
    assert used.exists()
    other.release(EnvironmentSpec.for_allow(["used"]))
    assert store.evict() == [used]


async def test_agents_environments_go_when_they_are_old_and_the_operators_stay(kit: Kit) -> None:
    store, made = kit.store(), Evictions(kit)
    old = await made.made(store, "old", 31 * 86400.0)
    await made.made(store, "new", 29 * 86400.0)
    wanted = await made.made(store, "wanted", 0.0)
    await store.ensure(EnvironmentSpec.for_allow(["wanted"]))  # by the operator, as by agents
    os.utime(note_file(wanted), (0, 0))
    for name in ("old", "new", "wanted"):
        store.release(EnvironmentSpec.for_allow([name]))
    assert store.evict() == [old]


async def test_a_cache_of_uv_beyond_its_half_is_emptied_unless_it_is_in_use(kit: Kit) -> None:
    store = kit.store(most_bytes=1000)
    cache = store.build_sandbox.uv.cache
    (cache / "archive-v0").mkdir(parents=True)
    (cache / "archive-v0/file").write_bytes(bytes(600))
    (cache / ".tmpStopped").touch()
    with exclusive_now(cache / ".lock"):
        store.evict()
        assert (cache / "archive-v0").exists()
    store.evict()
    assert [path.name for path in cache.iterdir()] == [".lock"]
