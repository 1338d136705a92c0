"""No attack succeeds in the sandbox; those that can be shown without harm succeed outside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.escape.host import control_names, run_attacks
from tests.escape.inside import ATTACKS
from tests.integration.unprivileged import as_ordinary_user

NAMES = [attack.name for attack in ATTACKS]
CONTROLS = [
    attack.name
    for attack in ATTACKS
    if attack.control != "maybe" and attack.name in control_names()
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_attacks("bwrap", NAMES)


@pytest.fixture(scope="module")
def outcomes_of_an_ordinary_user() -> dict[str, str]:
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    command = as_ordinary_user([sys.executable, "-m", "tests.escape.host", "bwrap", "json"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def outcomes_without_a_sandbox() -> dict[str, str]:
    return run_attacks("none", control_names())


@pytest.mark.parametrize("name", NAMES)
def test_held(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name].startswith("held")


@pytest.mark.parametrize("name", NAMES)
def test_held_for_an_ordinary_user(name: str, outcomes_of_an_ordinary_user: dict[str, str]) -> None:
    assert outcomes_of_an_ordinary_user[name].startswith("held")


def test_control_the_first_process_is_open_where_it_is_not_covered() -> None:
    script = (
        "from tests.escape.host import run_attacks\n"
        "from tests.integration.sabotaged import Sabotaged\n"
        "cover = ('--perms', '0555', '--tmpfs', '/proc/1', '--remount-ro', '/proc/1')\n"
        "sandbox = Sabotaged.without(*cover)\n"
        "print(run_attacks(sandbox, ['look_into_the_first_process_of_the_sandbox']))\n"
    )
    words = [sys.executable, "-c", script]
    command = as_ordinary_user(words) if os.geteuid() == 0 else words
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ESCAPED: ['mem', 'maps'" in done.stdout


@pytest.mark.parametrize("name", CONTROLS)
def test_control_succeeds_without_a_sandbox(
    name: str, outcomes_without_a_sandbox: dict[str, str]
) -> None:
    assert outcomes_without_a_sandbox[name].startswith("ESCAPED")
