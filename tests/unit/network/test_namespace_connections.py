"""Connections to a starting kernel: never to what a link in its folder names."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from kernel_mcp.network import namespace_connections as module


def test_sockets_are_reached_and_links_to_them_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(real))
        listener.listen()
        link.symlink_to(real)
        module._connected(str(real)).close()
        tries = 0

        def give_up(_seconds: float) -> None:
            nonlocal tries
            tries += 1
            raise InterruptedError

        monkeypatch.setattr(time, "sleep", give_up)
        with pytest.raises((InterruptedError, OSError)):
            module._connected(str(link))
        listener.accept()[0].close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
