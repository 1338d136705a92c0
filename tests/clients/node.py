"""Programs that come as packages for Node, installed for one run of the tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.conftest import lacking

NODE = "node@22"
"""Newer than what machines have; it comes as a package too."""


def installed(folder: Path, *packages: str) -> Path:
    """The folder of the commands that `packages` bring, with Node among them."""
    npm = shutil.which("npm")
    if npm is None:
        lacking("node", "needs npm")
    (folder / "package.json").write_text("{}")
    done = subprocess.run(
        [npm, "install", "--silent", NODE, *packages],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lacking("node", f"npm cannot install {packages}: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin"
