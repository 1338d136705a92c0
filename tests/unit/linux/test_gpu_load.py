"""GPUs by nvidia-smi: a program of that name stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.linux import gpu_load

pytestmark = [pytest.mark.anyio]

TWO = """0, 512, 81559, 37, NVIDIA H100 80GB HBM3
1, [N/A], [N/A], [N/A], NVIDIA GB10, integrated
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only program on PATH, but those of the system that it needs."""
    path = tmp_path / "bin/nvidia-smi"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return path


def write(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


async def test_each_gpu_is_told_with_its_memory_and_use(program: Path) -> None:
    asked = program.parent / "asked"
    write(program, f'echo "$@" > {asked}\ncat << EOF\n{TWO}EOF')
    assert await gpu_load.gpu_load() == [
        "GPU 0, NVIDIA H100 80GB HBM3: 512 of 81559 MiB in use, busy 37 % of the time",
        "GPU 1, NVIDIA GB10, integrated: [N/A] of [N/A] MiB in use, busy [N/A] % of the time",
    ]
    assert asked.read_text().split() == [
        "--query-gpu=index,memory.used,memory.total,utilization.gpu,name",
        "--format=csv,noheader,nounits",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo It has failed.; exit 9", "ended with code 9 and said It has failed."),
        ("exit 0", "ended with code 0 and said nothing"),
        ("echo No devices were found", "said No devices were found"),
        ("exec sleep 600", "did not answer within"),
    ],
)
async def test_why_nothing_is_known_is_told(
    program: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    write(program, body)
    if body.startswith("exec"):
        monkeypatch.setattr(gpu_load, "ASK_S", 0.1)
    (told,) = await gpu_load.gpu_load()
    assert told.startswith("not known: nvidia-smi ")
    assert said in told


async def test_a_machine_without_the_program_says_so(program: Path) -> None:
    assert not program.exists()
    (told,) = await gpu_load.gpu_load()
    assert told == "not known: the server's PATH leads to no nvidia-smi"
    program.touch(mode=0o755)  # nothing that Linux could run
    (told,) = await gpu_load.gpu_load()
    assert told == "not known: nvidia-smi cannot be run: Exec format error"
