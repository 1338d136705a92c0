"""A workspace, with and without openat2."""

from pathlib import Path

import pytest

from kernel_mcp.files.workspace import Workspace
from kernel_mcp.linux.safe_tree import Opener, by_walking, with_openat2


@pytest.fixture(params=[with_openat2, by_walking], ids=["openat2", "walk"])
def opener(request: pytest.FixtureRequest) -> Opener:
    chosen: Opener = request.param
    return chosen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("outside")
    folder = tmp_path / "ws"
    folder.mkdir()
    return folder


@pytest.fixture
def workspace(root: Path, opener: Opener) -> Workspace:
    return Workspace(root, opener=opener)
