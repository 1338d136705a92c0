"""A machine with a GPU, whatever the one is that the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.linux import gpus


@pytest.fixture(autouse=True)
def a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for its driver."""
    found = gpus.Driver((Path("/dev/nvidia0"), Path("/dev/nvidiactl")), Path("/opt/driver/lib"))
    monkeypatch.setattr(gpus, "driver", lambda: found)
