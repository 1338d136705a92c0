"""Kernels of other languages for tests: those that this machine has.

`.ci/setup languages` installs them; JUPYTER_PATH may name the data folders of others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kernel_mcp.kernelspecs.spec import SPEC_FILE, SYSTEM_FOLDERS
from tests.conftest import lacking

BESIDE = Path(__file__).parents[2] / ".languages" / "share" / "jupyter"
"""The data folder of the environment that `.ci/setup languages` makes."""
STOCK = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3"
"""The kernel spec of stock ipykernel, which every development environment has."""
SPECS = {"r": "ir", **{name: name for name in ("bash", "deno", "octave", "tslab")}}
"""Names of the kernel specs, by the name that tests give them."""


def find_spec(name: str) -> Path | None:
    """Return the folder of a kernel spec; None if its kernel is not installed."""
    if name == "stock":
        return STOCK
    given = [each for each in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if each]
    folders = (
        Path(each, "kernels", SPECS[name]) for each in (*given, str(BESIDE), *SYSTEM_FOLDERS)
    )
    return next((each for each in folders if Path(each, SPEC_FILE).is_file()), None)


def kernel_flag(name: str) -> str:
    """Return the value of `--kernel` for it; skip the test where it is missing and not required."""
    spec = find_spec(name)
    if spec is None:
        lacking("languages", f"there is no kernel of {name}: run .ci/setup languages")
    return f"{name}={spec}"
