"""How an end is told, without a process."""

from __future__ import annotations

import pytest

from kernel_mcp.launch.process import exit_status, fatal_line
from kernel_mcp.linux.proc import ExitStatus


@pytest.mark.parametrize(
    ("code", "wrapped", "expected"),
    [
        (0, True, ExitStatus(code=0)),
        (3, True, ExitStatus(code=3)),
        (139, True, ExitStatus(signal=11)),
        (137, True, ExitStatus(signal=9)),
        (255, True, ExitStatus(code=255)),
        (-9, True, ExitStatus(signal=9)),
        (-11, False, ExitStatus(signal=11)),
        (139, False, ExitStatus(code=139)),
    ],
)
def test_exit_codes_above_128_are_signals_where_bubblewrap_reports_them(
    code: int, wrapped: bool, expected: ExitStatus
) -> None:
    assert exit_status(code, wrapped=wrapped, output="") == expected


def test_the_line_that_names_a_crash_is_found_and_cut() -> None:
    output = "loading\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
    assert fatal_line(output) == "Fatal Python error: Aborted"
    assert fatal_line("all is well\n") == ""
    assert len(fatal_line("Fatal Python error: " + "x" * 5000)) == 200


def test_an_orderly_end_has_no_detail() -> None:
    assert exit_status(0, wrapped=True, output="Fatal Python error: no").detail == ""
    assert exit_status(1, wrapped=True, output="Fatal Python error: no").detail != ""
