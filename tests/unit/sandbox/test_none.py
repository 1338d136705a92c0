"""Kernels without a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError
from kernel_mcp.sandbox.base import SandboxRequest
from kernel_mcp.sandbox.select import NoSandbox


def test_temporary_files_and_settings_are_not_looked_for_where_others_can_write(
    tmp_path: Path,
) -> None:
    request = SandboxRequest(["true"], {}, tmp_path, tmp_path, (), Limits())
    sandbox = NoSandbox()
    sandbox.command(request, None)
    tmp = Path(sandbox.guest_paths(tmp_path, tmp_path).tmp)
    assert tmp.parent == tmp_path
    assert tmp.stat().st_mode & 0o777 == 0o700
    tmp.rmdir()
    tmp.symlink_to("/tmp")
    with pytest.raises(LaunchError, match="in the way"):
        sandbox.command(request, None)
