"""The program beside each container runs in a bare interpreter."""

from __future__ import annotations

import subprocess
import sys

from kernel_mcp.sandbox.container import _SHIM


def test_the_shim_finds_its_control_groups_with_the_standard_library_alone() -> None:
    looking = f"import os, runpy; runpy.run_path({str(_SHIM)!r})['_bring_along'](os.getpid())"
    subprocess.run([sys.executable, "-I", "-S", "-c", looking], check=True)
