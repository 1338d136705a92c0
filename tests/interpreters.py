"""The interpreters of this machine that kernels can run on; as a program: their paths.

Tests name them without looking for them: each worker would look while it collects the tests.
"""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON
from kernel_mcp.environments.uv import Uv
from tests.run_folder import own_folder

TRICKY = ("3.12.1", "3.12.3")
"""Releases that are tried even where a newer one of their minor version is installed."""
NAMES = (*(f"3.{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)), *TRICKY)
"""All that may be there: the newest release of a minor version, and `TRICKY` ones."""


@functools.cache
def installed() -> dict[str, str]:
    """Return the path of each interpreter to try, by its release: the newest of each minor version.

    `TRICKY` ones come beside them.
    """
    uv = Uv.installed(own_folder())
    words = ["python", "list", "--only-installed", "--output-format", "json"]
    with ThreadPoolExecutor(1) as thread:  # tests that ask may run an event loop in this one
        listed = thread.submit(anyio.run, uv.query, words).result()
    newest: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int, int], tuple[str, str]] = {}
    for each in json.loads(listed.output):
        major, minor, patch = (each["version_parts"][part] for part in ("major", "minor", "patch"))
        if each["implementation"] == "cpython" and OLDEST_PYTHON <= (major, minor) <= NEWEST_PYTHON:
            found.setdefault((major, minor, patch), (each["version"], each["path"]))
            newest[major, minor] = max(patch, newest.get((major, minor), 0))
    return {
        version: path
        for (*minor, patch), (version, path) in sorted(found.items())
        if version in TRICKY or patch == newest[minor[0], minor[1]]
    }


def interpreter(name: str) -> tuple[str, str]:
    """Return the release and the path of one of `NAMES`; skip the test where it is missing."""
    found = [each for each in installed().items() if f"{each[0]}.".startswith(f"{name}.")]
    if not found:
        pytest.skip(f"needs Python {name}")
    return found[-1]


if __name__ == "__main__":
    print(*installed().values(), sep="\n")
