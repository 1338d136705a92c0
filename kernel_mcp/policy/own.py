"""Modules that a session wrote itself, as files of its workspace."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

MAX_ENTRIES = 2000
"""Entries of a workspace that are looked at; it may be made huge on purpose."""


def own_modules(workspace: Path) -> frozenset[str]:
    """The names under which code may import the files and folders of a workspace.

    Only names are read. The standard library cannot be stood in for.
    """
    found: set[str] = set()
    try:
        with os.scandir(workspace) as entries:
            for entry in itertools.islice(entries, MAX_ENTRIES):
                name, dot, suffix = entry.name.partition(".")
                if name.isidentifier() and (not dot or suffix == "py"):
                    found.add(name)
    except OSError:
        return frozenset()
    return frozenset(found - sys.stdlib_module_names)
