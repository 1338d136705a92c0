"""Rows that may change stay live; what other output follows becomes final."""

from __future__ import annotations

from pathlib import Path

from kernel_mcp.output.items import Stream, TextItem
from kernel_mcp.output.textstore import Streams, TextStore, Transcript


def test_a_progress_bar_stays_live_and_is_shown_last(tmp_path: Path) -> None:
    transcript = Transcript(TextStore(tmp_path / "1.txt", memory_chars=1000, file_bytes=1000))
    streams = Streams(transcript)
    streams.write(Stream("stdout", "1/3\r2/3"))
    streams.write(Stream("stderr", "warning"))
    assert streams.order() == ["stderr", "stdout"]
    assert streams.shown == ("2/3", "warning")
    assert streams.newest_line == "warning"
    streams.settle(force=False)
    assert streams.shown == ("2/3", "")
    streams.settle(force=True)
    assert streams.shown == ("", "")
    assert list(transcript.whole()) == [TextItem("stderr", "warning"), TextItem("stdout", "2/3")]


def test_what_is_cleared_is_forgotten(tmp_path: Path) -> None:
    transcript = Transcript(TextStore(tmp_path / "1.txt", memory_chars=1000, file_bytes=1000))
    streams = Streams(transcript)
    streams.write(Stream("stdout", "gone"))
    streams.clear()
    assert streams.live("stdout") == ""
