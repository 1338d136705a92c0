"""The validators of those who take bundles and plugins pass ours, and the bundle runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import uv

from kernel_mcp import __version__
from tests.clients.node import installed

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PACKAGES = ("@anthropic-ai/claude-code", "@anthropic-ai/mcpb")


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the validators on its PATH, installed for this run."""
    folder = tmp_path_factory.mktemp("validators")
    programs = installed(folder, *PACKAGES)
    return {**os.environ, "HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}


def run(environ: dict[str, str], *words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plugin_is_valid(environ: dict[str, str]) -> None:
    assert "passed" in run(environ, "claude", "plugin", "validate", "packaging/claude-code")


def test_the_bundle_is_valid_and_runs_from_where_it_was_unpacked(
    environ: dict[str, str], tmp_path: Path
) -> None:
    run(environ, "mcpb", "validate", "packaging/mcpb/manifest.json")
    run(environ, "packaging/mcpb/pack")
    run(environ, "mcpb", "unpack", "dist/kernel-mcp.mcpb", str(tmp_path))
    words = ["run", "--no-dev", "--directory", str(tmp_path), "kernel-mcp", "--version"]
    plain = {name: text for name, text in environ.items() if name != "VIRTUAL_ENV"}
    assert run(plain, uv.find_uv_bin(), *words) == f"kernel-mcp {__version__}\n"
