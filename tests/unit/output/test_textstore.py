from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_mcp.output import textstore
from kernel_mcp.output.items import Stream, TextItem
from kernel_mcp.output.textstore import Streams, TextStore, Transcript


def store_at(path: Path, *, file_bytes: int = 10_000_000) -> TextStore:
    return TextStore(path, memory_chars=0, file_bytes=file_bytes)


def everything(store: TextStore) -> str:
    return "".join(text for _, text in store.read(0, store.total))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textstore, "BLOCK_CHARS", 16)
    monkeypatch.setattr(textstore, "SMALL_CHARS", 8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet="aä漢\n", max_size=90), max_size=12), st.data())
def test_any_range_reads_back_before_and_after_closing(
    tmp_path: Path, small_blocks: None, chunks: list[str], data: st.DataObject
) -> None:
    store = store_at(tmp_path / "cells" / "1.txt")
    for chunk in chunks:
        store.append(chunk)
    whole = "".join(chunks)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert store.total == len(whole)
    for _ in range(2):
        read = list(store.read(start, end))
        assert "".join(text for _, text in read) == whole[start:end]
        assert [at for at, _ in read] == sorted(at for at, _ in read)
        store.close()
    store.discard()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet="ab", max_size=60), max_size=20), st.integers(0, 200))
def test_beyond_the_cap_what_is_kept_is_true_and_both_ends_are_there(
    tmp_path: Path, small_blocks: None, chunks: list[str], cap: int
) -> None:
    store = store_at(tmp_path / "1.txt", file_bytes=cap)
    for chunk in chunks:
        store.append(chunk)
    whole = "".join(chunks)
    for _ in range(2):
        pieces = list(store.read(0, store.total))
        assert all(whole[at : at + len(text)] == text for at, text in pieces)
        if whole:
            assert pieces[0][0] == 0
            last_at, last = pieces[-1]
            assert last_at + len(last) == len(whole)
        store.close()
    store.discard()


def test_short_text_never_touches_the_disk(tmp_path: Path) -> None:
    store = store_at(tmp_path / "cells" / "1.txt")
    store.append("short")
    store.close()
    assert not (tmp_path / "cells").exists()
    assert everything(store) == "short"


def test_closing_moves_longer_text_to_a_private_file(tmp_path: Path) -> None:
    store = store_at(tmp_path / "cells" / "1.txt")
    store.append("x" * 20_000)
    assert not (tmp_path / "cells").exists()
    store.close()
    path = tmp_path / "cells" / "1.txt"
    assert path.stat().st_size == store.disk_bytes == 20_000
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert everything(store) == "x" * 20_000


def test_discarding_removes_the_file_and_begins_anew(tmp_path: Path) -> None:
    store = store_at(tmp_path / "1.txt")
    store.append("x" * 300_000)
    store.discard()
    assert not list(tmp_path.iterdir())
    store.append("again")
    assert everything(store) == "again"


def test_a_file_that_cannot_be_written_costs_the_middle_only(tmp_path: Path) -> None:
    (tmp_path / "cells").write_text("in the way")
    store = store_at(tmp_path / "cells" / "1.txt")
    for number in range(100):
        store.append(f"{number:05d}" * 2000)
    store.close()
    pieces = list(store.read(0, store.total))
    assert pieces[0][1].startswith("00000")
    assert pieces[-1][1].endswith("00099")
    assert sum(len(text) for _, text in pieces) < 400_000


def test_a_file_that_has_gone_is_a_gap_not_an_error(tmp_path: Path) -> None:
    store = store_at(tmp_path / "1.txt")
    store.append("x" * 20_000)
    store.close()
    (tmp_path / "1.txt").unlink()
    assert list(store.read(0, store.total)) == []


def test_text_that_comes_after_closing_is_kept_too(tmp_path: Path) -> None:
    store = store_at(tmp_path / "1.txt")
    store.append("a" * 20_000)
    store.close()
    store.append("late")
    store.close()
    assert everything(store) == "a" * 20_000 + "late"


def test_a_file_whose_closing_fails_is_read_by_its_name_and_never_by_an_old_number(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(tmp_path / "text")
    store.append("here " * 100)

    def close(fd: int, close: Callable[[int], None] = os.close) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(OSError, match="Input/output"):
            store.close()
    (tmp_path / "other").write_text("of another " * 100)
    with (tmp_path / "other").open("rb"):  # which gets the number
        assert everything(store) == "here " * 100
    store.close()


def test_a_progress_bar_stays_live_and_is_shown_last(tmp_path: Path) -> None:
    transcript = Transcript(TextStore(tmp_path / "1.txt", memory_chars=1000, file_bytes=1000))
    streams = Streams(transcript)
    streams.write(Stream("stdout", "1/3\r2/3"))
    streams.write(Stream("stderr", "warning"))
    assert streams.order() == ["stderr", "stdout"]
    assert streams.live_rows == ("2/3", "warning")
    streams.settle(force=False)
    assert streams.live_rows == ("2/3", "")
    streams.settle(force=True)
    assert streams.live_rows == ("", "")
    assert list(transcript.whole()) == [TextItem("stderr", "warning"), TextItem("stdout", "2/3")]


def test_what_is_cleared_is_forgotten(tmp_path: Path) -> None:
    transcript = Transcript(TextStore(tmp_path / "1.txt", memory_chars=1000, file_bytes=1000))
    streams = Streams(transcript)
    streams.write(Stream("stdout", "gone"))
    streams.clear()
    assert streams.live("stdout") == ""
