"""Every attack of the table on the Landlock sandbox, as root, as an ordinary user, and unconfined.

An attack that works for an ordinary user without the sandbox is run so too: a defence that nobody
attacks proves nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_mcp.sandbox.landlock import LandlockSandbox, landlock_available
from tests.escape.landlock_attacks import ATTACKS
from tests.escape.landlock_table import Attacker, Finding
from tests.integration.unprivileged import as_ordinary_user

pytestmark = [
    pytest.mark.skipif((reason := landlock_available()) is not None, reason=str(reason)),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="attacks use x86-64 call numbers"),
]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="compares root with an ordinary user")
TABLE_TIMEOUT_S = 500


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    attacker = Attacker(LandlockSandbox.detect())
    yield attacker
    attacker.close()


def table_of_an_ordinary_user(way: str) -> dict[str, Finding]:
    """Run all attacks as an ordinary user; `way` is confined or unconfined."""
    argv = [sys.executable, "-m", "tests.escape.landlock_table", way]
    if os.geteuid() == 0:
        argv = as_ordinary_user(argv)
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=TABLE_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return {name: Finding(**finding) for name, finding in found.items()}


@pytest.fixture(scope="module")
def confined() -> dict[str, Finding]:
    return table_of_an_ordinary_user("confined")


@pytest.fixture(scope="module")
def unconfined() -> dict[str, Finding]:
    return table_of_an_ordinary_user("unconfined")


def held(finding: Finding) -> bool:
    """Return True if the attack was carried out and failed, rather than never started."""
    return not finding.escaped and "could not be entered" not in finding.how


@pytest.mark.parametrize("name", ATTACKS)
def test_the_sandbox_holds_against(name: str, attacker: Attacker) -> None:
    finding = attacker.attack(name)
    assert held(finding), finding.how


@AS_ROOT
@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
def test_the_sandbox_of_an_ordinary_user_holds_against(
    name: str, confined: dict[str, Finding]
) -> None:
    assert held(confined[name]), confined[name].how


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name, attack in ATTACKS.items() if attack.works_unconfined]
)
def test_without_the_sandbox_the_attack_works(name: str, unconfined: dict[str, Finding]) -> None:
    assert unconfined[name].escaped, unconfined[name].how
