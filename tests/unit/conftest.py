"""Fixtures shared by the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.linux import cgroupfs
from tests.unit.fake_cgroups import FakeGroups


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    fake = FakeGroups(tmp_path / "cgroup", tmp_path / "self")
    fake.root.mkdir()
    fake.process.mkdir()
    monkeypatch.setattr(cgroupfs, "make", fake.make)
    monkeypatch.setattr(cgroupfs, "_unmake", fake.unmake)
    monkeypatch.setattr(cgroupfs, "write", fake.write)
    return fake
