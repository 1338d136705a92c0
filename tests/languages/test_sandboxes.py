"""Kernels of other languages in weaker sandboxes than bubblewrap."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.interpreter import KINDS, opened, words
from tests.integration import containers
from tests.integration.agent import command

pytestmark = [pytest.mark.anyio, pytest.mark.ways]

FOREIGN = {kind.name: kind for kind in KINDS}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("r", "none"),
        ("r", "landlock"),
        ("tslab", "none"),
        ("tslab", "landlock"),
        ("bash", "none"),
        ("octave", "none"),
        ("bash", "container"),
    ],
)
async def test_it_runs_cells_and_is_interrupted(name: str, way: str) -> None:
    flags = containers.flags("podman") if way == "container" else ("--sandbox", way)
    kind = replace(FOREIGN[name], flags=(*FOREIGN[name].flags, *flags))
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        async with opened(kind, Path(path)) as session:
            await session.run(session.language.keeps)
            await session.begin(session.language.waits, "never")
            assert (await session.call("interrupt")).status == "interrupted"
            assert "42" in words((await session.run(session.language.adds)).text)


def test_a_server_says_at_its_start_which_kernel_cannot_start_in_its_sandbox(
    tmp_path: Path,
) -> None:
    spec = {"argv": [sys.executable, "-m", "bash_kernel", "{connection_file}"], "language": "bash"}
    (tmp_path / "kernel.json").write_text(json.dumps(spec))
    usual = command("--sandbox", "landlock", "--kernel", f"sh={tmp_path}")
    words = [usual.command, *usual.args]
    with subprocess.Popen(
        words, env=usual.env, cwd=usual.cwd, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:  # whose client stays
        assert server.wait() != 0
        assert server.stderr is not None
        said = server.stderr.read().decode()
    assert "cannot start under --sandbox landlock: there are no terminals" in said
