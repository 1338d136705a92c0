"""Building, sharing and removing environments, with a stand-in for uv."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from kernel_mcp.environments import EnvironmentSpec, EnvironmentStore, import_names
from kernel_mcp.environments import store as module
from kernel_mcp.environments.folder import exclusive_now
from kernel_mcp.environments.metadata import note_file
from kernel_mcp.environments.uv import Uv, silence
from kernel_mcp.environments.workshop import Terms
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.sandbox.select import PlainBuilder

pytestmark = pytest.mark.anyio

WORDS = ("pip", "install", "python", "find", "list")
FAKE = Path(__file__).parent / "fake_uv.py"


class Kit:
    """A cache folder and the calls that reached the stand-in."""

    def __init__(self, root: Path) -> None:
        self.cache = root / "cache"
        self.log = root / "log"
        self.program = root / "uv"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        self.program.chmod(0o755)

    def store(
        self, extra: Mapping[str, str] | None = None, most_bytes: int = 0
    ) -> EnvironmentStore:
        """A store whose uv is the stand-in, with more variables in its environment."""
        environ = {"PATH": os.environ["PATH"], "FAKE_UV_LOG": str(self.log), **(extra or {})}
        uv = Uv(str(self.program), environ, self.cache.parent)
        return EnvironmentStore(self.cache, uv=uv, builder=PlainBuilder(), most_bytes=most_bytes)

    def calls(self) -> list[str]:
        """The first words of every call."""
        if not self.log.exists():
            return []
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [" ".join([word for word in call if word in WORDS]) for call in calls]


class Gate:
    """Stops the stand-in inside `pip install` until it is opened."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        os.mkfifo(root / "reached")
        os.mkfifo(root / "go")
        self._reached = os.open(root / "reached", os.O_RDWR | os.O_NONBLOCK)
        self._go = os.open(root / "go", os.O_RDWR)

    async def reached(self) -> None:
        """Return once the stand-in waits."""
        await anyio.wait_readable(self._reached)

    def open(self) -> None:
        """Let it go on; does nothing the second time."""
        for descriptor in (self._reached, self._go):
            if descriptor >= 0:
                os.close(descriptor)
        self._reached = self._go = -1


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


SPEC = EnvironmentSpec.for_allow(["numpy"])


async def test_an_environment_is_built_once_and_then_found(kit: Kit) -> None:
    first = await kit.store().ensure(SPEC)
    before = len(kit.calls())
    assert await kit.store().ensure(SPEC) == first
    assert len(kit.calls()) == before
    assert "numpy==1.0" in first.packages
    assert import_names(first, SPEC) == {"numpy"}


async def test_everything_a_kernel_must_read_is_listed(kit: Kit) -> None:
    env = await kit.store().ensure(SPEC)
    assert env.python.parent.parent in env.readonly
    assert Path(os.path.realpath(sys.base_prefix)) in env.readonly
    assert env.version == ".".join(map(str, sys.version_info[:3]))


async def test_a_found_environment_costs_no_process_and_hardly_any_time(kit: Kit) -> None:
    store = kit.store()
    await store.ensure(SPEC)
    started = time.process_time()
    await store.ensure(SPEC)
    assert time.process_time() - started < 0.02


async def test_the_same_packages_in_other_words_are_the_same_environment(kit: Kit) -> None:
    store = kit.store()
    one = await store.ensure(EnvironmentSpec.for_allow(["Pandas >=2", "numpy"]))
    two = await store.ensure(EnvironmentSpec.for_allow(["numpy", "pandas>=2"]))
    assert one == two
    assert await store.ensure(SPEC) != one


async def test_tasks_and_stores_that_ask_at_once_build_once(kit: Kit) -> None:
    found = []

    async def ask() -> None:
        found.append(await kit.store().ensure(SPEC))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
    assert kit.calls() == ["pip install"]
    assert len(set(found)) == 1


async def test_a_folder_without_a_note_is_built_again(kit: Kit) -> None:
    store = kit.store()
    env = await store.ensure(SPEC)
    root = env.python.parent.parent
    note_file(root).unlink()
    (root / "half").write_text("left by a killed build")
    again = await store.ensure(SPEC)
    assert again == env
    assert not (root / "half").exists()


async def test_nothing_in_a_finished_environment_is_writable(kit: Kit) -> None:
    env = await kit.store().ensure(SPEC)
    site = env.python.parent.parent / "lib/python3.11/site-packages"
    for path in (site, *site.rglob("*")):
        assert path.stat().st_mode & 0o222 == 0, path
        assert path.stat().st_mode & 0o444 == 0o444, path


async def test_progress_tells_the_milestones(kit: Kit) -> None:
    lines: list[str] = []

    async def tell(line: str) -> None:
        lines.append(line)

    await kit.store().ensure(SPEC, tell)
    assert lines[0].endswith("environment: numpy")
    assert any(line.startswith("Resolved") for line in lines)
    assert lines[-2:] == ["Installed them", "Compiling"]
    assert "without a sandbox" in lines[1]


