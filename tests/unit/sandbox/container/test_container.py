"""The commands for docker and podman, without running them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.commands import CONTAINERFILE, build_command, run_image
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.errors import ConfigError, LaunchError, SandboxUnavailable
from kernel_mcp.host_folders.secrets import FILE, FIXED, FOLDER, KEPT
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox import container
from kernel_mcp.sandbox.base import ContainerOptions, SandboxCommand, SandboxRequest
from kernel_mcp.sandbox.container import ContainerSandbox, EtcFiles, engine, outermost
from kernel_mcp.sandbox.container.engine import Engine, container_report, mount
from kernel_mcp.sandbox.mounts import Folder, Folders
from kernel_mcp.units import GIB

USER = Identity(1234, 1234)


def fake_engine(folder: Path, kind: str, body: str) -> None:
    program = folder / kind
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def task_of(command: SandboxCommand) -> dict[str, Any]:
    """Return the task of the shim, and close the command's descriptors."""
    number = int(command.argv[command.argv.index("--task") + 1])
    with open(number, "rb", closefd=False) as file:
        task: dict[str, Any] = json.load(file)
    command.close_passed()
    os.close(command.status_fd)
    return task


def task(
    kind: str,
    tmp_path: Path,
    limits: Limits | None = None,
    runtime: str = "",
    folders: Folders | None = None,
) -> dict[str, Any]:
    """Return the task of the shim for one kernel."""
    sandbox = ContainerSandbox(
        engine=Engine(kind, f"/usr/bin/{kind}", runtime),
        image="the-image",
        seccomp_filter=b"open",
        sealed_filter=b"sealed",
        identities=None,
    )
    request = SandboxRequest(
        argv=["python", "secret-argument"],
        env={"SECRET": "1"},
        workspace=tmp_path,
        sockets=tmp_path,
        readonly=[],
        limits=limits or Limits(),
        layers=[tmp_path],
        folders=folders or Folders(),
    )
    return task_of(sandbox.command(request, USER))


def started(kind: str, tmp_path: Path, limits: Limits | None = None, runtime: str = "") -> str:
    """The words that start a container."""
    return " ".join(task(kind, tmp_path, limits, runtime)["run"])


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_container_has_no_privileges_no_network_and_a_closed_root(
    kind: str, tmp_path: Path
) -> None:
    words = started(kind, tmp_path)
    for expected in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--read-only",
        "--user 1234:1234",
        "--pull never",
        "--log-driver none",
        "--hostname sandbox",
        f"src={tmp_path},dst=/packages/0,readonly",
    ):
        assert expected in words
    assert "secret" not in words.lower()
    assert "--privileged" not in words


def test_mounted_folders_come_with_their_covers_and_without_unix_sockets(tmp_path: Path) -> None:
    covers = ((".env", FILE), (".git", FIXED), (".ssh", FOLDER), ("a", KEPT), ("b,c/.env", FILE))
    shown = (
        Folder(Path("/srv/x"), "/data/x", True, covers),
        Folder(Path("/srv/y"), "/data/y", False, is_folder=False),
    )
    told = task("podman", tmp_path, folders=Folders(shown, tmp_path))
    words = " ".join(told["run"])
    for expected in (
        f"src={tmp_path},dst=/run/blank,readonly",
        "src=/srv/x,dst=/data/x --mount",
        f"src={tmp_path}/file,dst=/data/x/.env,readonly",
        f"src={tmp_path}/folder,dst=/data/x/.ssh,readonly",
        "src=/srv/x/.git,dst=/data/x/.git,readonly",
        "src=/srv/x/a,dst=/data/x/a --mount",
        "src=/srv/y,dst=/data/y,readonly",
        ",dst=/data,readonly",
    ):
        assert expected in words, expected
    assert "b,c" not in words  # the keeper covers it before code runs
    assert told["filter"] == base64.b64encode(b"sealed").decode()
    # docker's containers are not always open to the keeper
    with pytest.raises(LaunchError, match="comma"):
        task("docker", tmp_path, folders=Folders(shown, tmp_path))
    told = task("docker", tmp_path, folders=Folders(shown[1:], tmp_path))
    assert "src=/srv/y,dst=/data/y,readonly" in " ".join(told["run"])
    assert task("docker", tmp_path)["filter"] == base64.b64encode(b"open").decode()


def test_limits_are_the_engines_too(tmp_path: Path) -> None:
    words = started("docker", tmp_path, Limits(memory_bytes=1 * GIB, pids=10, cpus=1.5))
    memory = 1 * GIB + 32 * 1024 * 1024
    assert f"--memory {memory} --memory-swap {memory} --cpus 1.5 --pids-limit 11" in words
    assert "--cpus" not in started("docker", tmp_path, Limits(cpus=99999))
    unlimited = started("docker", tmp_path, Limits(memory_bytes=0, pids=0))
    assert "--memory" not in unlimited
    assert "--pids-limit -1" in unlimited


