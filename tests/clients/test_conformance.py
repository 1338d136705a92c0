"""The protocol's own conformance suite passes, in both eras, but for extensions not offered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.node import installed
from tests.integration.httpserver import LEAN, HttpServer

pytestmark = pytest.mark.full

PACKAGE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
FIXTURE = (sys.executable, "-m", "tests.clients.conformance.fixture")
EXPECTED = Path(__file__).parent / "conformance/expected_failures.txt"
ERAS = ("2025-11-25", "2026-07-28")
EXTENSION = "tasks-"
"""How the names of scenarios begin that are about the one extension of the suite."""
RUN = re.compile(r"server-(.+)-\d{4}-\d\d-\d\dT")


def expected() -> set[str]:
    """The scenarios that fail on purpose."""
    lines = [line for line in EXPECTED.read_text().splitlines() if not line.startswith("#")]
    found = dict(line.split(": ", 1) for line in lines)
    assert len(found) == len(lines)
    assert all(found.values())
    return set(found)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("conformance"), PACKAGE)


@pytest.mark.parametrize("revision", ERAS)
def test_what_a_revision_requires_passes(programs: Path, tmp_path: Path, revision: str) -> None:
    server = HttpServer([*FIXTURE, "--http", "127.0.0.1:0", "--no-auth", *LEAN])
    try:
        suite = [str(programs / "node"), str(programs / "conformance"), "server"]
        done = subprocess.run(
            [*suite, "--url", server.mcp, "--requirements", revision, "-o", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        server.signal()
        assert server.process.wait() == 0
    finally:
        server.close()
    assert done.returncode == 0, done.stdout[-3000:]
    failures: dict[str, list[str]] = {}
    ran = set()
    for file in tmp_path.glob("*/checks.json"):
        named = RUN.match(file.parent.name)
        assert named, file
        checks = json.loads(file.read_text())
        ran.add(named[1])
        if failed := [check for check in checks if check["status"] == "FAILURE"]:
            failures[named[1]] = [f"{it['id']}: {it.get('errorMessage', '')}" for it in failed]
    assert len(ran) >= 30
    on_purpose = {each for each in expected() if each in ran}
    unexpected = {name: whys for name, whys in failures.items() if name not in on_purpose}
    assert unexpected == {}
    assert on_purpose - set(failures) == set(), "these pass: take them off the list"
    if revision == ERAS[-1]:
        assert on_purpose == expected(), "these were not tried"


def test_only_extensions_are_left_out() -> None:
    assert all(name.startswith(EXTENSION) for name in expected())