async def test_a_cancelled_build_leaves_nothing_that_counts(kit: Kit, gate: Gate) -> None:
    store = kit.store({"FAKE_UV_BLOCK": str(gate.root)})
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.ensure, SPEC)
            await gate.reached()
            tasks.cancel_scope.cancel()
        assert store.stored() == []
        assert (await kit.store().ensure(SPEC)).python.exists()


async def killed_while_building(kit: Kit, gate: Gate, **environ: str) -> None:
    """Let another server begin to build, and kill it."""
    code = (
        "import anyio, os, sys\n"
        "from pathlib import Path\n"
        "from kernel_mcp.environments import EnvironmentSpec, EnvironmentStore\n"
        "from kernel_mcp.environments.uv import Uv\n"
        "cache, uv = map(Path, sys.argv[1:])\n"
        "from kernel_mcp.sandbox.select import PlainBuilder\n"
        "uv = Uv(str(uv), os.environ, cache.parent)\n"
        "store = EnvironmentStore(cache, uv=uv, builder=PlainBuilder())\n"
        "anyio.run(store.ensure, EnvironmentSpec.for_allow(['numpy']))\n"
    )
    fake = {"FAKE_UV_LOG": str(kit.log), "FAKE_UV_BLOCK": str(gate.root)}
    async with await anyio.open_process(
        [sys.executable, "-c", code, str(kit.cache), str(kit.program)],
        env={**os.environ, **fake, **environ},
        stdout=None,
        stderr=None,
    ) as server:
        await gate.reached()
        server.kill()
        await server.wait()


async def test_the_uv_of_a_killed_server_ends_with_it(kit: Kit, gate: Gate) -> None:
    with anyio.fail_after(60):
        await killed_while_building(kit, gate)
        await kit.store().ensure(SPEC)
    assert kit.calls() == ["pip install"] * 2


async def test_a_uv_that_cannot_be_tied_to_its_server_keeps_others_out_until_it_ends(
    kit: Kit, gate: Gate
) -> None:
    with anyio.fail_after(60):
        await killed_while_building(kit, gate, PATH="/nowhere")  # there is no setpriv
        with anyio.move_on_after(0.3) as waited:
            await kit.store().ensure(SPEC)
        assert waited.cancelled_caught
        gate.open()
        await kit.store().ensure(SPEC)
    assert kit.calls() == ["pip install"] * 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "No solution found\n Because nosuch was not found in the package registry",
            "no package 'nosuch'",
        ),
        (
            "error: Failed to fetch: http://127.0.0.1:9/simple/x/\n  cause: tcp connect error",
            "cannot be reached",
        ),
        (
            "error: No solution found\n cause: Because x was not found in the cache\n",
            "switched off",
        ),
        (
            "No solution found\n Because all versions of docopt have no usable wheels",
            "no wheel",
        ),
        (
            "No solution found\n Because only numpy<=2.5 is available and you require",
            "no release of numpy",
        ),
        (
            "error: No solution found\n  cause: Because a depends on c<1 and b depends on c>1",
            "contradict",
        ),
    ],
)
async def test_a_failure_says_what_to_do_and_what_uv_said(kit: Kit, said: str, told: str) -> None:
    store = kit.store({"FAKE_UV_ERROR": said})
    with pytest.raises(EnvironmentBuildError) as caught:
        await store.ensure(SPEC)
    text = str(caught.value)
    assert "with numpy" in text
    assert told in text
    assert said.splitlines()[0] in text
    assert store.stored() == []


async def test_a_missing_python_is_answered_with_those_that_are_there(kit: Kit) -> None:
    with pytest.raises(EnvironmentBuildError, match=r"3\.11\.2 \(/usr/bin/python3\.11\)"):
        await kit.store().ensure(EnvironmentSpec(python="3.14"))


async def test_a_path_that_is_no_python_is_reported(kit: Kit) -> None:
    with pytest.raises(EnvironmentBuildError, match="does not run as a Python"):
        await kit.store().ensure(EnvironmentSpec(python="/bin/true"))
    with pytest.raises(EnvironmentBuildError, match="does not run as a Python"):
        await kit.store().ensure(EnvironmentSpec(python="/no/such/python"))


async def test_a_path_to_an_interpreter_is_remembered_until_it_changes(
    kit: Kit, tmp_path: Path
) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    spec = EnvironmentSpec(python=str(link))
    env = await kit.store().ensure(spec)
    assert await kit.store().ensure(spec) == env
    link.unlink()
    link.write_text("#!/bin/sh\nexit 1\n")
    link.chmod(0o755)
    with pytest.raises(EnvironmentBuildError, match="does not run as a Python"):
        await kit.store().ensure(spec)


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
    cache = store.workshop.uv.cache
    (cache / "archive-v0").mkdir(parents=True)
    (cache / "archive-v0/file").write_bytes(bytes(600))
    (cache / ".tmpStopped").touch()
    with exclusive_now(cache / ".lock"):
        store.evict()
        assert (cache / "archive-v0").exists()
    store.evict()
    assert [path.name for path in cache.iterdir()] == [".lock"]
