"""Progress of a build for all that wait for it: counts, sizes, heartbeats."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.environments import progress
from kernel_mcp.environments.progress import Milestones
from tests.unit.environments.kit import SPEC, Gate, Kit

pytestmark = [pytest.mark.anyio]


class Heard:
    """A ProgressCallback that keeps what it is given, and the clock of who gives it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.now = 100.0

    async def __call__(self, text: str) -> None:
        self.texts.append(text)

    def clock(self) -> float:
        """A second passes with each look."""
        self.now += 1
        return self.now


async def test_downloads_are_counted_and_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "OFTEN_S", 0.0)
    heard = Heard()
    told = Milestones(heard, clock=lambda: 1.0)
    lines = (
        "Resolved 39 packages in 482ms",
        "Downloading numpy (16.0MiB)",
        "Downloading pandas (8.0MiB)",
        "Downloaded pandas",
        "Downloading cpython-3.12.1-linux-x86_64-gnu (download) (1.0GiB)",
        "Prepared 39 packages in 552ms",
        "Installed 39 packages in 439ms",
    )

    async def uv() -> None:
        for line in lines:
            await told.take(line)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(60):
        await told.during(uv)
    assert heard.texts == [
        "Resolved 39 packages in 482ms",
        "Downloading: 0 of 1, 0 bytes of 16 MiB; now numpy",
        "Downloading: 0 of 2, 0 bytes of 24 MiB; now numpy, pandas",
        "Downloading: 1 of 2, 8 MiB of 24 MiB; now numpy",
        "Downloading: 1 of 3, 8 MiB of 1.02 GiB; now cpython-3.12.1-linux-x86_64-gnu, numpy",
        "Unpacking 39 packages",
        "Installed 39 packages in 439ms",
    ]


async def test_downloads_that_are_over_are_told_of_at_once() -> None:
    heard = Heard()
    told = Milestones(heard, clock=lambda: 1.0)
    for number in range(8):
        await told.take(f"Downloading package{number} (1.0MiB)")
    assert heard.texts == []
    for number in range(8):
        await told.take(f"Downloaded package{number}")
    assert heard.texts == ["Downloading: 8 of 8, 8 MiB of 8 MiB"]


async def test_silence_is_filled_with_what_goes_on_and_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "BEAT_S", 0.0)
    monkeypatch.setattr(progress, "OFTEN_S", 0.0)
    heard = Heard()
    told = Milestones(heard, clock=heard.clock)

    async def work() -> int:
        await told.tell("Downloading")
        while len(heard.texts) < 3:
            await anyio.lowlevel.checkpoint()
        return 7

    with anyio.fail_after(60):
        assert await told.during(work) == 7
    assert heard.texts[0] == "Downloading"
    assert heard.texts[1].startswith("Downloading (")
    assert heard.texts[1].endswith(" s)")
    assert heard.texts[1] != heard.texts[2]


async def test_all_who_wait_for_a_build_hear_of_it(kit: Kit, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    says = "Resolved 3 packages\nDownloading numpy (16.0MiB)"
    builder = kit.store({"FAKE_UV_BLOCK": str(gate.root), "FAKE_UV_SAYS": says})
    beside, elsewhere = Heard(), Heard()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(builder.ensure, SPEC, Heard())
            await gate.reached()
            tasks.start_soon(builder.ensure, SPEC, beside)
            tasks.start_soon(kit.store().ensure, SPEC, elsewhere)
            while "Downloading: 0 of 1, 0 bytes of 16 MiB; now numpy" not in (
                set(beside.texts) & set(elsewhere.texts)
            ):
                await anyio.sleep(0.01)
            gate.open()
    assert kit.calls() == ["pip install"]
    late = Heard()
    await kit.store().ensure(SPEC, late)
    assert late.texts == []
