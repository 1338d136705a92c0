"""The folder of a running server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.rundir import LONGEST, RunDirectory


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a shorter name than pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "b")


def test_a_server_has_a_private_folder_until_it_ends(base: Path) -> None:
    with RunDirectory.create(base) as run:
        assert run.path.stat().st_mode & 0o777 == 0o700
        first, second = run.fresh(), run.fresh()
        assert first != second
        assert first.stat().st_mode & 0o777 == 0o700
        assert len(f"{first}/k-1") <= 107
    assert not run.path.exists()


def test_the_default_place_leaves_room_for_socket_paths() -> None:
    with RunDirectory.create() as run:
        assert len(os.fsencode(run.path)) <= LONGEST


def test_a_living_server_is_left_alone_and_a_dead_one_swept(base: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from kernel_mcp.launch.rundir import RunDirectory\n"
        "run = RunDirectory.create(Path(sys.argv[1])); (run.path / 'w' / 'x').mkdir(parents=True)\n"
        "print(run.path, flush=True); os.kill(os.getpid(), 9)"
    )
    with RunDirectory.create(base) as living:
        killed = subprocess.run(
            [sys.executable, "-c", script, base], capture_output=True, text=True, check=False
        )
        left = Path(killed.stdout.strip())
        assert (left / "w" / "x").exists()
        with RunDirectory.create(base):
            assert not left.exists()
            assert living.path.exists()


def test_other_files_beside_the_servers_are_not_swept(base: Path, tmp_path: Path) -> None:
    base.mkdir()
    (base / "notes").touch()
    (base / "s-link").symlink_to(tmp_path)
    with RunDirectory.create(base):
        assert (base / "notes").exists()
        assert tmp_path.exists()


def test_a_long_base_is_refused_with_the_length_it_may_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 79 bytes"):
        RunDirectory.create(tmp_path / ("x" * 90))


def test_a_base_prepared_by_a_link_is_refused(base: Path) -> None:
    (base.with_name("real")).mkdir()
    base.symlink_to("real")
    with pytest.raises(ConfigError, match="not a folder of this user"):
        RunDirectory.create(base)


def test_a_base_that_others_can_write_to_is_refused_with_what_to_do(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    (base / "s-12345678").mkdir()
    for place in (base, base / "below"):
        with pytest.raises(ConfigError, match=r"others may write to .* --state-dir"):
            RunDirectory.create(place)
    assert (base / "s-12345678").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_somebody_else_is_not_taken_for_a_dead_servers(base: Path) -> None:
    planted = base / "s-12345678"
    planted.mkdir(parents=True)
    os.chown(planted, 12_399, 12_399)
    with RunDirectory.create(base):
        assert planted.exists()


def test_closing_twice_is_harmless(base: Path) -> None:
    run = RunDirectory.create(base)
    run.close()
    run.close()
