"""Every attack on the operating system, in a container; its controls are those of `test_escape`."""

from __future__ import annotations

import pytest

from kernel_mcp.sandbox.select import select_sandbox
from tests.escape.host import run_attacks
from tests.escape.inside import ATTACKS
from tests.integration import containers

pytestmark = pytest.mark.skipif(bool(containers.missing()), reason=containers.missing())
NAMES = [attack.name for attack in ATTACKS]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_attacks(select_sandbox("container", container=containers.OPTIONS), NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_held(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name].startswith("held")
