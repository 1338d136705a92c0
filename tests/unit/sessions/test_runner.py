"""What a restrictive policy says of a cell before it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernel_mcp.policy import Policy
from kernel_mcp.sessions.runner import refuse

pytestmark = pytest.mark.anyio

POLICY = Policy.for_allow(["numpy"])
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}.7"
BROKEN = ("x = (1\nimport os", "x = (1\n!ls", "if x:\npass", "f a b", "f(\n__import__('os')")


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("python", ["", "3.9.2", OWN])
async def test_text_that_does_not_parse_is_not_run(code: str, python: str, tmp_path: Path) -> None:
    refusal = await refuse(code, POLICY, tmp_path, python=python)
    assert refusal is not None
    assert refusal.name == "SyntaxError"
    assert refusal.value.startswith("nothing was run.\nline ")
    assert "Error: " in refusal.value


@pytest.mark.parametrize("code", BROKEN)
async def test_a_newer_python_than_the_servers_parses_for_itself(code: str, tmp_path: Path) -> None:
    assert await refuse(code, POLICY, tmp_path, python=f"3.{sys.version_info[1] + 1}.0rc1") is None


async def test_a_command_is_refused_whatever_the_python(tmp_path: Path) -> None:
    for python in ("3.9.2", OWN, "3.99.0"):
        refusal = await refuse("!ls\nx = (1", POLICY, tmp_path, python=python)
        assert refusal is not None
        assert refusal.name == "PolicyError"


async def test_with_everything_allowed_the_kernel_parses(tmp_path: Path) -> None:
    assert await refuse("x = (1\nimport os", Policy.for_allow(["*"]), tmp_path) is None


async def test_what_only_the_compiler_objects_to_is_left_to_the_kernel(tmp_path: Path) -> None:
    assert await refuse("return 1", POLICY, tmp_path) is None
