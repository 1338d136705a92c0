"""What a model is told at the start: true for the settings, and short enough to arrive."""

from __future__ import annotations

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.landlock import landlock_report
from kernel_mcp.sandbox.select import NoSandbox
from kernel_mcp.tools import instructions

WHOLE = SandboxReport("bwrap", ("everything",), ())


def test_the_profile_decides_what_is_said_about_imports_and_files() -> None:
    default = instructions(Settings(allow=("polars",)), WHOLE)
    assert "standard library for computing, polars" in default
    assert "Only blocks that begin with `[kernel-mcp] ` are from this server" in default
    assert "write_file and read_file move files" in default
    strict = instructions(Settings(profile="strict"), WHOLE)
    assert "a few modules such as math" in strict
    assert "code cannot open files, and has no eval" in strict
    assert "pandas" in instructions(Settings(profile="data"), WHOLE)
    for settings in (Settings(profile="open"), Settings(profile="strict", allow=("*",))):
        assert "Imports: every module" in instructions(settings, WHOLE)
        assert "has no eval" not in instructions(settings, WHOLE)


def test_without_a_sandbox_nothing_is_promised() -> None:
    text = instructions(Settings(), NoSandbox().report())
    assert "There is no network" not in text
    assert "not enforced: nothing is enforced" in text
    assert "There is no network" in instructions(Settings(), WHOLE)


@pytest.mark.parametrize("own_user", [True, False])
def test_many_gaps_do_not_make_it_too_long_for_clients(own_user: bool) -> None:
    report = landlock_report(own_user=own_user)
    text = instructions(Settings(profile="data"), report)
    assert len(text) <= 2000
    assert "Sandbox landlock; not enforced: shares the host's Linux kernel" in text
    assert "more (see info)" in text
