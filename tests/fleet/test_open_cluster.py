"""A cluster that asks nobody for a token is no place for a node."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet.cluster import FleetUnavailable, require_authentication
from tests.fleet.machines import BIN, PATIENCE_S, Machines, end

ADDRESS = "127.0.0.9:6499"


@pytest.fixture
def unlocked() -> Iterator[str]:
    """The address of a cluster without authentication."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fo-") as folder:
        host, _, port = ADDRESS.partition(":")
        command = [
            str(BIN / "ray"),
            "start",
            "--head",
            f"--port={port}",
            f"--node-ip-address={host}",
        ]
        command += ["--include-dashboard=false", f"--temp-dir={folder}", "--block", "--num-cpus=1"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats"]
        log = Path(folder) / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
        with log.open("wb") as file:
            ray = subprocess.Popen(
                command,
                env={**environ, "RAY_AUTH_MODE": "disabled"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            until = time.monotonic() + PATIENCE_S
            while "block forever" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.1)
            assert "block forever" in log.read_text(), log.read_text()[-2000:]
            yield ADDRESS
        finally:
            end(ray)


def test_a_cluster_that_lets_in_who_has_no_token_is_refused(unlocked: str) -> None:
    with pytest.raises(ConfigError, match="asks nobody for its token"):
        require_authentication(unlocked)


def test_one_that_does_not_answer_is_no_cluster_that_refuses() -> None:
    with pytest.raises(FleetUnavailable, match="could not be asked"):
        require_authentication("127.0.0.9:6498")


def test_one_that_asks_for_it_is_taken(whole: Machines) -> None:
    require_authentication(whole.address)
