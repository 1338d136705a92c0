"""What of a kernel is not in its dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_specs.restricted.hibernation import snapshot


def test_semaphores_hold_no_data_that_could_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, tmp = tmp_path / "shm", tmp_path / "tmp"
    for path in (shared / "sem.loky-1", shared / "psm_1", tmp / "sem.csv"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(snapshot, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(snapshot, "SEMAPHORES", f"{shared}/sem.")
    assert snapshot.left_files(str(tmp)) == [str(tmp / "sem.csv"), str(shared / "psm_1")]
