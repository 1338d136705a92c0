"""Building and sharing environments, with a stand-in for uv."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import anyio
import pytest

from kernel_mcp.environments.metadata import EnvironmentSpec, import_names, note_file
from kernel_mcp.environments.store import default_cache
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.launch.rundir import default_base
from tests.unit.environments.kit import SPEC, Gate, Kit

pytestmark = pytest.mark.anyio


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
    (site,) = env.python.parent.parent.glob("lib/python3.*/site-packages")
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
        "from kernel_mcp.environments.metadata import EnvironmentSpec\n"
        "from kernel_mcp.environments.store import EnvironmentStore\n"
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


def test_the_cache_is_where_xdg_says_or_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache() == tmp_path / "x/kernel-mcp"
    for given in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert default_cache() == tmp_path / ".cache/kernel-mcp"
    monkeypatch.setenv("HOME", "/")
    assert default_cache() == Path(f"{default_base()}-cache"), "beside the folder for state"
