"""Environments of Python that are measured against, built by uv and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import uv

from benchmarks.results import BenchmarkError
from kernel_mcp.environments.store import default_cache

PACKAGES = ("numpy", "pandas", "matplotlib")
"""Packages that cells use; every environment has them."""
BUILD_S = 600


async def environment(name: str, packages: Sequence[str]) -> Path:
    """The folder of an environment with these packages. Raises BenchmarkError."""
    wanted = [sys.version, *packages]
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder = default_cache() / "benchmarks" / f"{name}-{digest}"
    complete = anyio.Path(folder / "complete")
    if not await complete.exists():
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        python = str(folder / "bin/python")
        await _uv("venv", "--quiet", "--no-config", "--python", sys.executable, str(folder))
        await _uv("pip", "install", "--quiet", "--no-config", "--compile-bytecode",
                  "--python", python, *packages)  # fmt: skip
        await complete.touch()
    return folder


async def build_ours(allow: str) -> None:
    """Build the server's own environment in its cache. Raises BenchmarkError."""
    command = [sys.executable, "-m", "kernel_mcp", "env", "build", "--allow", allow]
    await _run(command, clean_environ())


def clean_environ() -> dict[str, str]:
    """The variables of this process, without those that configure our server."""
    return {name: text for name, text in os.environ.items() if not name.startswith("KERNEL_MCP_")}


async def _uv(*args: str) -> None:
    environ = dict(os.environ)
    if Path("/etc/ssl/certs").is_dir():
        environ.setdefault("UV_SYSTEM_CERTS", "1")
    await _run([uv.find_uv_bin(), *args], environ)


async def _run(command: Sequence[str], environ: dict[str, str]) -> None:
    with anyio.fail_after(BUILD_S):
        done = await anyio.run_process(
            command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-500:]
        raise BenchmarkError(f"{Path(command[0]).name} {command[1]} failed: {said}")
