"""Containers for tests: real engines with a root filesystem made here, as no registry is reached.

`TESTS_ROOTFS` may name a tar file of a root filesystem that has been made before.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernel_mcp.commands import build_command
from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.container import ContainerSandbox
from kernel_mcp.sandbox.container.engine import LABEL, Engine
from tests.conftest import lacking
from tests.run_folder import own_folder

IMAGE = "kernel-mcp-test"
ENGINES = ("podman", "docker") if Path("/var/run/docker.sock").exists() else ("podman",)
"""Those to test: docker where its service runs, as the command alone can do nothing."""
RELEASE = "bookworm"
PACKAGES = (
    "ca-certificates,fonts-dejavu-core,libbz2-1.0,libexpat1,libffi8,libgomp1,liblzma5,"
    "libreadline8,libsqlite3-0,libssl3,libstdc++6,libuuid1"
)


def options(kind: str) -> ContainerOptions:
    """Those of tests: podman with runc, where that is installed, as crun wants one cgroup version.

    Docker takes its own runtime.
    """
    runtime = "runc" if kind == "podman" and shutil.which("runc") else ""
    return ContainerOptions(engine=kind, image=IMAGE, runtime=runtime)


def detect(kind: str) -> ContainerSandbox:
    """The backend with one engine; skips the test where there is none and none is required."""
    reason = missing(kind)
    if reason:
        lacking("containers", reason)
    return ContainerSandbox.detect(options(kind))


def flags(kind: str) -> tuple[str, ...]:
    """The flags of a server whose kernels run in such containers; skips the test as `detect`."""
    detect(kind)
    given = options(kind)
    found = ("--sandbox", "container", "--container-engine", given.engine)
    runtime = ("--container-runtime", given.runtime) if given.runtime else ()
    return (*found, "--container-image", given.image, *runtime)


@functools.cache
def missing(kind: str) -> str:
    """Why an engine cannot be used here, or an empty text once it has the image."""
    if os.geteuid() != 0:
        return "needs root to make a root filesystem"
    try:
        engine = Engine.find(options(kind))
    except SandboxUnavailable:
        return f"needs {kind}"
    if engine.ask("info").returncode != 0:
        return f"needs a {kind} that works"
    return missing_image(engine, IMAGE, PACKAGES)


def missing_image(engine: Engine, name: str, packages: str) -> str:
    """Why there is no image of a Debian with these packages, empty once the engine has it."""
    if engine.ask("image", "inspect", name).returncode == 0:
        return ""
    given = os.environ.get("TESTS_ROOTFS", "")
    if given and name == IMAGE:
        return _import(engine, Path(given), name)
    if shutil.which("debootstrap") is None:
        return "needs debootstrap"
    with tempfile.TemporaryDirectory(dir=own_folder()) as folder:
        root, tar = Path(folder, "root"), Path(folder, "root.tar")
        for argv in (
            ["debootstrap", "--variant=minbase", f"--include={packages}", RELEASE, str(root)],
            ["tar", "-C", str(root), "-cf", str(tar), "."],
        ):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"needs a Debian mirror: {done.stderr[-300:] or done.stdout[-300:]}"
        return _import(engine, tar, name)


def _import(engine: Engine, tar: Path, name: str) -> str:
    argv = build_command(engine, name, str(tar))
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"needs {engine.kind} that imports: {done.stderr[-300:]}"


def left(engine: Engine) -> list[str]:
    """The containers of kernels that exist."""
    return engine.ask("ps", "--all", "--filter", f"label={LABEL}", "--quiet").stdout.split()
