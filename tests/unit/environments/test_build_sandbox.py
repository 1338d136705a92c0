"""Bytecode: what is compiled ahead, under which name, and work that may be ended."""

from __future__ import annotations

import marshal
import os
import sys
from pathlib import Path
from types import CodeType

import anyio
import pytest

from kernel_mcp.environments.build_sandbox import BuildSandbox
from kernel_mcp.environments.folder import Spending
from kernel_mcp.environments.progress import cancel_on
from kernel_mcp.environments.uv import Uv
from kernel_mcp.sandbox.select import PlainBuilder

pytestmark = [pytest.mark.anyio]


def names(folder: Path) -> dict[str, str]:
    """The modules below `folder` that were compiled, and the file that each says it is."""
    found: dict[str, str] = {}
    for path in folder.rglob("*.pyc"):
        code = marshal.loads(path.read_bytes()[16:])
        assert isinstance(code, CodeType)
        found[path.name.partition(".")[0]] = code.co_filename
    return found


@pytest.mark.parametrize("known_as", ["", "/packages/0"])
async def test_every_source_but_tests_is_compiled_under_the_name_that_kernels_see(
    tmp_path: Path, known_as: str
) -> None:
    folder = tmp_path / "packages"
    (folder / "deep/er").mkdir(parents=True)
    sources = {f"m{i}": f"deep/er/m{i}.py" if i % 2 else f"m{i}.py" for i in range(70)}
    for i, place in enumerate(sources.values()):
        (folder / place).write_text("x = 1\n" * i)
    for tests in ("test", "deep/tests/more"):
        (folder / tests).mkdir(parents=True)
        (folder / tests / "of_the_package.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("def")
    (folder / "notes.txt").write_text("no source")
    build_sandbox = BuildSandbox(Uv("uv", os.environ, tmp_path), PlainBuilder())
    await build_sandbox.compile(
        folder,
        Path(sys.executable),
        readonly=[],
        spending=Spending(0, [folder]),
        known_as=known_as,
    )
    place = known_as or str(folder)
    assert names(folder) == {name: f"{place}/{path}" for name, path in sources.items()}


async def five() -> int:
    await anyio.lowlevel.checkpoint()
    return 5


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await cancel_on(anyio.sleep_forever, five) == 5


async def test_an_event_that_comes_first_ends_the_work() -> None:
    ended = anyio.Event()

    async def work() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return 5

    with anyio.fail_after(60):
        assert await cancel_on(five, work) is None
    assert ended.is_set()


async def test_an_error_of_the_work_comes_out_as_it_is() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await cancel_on(anyio.sleep_forever, work)


async def test_cancelling_the_whole_cancels_the_work() -> None:
    with anyio.move_on_after(0.01) as scope:
        await cancel_on(anyio.sleep_forever, anyio.sleep_forever)
    assert scope.cancelled_caught
