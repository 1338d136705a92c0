"""Bytecode of what kernels run: they find its sources read-only and never write any."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import anyio

from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.sandbox.base import BOOT_FOLDER

COMPILE_S = 30.0

logger = logging.getLogger(__name__)


async def compile_guest(environment: KernelEnvironment, folder: Path = BOOT_FOLDER) -> None:
    """Compile the sources in `folder` for an environment's Python, unless that has been done.

    Every kernel and template starts some 30 ms sooner for it. Nothing happens where this server may
    not write there. No package of the environment is imported, and one of unknown version is left
    as it is.
    """
    if not environment.version:
        return
    try:
        stale = await anyio.to_thread.run_sync(_stale, folder, environment.version)
        if stale:
            with anyio.fail_after(COMPILE_S):
                command = [str(environment.bare), "-I", "-S", "-m", "compileall", "-q"]
                await anyio.run_process([*command, *map(str, stale)])
    except (OSError, TimeoutError, subprocess.SubprocessError) as reason:
        logger.info("kernels compile their own start, which takes them longer: %s", reason)


def _stale(folder: Path, version: str) -> list[Path]:
    """The sources without bytecode of theirs for a version of CPython."""
    tag = f"cpython-{''.join(version.split('.')[:2])}"
    return [
        source
        for source in sorted(folder.rglob("*.py"))
        if _changed(source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc") < _changed(source)
    ]


def _changed(file: Path) -> float:
    """When a file was changed; never, when there is none."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