def test_the_runtime_is_given_where_each_engine_takes_it(tmp_path: Path) -> None:
    assert started("podman", tmp_path, runtime="r").startswith("/usr/bin/podman --runtime r run ")
    assert started("docker", tmp_path, runtime="r").startswith("/usr/bin/docker run --runtime r ")


def test_a_path_that_no_engine_can_mount_is_refused() -> None:
    with pytest.raises(ValueError, match="comma"):
        mount("/a,src=/", "/b")
    with pytest.raises(LaunchError, match="does not exist"):
        outermost([Path("/nowhere/at/all")])
    with pytest.raises(LaunchError, match="absolute"):
        outermost([Path("/")])


def test_paths_inside_others_are_not_mounted_twice() -> None:
    assert outermost([Path("/usr/lib"), Path("/usr")]) == [Path("/usr")]


def test_the_way_to_a_path_shows_nothing_else(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        files = EtcFiles(tmp_path)
        files.way_to([Path("/home/ada/other")])
        (top,) = files.way_to([Path("/home/ada/python"), Path("/usr/lib"), Path("/venv")])
    finally:
        os.umask(mask)
    assert top.name == "home"
    assert [path.name for path in top.rglob("*")] == ["ada", "python"]
    assert {path.stat().st_mode & 0o777 for path in (top, top / "ada")} == {0o755}


def test_account_files_are_renewed(tmp_path: Path) -> None:
    files = {path.name: path for path in EtcFiles(tmp_path).account_files(USER)}
    files["passwd"].write_text("old")
    EtcFiles(tmp_path).account_files(USER)
    assert "kernel:x:1234:1234" in files["passwd"].read_text()


def test_an_engine_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="neither podman nor docker is installed"):
        Engine.find(ContainerOptions())
    with pytest.raises(SandboxUnavailable, match="docker is not installed"):
        Engine.find(ContainerOptions(engine="docker"))
    fake_engine(tmp_path, "docker", "exit 0")
    assert Engine.find(ContainerOptions()).kind == "docker"


def test_an_engine_that_does_not_work_is_quoted(tmp_path: Path) -> None:
    fake_engine(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    engine = Engine("docker", str(tmp_path / "docker"))
    with pytest.raises(SandboxUnavailable, match="Cannot connect to the Docker daemon"):
        engine.require_image("x")


def test_a_missing_image_is_told_with_the_command_that_builds_it(tmp_path: Path) -> None:
    fake_engine(tmp_path, "docker", "echo 'Error: No such image: x' >&2; exit 1")
    engine = Engine("docker", str(tmp_path / "docker"))
    with pytest.raises(SandboxUnavailable, match="kernel-mcp image build --engine docker"):
        engine.require_image("x")


def test_an_image_is_built_from_the_containerfile_or_imported(tmp_path: Path) -> None:
    engine = Engine("podman", "podman")
    tar = tmp_path / "root.tar"
    tar.touch()
    assert build_command(engine, "name", str(tar)) == ["podman", "import", str(tar), "name"]
    built = build_command(engine, "name", "debian:trixie-slim")
    assert built[:4] == ["podman", "build", "--tag", "name"]
    assert "BASE=debian:trixie-slim" in built
    assert str(CONTAINERFILE) in built
    assert "FROM ${BASE}" in CONTAINERFILE.read_text()
    for base in ("gone.tar", "--privileged"):
        with pytest.raises(ConfigError):
            build_command(engine, "name", base)


def test_image_without_build_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="expected build"):
        run_image([])


def test_the_report_says_who_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker, podman = (Engine(kind, kind) for kind in ("docker", "podman"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert container_report(docker, own_user=False).own_groups
    assert not container_report(podman, own_user=False).own_groups
    resources = ResourceManager.create(tmp_path, container_report(docker, own_user=False))
    found = resources.report(container_report(docker, own_user=False), Limits())
    assert "512 processes and threads by the sandbox's cgroup" in found.enforced
    assert not any("no cgroup" in gap for gap in found.gaps)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not container_report(docker, own_user=True).own_groups


def test_the_options_are_those_of_the_settings() -> None:
    settings = replace(Settings(), container_engine="docker", container_image="i")
    assert ContainerOptions.of(settings) == ContainerOptions("docker", "i", "")


def test_the_shim_finds_control_groups_without_any_package() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(container.__file__).parent)!r})\n"
        "import os, shim\n"
        "sys.path.pop(0)\n"
        "shim._bring_along(os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("slow", ["ps", "rm"])
def test_an_engine_that_is_slow_to_remove_leftovers_does_not_hold_up_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slow: str
) -> None:
    monkeypatch.setattr(engine, "SWEEP_S", 0.2)
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    dead = f"echo abc kernel-mcp-{namespace}-1-5-abcd"
    fake_engine(tmp_path, "podman", f'[ "$1" = {slow} ] && exec sleep 60\n{dead}')
    Engine("podman", str(tmp_path / "podman")).sweep()
    (said,) = caplog.messages
    assert "containers of dead servers were not removed: podman does not answer" in said
    assert ("`podman rm --force abc`" in said) == (slow == "rm")
