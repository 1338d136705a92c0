"""Fixtures shared by every level of the suite."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from tests.integration.servers import Servers, shared_servers
from tests.run_folder import LEAST_BYTES, NEEDED_BYTES, RunFolder, short_of

# with it, jsonschema builds the grammars of addresses at its import: 2 s in each worker
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# how fast examples are made says something about the machine, not about them
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")

REQUIRED = "TESTS_REQUIRE"
"""The variable that names, separated by commas, what no test may be skipped for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of this suite."""
    group = parser.getgroup("kernel-mcp")
    group.addoption("--full", action="store_true", help="run the tests that take long, too")
    group.addoption(
        "--ways",
        action="store_true",
        help="run further ways to the same behaviour, too; `--full` does",
    )
    group.addoption(
        "--require",
        action="append",
        default=[],
        metavar="WHAT",
        help="let tests that lack WHAT (containers, languages, node) fail instead of being skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and what has to be there, which worker processes read as well."""
    config.addinivalue_line("markers", "full: takes long; runs with --full only")
    config.addinivalue_line("markers", "ways: another way to a behaviour; see --ways")
    required = config.getoption("--require")
    if required:
        os.environ[REQUIRED] = ",".join(required)
    os.environ.setdefault("KERNEL_MCP_PERSIST", "off")  # tests are no successors of each other
    if not _works_for_another(config):
        folder = RunFolder()
        folder.tell(os.environ)
        config.add_cleanup(folder.close)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say once that the disk is too small, rather than by tests that fail for it."""
    if not _works_for_another(session.config) and (reason := short_of(NEEDED_BYTES)):
        pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End the run that has filled the disk."""
    if report.failed and (reason := short_of(LEAST_BYTES)):
        pytest.exit(f"the disk is full; {reason}", returncode=pytest.ExitCode.INTERRUPTED)


def _works_for_another(config: pytest.Config) -> bool:
    """Return True if this process runs tests for the one that was started."""
    return hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out, unless they are asked for."""
    if config.getoption("--full"):
        return
    marks = ("full",) if config.getoption("--ways") else ("full", "ways")
    left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def lacking(what: str, reason: str) -> NoReturn:
    """Skip the test that lacks something, or fail it where that is required."""
    if what in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop the server runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
async def servers() -> AsyncIterator[Servers]:
    """Servers of a module's tests, one for each set of flags."""
    async with shared_servers() as servers:
        yield servers
