"""The folder of a running server, and what a kernel finds at boot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import ConfigError
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, LaunchRequest
from kernel_mcp.launch.rundir import LONGEST, RunDirectory, compile_guest
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import GuestPaths
from kernel_specs.restricted import config

pytestmark = pytest.mark.anyio


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
    base.mkdir(mode=0o700)
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
    base.mkdir(mode=0o700)
    planted.mkdir()
    os.chown(planted, 12_399, 12_399)
    with RunDirectory.create(base):
        assert planted.exists()


def test_closing_twice_is_harmless(base: Path) -> None:
    run = RunDirectory.create(base)
    run.close()
    run.close()


PATHS = GuestPaths(workspace="/workspace", sockets="/run/kernel", boot="/opt/kernel_specs")
REQUEST = LaunchRequest(
    session="s",
    environment=KernelEnvironment(
        python=Path("/env/bin/python"), readonly=(Path("/env"), Path("/base"))
    ),
    policy=Policy.for_allow(["numpy"]),
    limits=Limits(pids=7, disk_bytes=99),
    workspace=Path("/var/w"),
    layers=(Path("/layer"),),
)


def test_the_boot_file_is_what_the_kernel_reads() -> None:
    boot = config.parse(json.loads(json.dumps(rundir.boot_content(REQUEST, PATHS, 5))))
    assert boot.workspace == "/workspace"
    assert boot.ready_fd == 5
    assert boot.layers == ("/layer",)
    assert boot.limits.pids == 7
    assert boot.limits.file_bytes == 99
    assert boot.runtime == ("/usr", "/env", "/base")
    assert "numpy" in boot.policy.modules
    assert not boot.policy.allow_all


def test_variables_travel_in_the_boot_file_which_goes_once_they_were_read(tmp_path: Path) -> None:
    request = replace(REQUEST, variables=(("TOKEN", "hunter2-hunter2"),))
    boot = rundir.boot_content(request, PATHS, 5)
    assert config.parse(json.loads(json.dumps(boot))).variables == {"TOKEN": "hunter2-hunter2"}
    assert "hunter2" not in repr(request)
    assert "hunter2" not in repr(config.parse(boot))
    rundir.write_files(tmp_path, {rundir.BOOT_FILE: boot}, None)
    rundir.forget_variables(REQUEST, tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / rundir.BOOT_FILE]
    rundir.forget_variables(request, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_connection_file_names_the_sockets_as_the_kernel_sees_them() -> None:
    content = rundir.connection_content(ConnectionInfo(ip="/host/k", key="secret"), PATHS)
    assert content["ip"] == "/run/kernel/k"
    assert content["transport"] == "ipc"
    assert [content[f"{name}_port"] for name in ("shell", "iopub", "stdin", "control", "hb")] == [
        *range(1, 6)
    ]


def test_the_command_line_isolates_the_interpreter() -> None:
    assert rundir.argv(REQUEST, PATHS) == [
        "/env/bin/python",
        *("-I", "-B", "/opt/kernel_specs/restricted/boot.py"),
        *("-f", "/run/kernel/connection.json"),
    ]


def test_the_environment_holds_nothing_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    assert "hunter2" not in rundir.environment(REQUEST, PATHS).values()


def test_the_files_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "boot.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        rundir.write_files(tmp_path, {"boot.json": {}}, None)


def test_the_kernel_may_read_its_files_and_not_change_them(tmp_path: Path) -> None:
    rundir.write_files(tmp_path, {"boot.json": {"a": 1}}, None)
    assert (tmp_path / "boot.json").stat().st_mode & 0o777 == 0o440
    assert json.loads((tmp_path / "boot.json").read_text()) == {"a": 1}


HERE = KernelEnvironment(Path(sys.executable), (), version=platform.python_version())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "inner" / "b.py").write_text("B = 2\n")
    return tmp_path


def compiled(folder: Path) -> dict[str, float]:
    return {path.name.split(".")[0]: path.stat().st_mtime for path in folder.rglob("*.pyc")}


async def test_all_sources_are_compiled_once(folder: Path) -> None:
    await compile_guest(HERE, folder)
    before = compiled(folder)
    assert set(before) == {"a", "b"}
    await compile_guest(HERE, folder)
    assert compiled(folder) == before


async def test_a_changed_source_is_compiled_again(folder: Path) -> None:
    await compile_guest(HERE, folder)
    source = folder / "a.py"
    source.write_text("A = 'changed'\n")
    later = source.stat().st_mtime + 10
    os.utime(source, (later, later))
    await compile_guest(HERE, folder)
    (bytecode,) = (folder / "__pycache__").iterdir()
    assert b"changed" in bytecode.read_bytes()


async def test_what_cannot_be_compiled_is_no_failure(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "__pycache__").write_text("in the way")
    with caplog.at_level("INFO"):
        await compile_guest(HERE, folder)
    assert "compile their own start" in caplog.text
