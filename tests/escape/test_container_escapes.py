"""Every attack on the operating system, in a container; its controls are those of `test_escape`."""

from __future__ import annotations

import pytest

from tests.escape.host import run_attacks
from tests.escape.inside import ATTACKS
from tests.integration import containers

NAMES = [attack.name for attack in ATTACKS]


STATED = {"podman": set[str](), "docker": {"read_the_boot_command_line"}}
"""Attacks that the backend's report excludes, by engine."""


@pytest.fixture(scope="module", params=containers.ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(engine: str) -> dict[str, str]:
    return run_attacks(containers.detect(engine), NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_held_or_a_stated_gap(name: str, outcomes: dict[str, str], engine: str) -> None:
    assert outcomes[name].startswith("ESCAPED" if name in STATED[engine] else "held")


def test_the_gaps_are_stated(engine: str) -> None:
    if STATED[engine]:
        assert any("boot command line" in gap for gap in containers.detect(engine).report().gaps)
