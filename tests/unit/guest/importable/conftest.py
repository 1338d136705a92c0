"""A socket where a process waits, and the gateway that dials it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.guest.importable.gateway import Gateway, run


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "t"))
        made.listen(100)
        yield made


@pytest.fixture
def gateway(listening: socket.socket) -> Iterator[Gateway]:
    made = Gateway(Path(listening.getsockname()))
    yield made
    made.close()


@pytest.fixture
def out(gateway: Gateway, listening: socket.socket) -> Callable[[str], str]:
    """Returns what code prints in a process that can call tools."""

    def run_there(code: str) -> str:
        done = run(listening, code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_there
