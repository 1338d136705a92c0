"""One cluster for all tests of the fleet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import lacking
from tests.fleet.machines import Machines, connected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster is much to start, and Ray is not part of the locked tools."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """The machines as they are."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("one process has the cluster: .ci/full fleet")
    if find_spec("ray") is None:
        lacking("fleet", "Ray is not installed: .ci/setup fleet")
    root = Path(tempfile.mkdtemp(prefix="fl-", dir="/var/tmp"))  # sockets have short paths
    made = Machines(root)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=made.token)  # read with the import
    import ray

    try:
        yield made
    finally:
        ray.shutdown()
        made.end()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def ray(machines: Machines) -> Any:
    """Ray, of which the process of the tests is a part."""
    machines.whole()
    return connected(machines)


@pytest.fixture
def whole(machines: Machines, ray: Any) -> Machines:
    """Machines on each of which there is a node."""
    machines.whole()
    return machines
