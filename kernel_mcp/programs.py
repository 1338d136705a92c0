"""Which programs the server starts: none that the current folder could bring.

That folder may be a clone of anything. What leads into it by a relative name, an entry of PATH or
Python's own search for modules, is passed over.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

_RUN = (
    "import sys; sys.path = [place for place in sys.path if place]; from runpy import run_module; "
    "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def find_program(name: str) -> str | None:
    """The program of this name on PATH, None where there is none."""
    return shutil.which(name, path=search_path(os.environ))


def search_path(environ: Mapping[str, str]) -> str:
    """The entries of PATH that mean the same in every folder."""
    entries = environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if entry.startswith("/"))


def own_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this project, and no namesake in the current folder.

    `python -m` would look there first.
    """
    return [sys.executable, "-c", _RUN, module, *arguments]
