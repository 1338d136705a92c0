"""Fixtures of the tests of limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.limits import quota as quota_module
from kernel_mcp.limits.manager import ResourceManager
from tests.unit.limits.watched import SMALL, Watched


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a folder measures it."""
    monkeypatch.setattr(quota_module.FolderQuota, "due", lambda _self, _others=0: True)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def watched(workspace: Path) -> Watched:
    return Watched(ResourceManager().open(SMALL, workspace, workspace), workspace)
