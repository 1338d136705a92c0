"""What is compiled ahead, and under which name."""

from __future__ import annotations

import marshal
import os
import sys
from pathlib import Path
from types import CodeType

import pytest

from kernel_mcp.environments.spending import Spending
from kernel_mcp.environments.uv import Uv
from kernel_mcp.environments.workshop import Workshop
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
async def test_every_source_is_compiled_under_the_name_that_kernels_see(
    tmp_path: Path, known_as: str
) -> None:
    folder = tmp_path / "packages"
    (folder / "deep/er").mkdir(parents=True)
    sources = {f"m{i}": f"deep/er/m{i}.py" if i % 2 else f"m{i}.py" for i in range(70)}
    for i, place in enumerate(sources.values()):
        (folder / place).write_text("x = 1\n" * i)
    (folder / "broken.py").write_text("def")
    (folder / "notes.txt").write_text("no source")
    workshop = Workshop(Uv("uv", os.environ, tmp_path), PlainBuilder())
    await workshop.compile(
        folder,
        Path(sys.executable),
        readonly=[],
        spending=Spending(0, [folder]),
        known_as=known_as,
    )
    place = known_as or str(folder)
    assert names(folder) == {name: f"{place}/{path}" for name, path in sources.items()}
