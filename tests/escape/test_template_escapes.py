"""Kernels of one template reach neither the host nor each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import anyio
import pytest

from tests.escape import neighbours
from tests.escape.inside import ATTACKS
from tests.escape.landlock_attacks import ATTACKS as LANDLOCK_ATTACKS
from tests.escape.template_host import forked_outcomes, outcomes_of_a_package
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user

NEIGHBOURS = list(neighbours.attacks())
NAMES = [attack.name for attack in (*ATTACKS, *NEIGHBOURS)]
CONTROLS = [attack.name for attack in NEIGHBOURS if attack.control == "anyone"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return anyio.run(forked_outcomes)


@pytest.fixture(scope="module")
def outcomes_of_an_ordinary_user() -> dict[str, str]:
    return outcomes_in_a_process_of_its_own()


@pytest.fixture(scope="module")
def outcomes_without_a_sandbox() -> dict[str, str]:
    return outcomes_in_a_process_of_its_own("unconfined")


def outcomes_in_a_process_of_its_own(*form: str) -> dict[str, str]:
    """Run the attacks without any privilege of this process."""
    command = [sys.executable, "-m", "tests.escape.template_host", *form]
    if os.geteuid() == 0:
        command = as_ordinary_user(command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_held(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name].startswith("held"), outcomes[name]


@pytest.mark.parametrize("name", NAMES)
def test_held_for_an_ordinary_user(name: str, outcomes_of_an_ordinary_user: dict[str, str]) -> None:
    assert outcomes_of_an_ordinary_user[name].startswith("held")


@pytest.mark.parametrize("name", CONTROLS)
def test_control_succeeds_without_a_sandbox(
    name: str, outcomes_without_a_sandbox: dict[str, str]
) -> None:
    assert outcomes_without_a_sandbox[name].startswith("ESCAPED")


@pytest.mark.parametrize("user", ["whoever runs the tests", "an ordinary user"])
def test_a_package_in_the_template_is_bounded(user: str) -> None:
    if user == "an ordinary user":
        found = outcomes_in_a_process_of_its_own("package")
    else:
        found = anyio.run(outcomes_of_a_package)
    assert len(found) > 7
    assert {name: told for name, told in found.items() if not told.startswith("held")} == {}


def test_the_page_on_tests_counts_the_attacks() -> None:
    told = (REPOSITORY / "docs/security/tests.md").read_text()
    assert f"- {len(ATTACKS)} attacks on files" in told
    assert f"{len(LANDLOCK_ATTACKS)} more on Landlock" in told
    assert f"- {len(NEIGHBOURS)} attacks of a session on its neighbour" in told
