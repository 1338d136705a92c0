"""Containers for tests: real podman with a root filesystem made here, as no registry is reached.

`KERNEL_MCP_TEST_ROOTFS` may name a tar file of a root filesystem that has been made before.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernel_mcp.sandbox.engine import ContainerOptions, Engine
from kernel_mcp.sandbox.image import build_command

IMAGE = "kernel-mcp-test"
RELEASE = "bookworm"
PACKAGES = (
    "ca-certificates,fonts-dejavu-core,libbz2-1.0,libexpat1,libffi8,libgomp1,liblzma5,"
    "libreadline8,libsqlite3-0,libssl3,libstdc++6,libuuid1"
)
RUNTIME = "runc" if shutil.which("runc") else ""
OPTIONS = ContainerOptions(engine="podman", image=IMAGE, runtime=RUNTIME)


@functools.cache
def missing() -> str:
    """Why there are no containers here, or an empty text once the image is there."""
    if os.geteuid() != 0:
        return "needs root to make a root filesystem"
    if shutil.which("podman") is None:
        return "needs podman"
    engine = Engine.find(OPTIONS)
    if engine.ask("image", "inspect", IMAGE).returncode == 0:
        return ""
    given = os.environ.get("KERNEL_MCP_TEST_ROOTFS", "")
    if given:
        return _import(engine, Path(given))
    if shutil.which("debootstrap") is None:
        return "needs debootstrap"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root, tar = Path(folder, "root"), Path(folder, "root.tar")
        for argv in (
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(root)],
            ["tar", "-C", str(root), "-cf", str(tar), "."],
        ):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"needs a Debian mirror: {done.stderr[-300:] or done.stdout[-300:]}"
        return _import(engine, tar)


def _import(engine: Engine, tar: Path) -> str:
    argv = build_command(engine, IMAGE, str(tar))
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"needs podman that imports: {done.stderr[-300:]}"


def left() -> list[str]:
    """The containers of kernels that exist."""
    done = Engine.find(OPTIONS).ask("ps", "--all", "--filter", "label=kernel-mcp.server", "--quiet")
    return done.stdout.split()
