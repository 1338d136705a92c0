"""boot.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel_specs.restricted import config

GOOD: dict[str, Any] = {
    "version": 1,
    "policy": {"allow_all": False, "modules": ["math", "urllib.parse"], "profile": "default"},
    "limits": {
        "memory_bytes": 100,
        "pids": 2,
        "open_files": 3,
        "file_bytes": 4,
        "cpu_seconds": 0,
    },
    "workspace": "/workspace",
    "tmp": "/tmp",
    "layers": ["/packages/a"],
    "ready_fd": 5,
    "runtime": ["/usr"],
    "output": {"chunk_bytes": 65536, "flush_seconds": 0.05, "message_bytes": 12582912},
}


def test_every_entry_is_read() -> None:
    boot = config.parse(GOOD)
    assert boot.confined
    assert boot.policy.modules == ("math", "urllib.parse")
    assert not boot.policy.allow_all
    assert boot.limits.memory_bytes == 100
    assert boot.layers == ("/packages/a",)
    assert boot.runtime == ("/usr",)
    assert boot.ready_fd == 5
    assert boot.output.flush_seconds == 0.05


def test_without_boot_file_nothing_is_restricted(tmp_path: Path) -> None:
    boot = config.load(tmp_path / "connection.json")
    assert not boot.confined
    assert boot.policy.allow_all
    assert boot.ready_fd == -1


def test_a_policy_that_does_not_say_so_allows_nothing() -> None:
    assert not config.parse({"version": 1}).policy.allow_all
    assert not config.parse({**GOOD, "policy": {"allow_all": "yes"}}).policy.allow_all


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"layers": "not a list"},
        {"layers": [1]},
        {"limits": {"unknown": 1}},
        {"limits": {"pids": "many"}},
        {"output": {"unknown": 1}},
        {"policy": []},
        {"ready_fd": None},
    ],
)
def test_a_file_not_as_agreed_stops_the_start(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "boot.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(config.BootError, match=r"boot\.json"):
        config.load(tmp_path / "connection.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"1"])
def test_a_file_that_is_no_json_object_stops_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "boot.json").write_bytes(content)
    with pytest.raises(config.BootError):
        config.load(tmp_path / "connection.json")
