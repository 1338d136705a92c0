"""The defaults hold together."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_mcp.config.options import LOG_LEVELS, SANDBOXES
from kernel_mcp.config.settings import Limits, Settings


def test_settings_and_limits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout_s = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().pids = 1  # type: ignore[misc]


def test_the_defaults_fit_each_other() -> None:
    settings = Settings()
    assert settings.wait_s < settings.timeout_s < settings.idle_timeout_s
    assert settings.limits.tmp_bytes < settings.limits.memory_bytes
    assert settings.sandbox in SANDBOXES
    assert settings.log_level in LOG_LEVELS
