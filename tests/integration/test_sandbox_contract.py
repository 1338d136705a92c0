"""One contract for everything that confines a process: what the launcher asks of a `Sandbox`."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.safe_tree import give_tree
from kernel_mcp.sandbox.base import Sandbox, SandboxReport, SandboxRequest
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.landlock import LandlockSandbox
from kernel_mcp.sandbox.select import NoSandbox
from tests.contracts.logging_sandbox import LoggingSandbox
from tests.integration import containers

RUNTIME = (Path(sys.prefix), Path(sys.base_prefix))
LOOK = """
import json, os, sys
workspace, sockets, boot, tmp, layers, fd = sys.argv[1:]
open(f"{workspace}/made", "w").write("by the process")
open(f"{sockets}/made", "w").close()
open(f"{tmp}/made", "w").close()
layer = sorted(os.listdir(f"{layers}/0")) if layers else ["layer"]
os.write(int(fd), json.dumps({
    "given": open(f"{workspace}/given").read(),
    "boot": os.path.exists(f"{boot}/restricted/boot.py"),
    "layer": layer,
    "word": os.environ["WORD"],
}).encode())
sys.exit(7)
"""


def podman() -> Sandbox:
    return containers.detect("podman")


BACKENDS: dict[str, Callable[[], Sandbox]] = {
    "bwrap": BwrapSandbox.detect,
    "landlock": LandlockSandbox.detect,
    "none": NoSandbox,
    "container": podman,
    "logging": LoggingSandbox.detect,  # as a third party would write one
}


@pytest.fixture(params=BACKENDS, scope="module")
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    made = BACKENDS[request.param]()
    assert made.name == request.param
    return made


@pytest.fixture
def identity(sandbox: Sandbox) -> Iterator[Identity | None]:
    found = sandbox.identity()
    yield found
    sandbox.release(found)


@pytest.fixture
def place(identity: Identity | None) -> Iterator[Path]:
    """A folder with a workspace and a folder for sockets, both the kernel's, and a layer."""
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-") as made:
        place = Path(made)
        place.chmod(0o711)
        for name in ("workspace", "sockets", "layer"):
            (place / name).mkdir()
        (place / "workspace" / "given").write_text("by the server")
        (place / "layer" / "layer").touch()
        if identity is not None:
            for name in ("workspace", "sockets"):
                give_tree(place / name, uid=identity.uid, gid=identity.gid)
        yield place


def asked(sandbox: Sandbox, place: Path, inherit: int = -1, **changes: object) -> SandboxRequest:
    paths = sandbox.guest_paths(place / "workspace", place / "sockets")
    seen = (paths.workspace, paths.sockets, paths.boot, paths.tmp, paths.layers, str(inherit))
    wanted: dict[str, object] = {
        "argv": [sys.executable, "-I", "-S", "-c", LOOK, *seen],
        "env": {"WORD": "kept"},
        "workspace": place / "workspace",
        "sockets": place / "sockets",
        "readonly": RUNTIME,
        "limits": Limits(),
        "inherit": (inherit,) if inherit >= 0 else (),
        "layers": (place / "layer",) if paths.layers else (),
    }
    return SandboxRequest(**{**wanted, **changes})  # type: ignore[arg-type]


def descriptors() -> set[str]:
    """Those that are open, without that of the look itself."""
    return {path.name for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()}


def test_a_command_runs_where_guest_paths_say_as_whom_identity_says(
    sandbox: Sandbox, place: Path, identity: Identity | None
) -> None:
    before = descriptors()
    read, write = os.pipe()
    command = sandbox.command(asked(sandbox, place, write), identity)
    assert write in command.pass_fds
    try:
        done = subprocess.run(
            command.argv,
            env=command.env,
            pass_fds=command.pass_fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=60,
        )
    finally:
        command.close_passed()
    code = done.returncode
    if command.detached:
        assert code == 0, done.stderr
        with socket.socket(fileno=command.status_fd) as end:
            status, (link,), _, _ = socket.recv_fds(end, 4096, 1)
        with socket.socket(fileno=link) as first:
            code = int(first.recv(64))
    elif command.status_fd >= 0:
        status = os.read(command.status_fd, 4096)
        os.close(command.status_fd)
    with open(read) as told:
        said = told.read()
    assert code == 7, done.stderr
    assert json.loads(said) == {
        "given": "by the server",
        "boot": True,
        "layer": ["layer"],
        "word": "kept",
    }
    uid = os.geteuid() if identity is None else identity.uid
    assert (place / "workspace" / "made").read_text() == "by the process"
    assert (place / "workspace" / "made").stat().st_uid == uid
    assert (place / "sockets" / "made").exists()
    if command.status_fd >= 0:
        assert json.loads(status.splitlines()[0])["child-pid"] > 0
    else:
        assert not command.detached
    assert descriptors() == before


def test_a_command_that_cannot_be_made_leaves_no_descriptor_and_what_it_was_given(
    sandbox: Sandbox, place: Path, identity: Identity | None
) -> None:
    """Short of descriptors at each step in turn: the real thing, by the limit of the process."""
    given = os.open("/dev/null", os.O_RDONLY)
    request = asked(sandbox, place, given)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    os.close(free := os.dup(given))
    failures = 0
    try:
        for spare in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
            try:
                command = sandbox.command(request, identity)
            except (OSError, LaunchError):
                failures += 1
            else:
                for fd in {*command.pass_fds, command.status_fd} - {given, -1}:
                    os.close(fd)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert descriptors() == before
    finally:
        os.close(given)
    assert failures or sandbox.name == "none"  # which opens nothing


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(
    sandbox: Sandbox, place: Path, identity: Identity | None
) -> None:
    before = descriptors()
    missing = asked(sandbox, place, readonly=(*RUNTIME, place / "nowhere"))
    if sandbox.expected_confinement(identity) is None:
        sandbox.command(missing, identity).close_passed()
    else:
        with pytest.raises(LaunchError, match="nowhere"):
            sandbox.command(missing, identity)
    assert descriptors() == before


def test_kernels_of_one_workspace_are_one_user_and_others_are_not(
    sandbox: Sandbox, place: Path
) -> None:
    first, second = sandbox.identity(), sandbox.identity()
    try:
        if first is None:
            assert second is None
            return
        assert second is not None
        assert first.uid != second.uid
        os.chown(place / "workspace", first.uid, first.gid)
        sandbox.release(first)
        first = sandbox.identity(place / "workspace")
        assert first is not None
        assert first.uid == (place / "workspace").stat().st_uid
        assert first.uid != second.uid
    finally:
        sandbox.release(first)
        sandbox.release(second)


def test_what_it_says_of_itself_agrees(sandbox: Sandbox, identity: Identity | None) -> None:
    report, expected = sandbox.report(), sandbox.expected_confinement(identity)
    assert isinstance(report, SandboxReport)
    assert report.backend
    assert bool(report.enforced) == (expected is not None)
    assert report.enforced or report.gaps
    assert sandbox.forks <= (expected is not None)
    assert "it wrote this" in sandbox.refusal("it wrote this")
    builder = sandbox.builder()
    assert builder is None or builder.confined
