"""The output of cells that a killed server has not saved."""

from __future__ import annotations

from pathlib import Path

from kernel_mcp.output.items import Display, Failure, Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.output_journal import (
    CUT,
    MOST_TEXT_BYTES,
    OUTPUT_BYTES,
    OutputJournal,
)


def reopened(path: Path) -> dict[int, str]:
    """The output that a later server reads."""
    journal = OutputJournal(path)
    try:
        return journal.texts()
    finally:
        journal.close()


def test_what_was_put_out_is_read_without_a_close(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "output")
    cell = Cell(3, "", 0.0, OutputLog(tmp_path, 3))
    journal.shown(cell, Stream("stdout", "eins\n"))
    journal.shown(cell, Display({"text/plain": "a plot", "image/png": "x"}, {}))
    journal.shown(cell, Display({"image/png": "x"}, {}))
    journal.add(4, "zwei ☃")
    journal.shown(cell, Failure("ValueError", "no", ()))

    assert reopened(tmp_path / "output") == {3: "eins\na plot\nValueError: no\n", 4: "zwei ☃"}


def test_saved_cells_are_forgotten(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "output")
    for number in (1, 2, 3):
        journal.add(number, f"of {number}")
    journal.forget(2)
    journal.add(3, ", more")

    assert reopened(tmp_path / "output") == {3: "of 3, more"}
    journal.forget(3)
    assert reopened(tmp_path / "output") == {}


def test_the_end_of_much_output_is_kept_and_the_cut_is_said(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "output")
    lines = [f"line {number}\n" for number in range(60_000)]
    for line in lines:
        journal.add(7, line)
    text = reopened(tmp_path / "output")[7]

    assert text.startswith(CUT)
    assert "".join(lines).endswith(text.removeprefix(CUT))
    assert len(text) > OUTPUT_BYTES // 5  # frames of short lines have longer heads than texts
    journal.add(8, "x" * (2 * MOST_TEXT_BYTES))
    assert reopened(tmp_path / "output")[8] == CUT + "x" * MOST_TEXT_BYTES
    journal.add(9, "☃" * MOST_TEXT_BYTES)
    text = reopened(tmp_path / "output")[9]
    assert text.startswith(CUT)
    assert set(text.removeprefix(CUT)) == {"☃"}


def test_a_damaged_frame_ends_what_is_read(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "output")
    journal.add(1, "one")
    journal.add(2, "two")
    journal.close()
    data = bytearray((tmp_path / "output").read_bytes())
    data[data.index(b"two")] ^= 1
    (tmp_path / "output").write_bytes(data)

    assert reopened(tmp_path / "output") == {1: "one"}


def test_output_after_the_end_of_the_session_is_dropped(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "output")
    journal.close()
    journal.add(1, "late")
    assert reopened(tmp_path / "output") == {}
