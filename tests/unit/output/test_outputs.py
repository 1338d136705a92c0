from __future__ import annotations

import base64
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_mcp.output.displays import DisplayIndex
from kernel_mcp.output.items import (
    Clear,
    Display,
    DisplayItem,
    Failure,
    FailureItem,
    GapItem,
    Item,
    NoteItem,
    Stream,
    TextItem,
)
from kernel_mcp.output.outputs import LogCaps, OutputLog, Position
from kernel_mcp.output.text import is_plain

STREAMS = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.text(alphabet="ab\n", max_size=30)),
    max_size=20,
)


def out(text: str) -> Stream:
    return Stream("stdout", text)


def err(text: str) -> Stream:
    return Stream("stderr", text)


def show(text: str, display_id: str | None = None, *, update: bool = False) -> Display:
    return Display({"text/plain": text}, {}, display_id, update)


def brief(items: Sequence[Item]) -> list[object]:
    """Items as short values: text, numbers of left-out characters, displays in brackets."""
    short: list[object] = []
    for item in items:
        if isinstance(item, TextItem | NoteItem):
            short.append(item.text)
        elif isinstance(item, GapItem):
            short.append(item.characters)
        elif isinstance(item, DisplayItem):
            short.append([part.read() for part in item.parts])
        else:
            short.append(item.failure.name)
    return short


def text_in(items: Sequence[Item], name: str) -> str:
    return "".join(item.text for item in items if isinstance(item, TextItem) and item.name == name)


def test_output_is_kept_in_the_order_it_came(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    for event in (out("a"), out("b\n"), err("warn\n"), show("x"), out("c"), Failure("E", "v", ())):
        log.add(event)
    assert brief(log.since()) == ["ab\n", "warn\n", ["x"], "c", "E"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STREAMS, st.lists(st.booleans(), max_size=20))
def test_what_came_since_each_answer_adds_up_to_the_whole(
    tmp_path: Path, chunks: list[tuple[Literal["stdout", "stderr"], str]], answers: list[bool]
) -> None:
    log = OutputLog(tmp_path, 1)
    told: list[Item] = []
    mark = Position()
    for number, (name, text) in enumerate(chunks):
        log.add(Stream(name, text))
        if number < len(answers) and answers[number]:
            told += log.since(mark)
            mark = log.position()
    log.close()
    told += log.since(mark)
    for name in ("stdout", "stderr"):
        whole = "".join(text for stream, text in chunks if stream == name)
        assert text_in(told, name) == whole
        assert text_in(log.since(), name) == whole
    assert log.characters == sum(len(text) for _, text in chunks)
    assert "".join(log.text()) == "".join(text for _, text in chunks)


def test_a_progress_bar_between_prints_appears_once_in_its_last_state(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    for step in range(3):
        log.add(err(f"\r{step + 1}/3"))
        log.add(out(f"step {step}\n"))
        log.add(show(str(step)))
    log.add(err("\n"))
    log.close()
    assert brief(log.since()) == [
        "step 0\n",
        ["0"],
        "step 1\n",
        ["1"],
        "step 2\n",
        ["2"],
        "3/3\n",
    ]


def test_a_progress_bar_after_the_cells_end_appears_once_too(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("begun\n"))
    log.close()
    mark = log.position()
    for step in range(3):
        log.add(err(f"\r{step + 1}/3"))
    assert brief(log.since(mark)) == ["3/3"]
    assert brief(OutputLog.restored(tmp_path, 1, log.row()).since(mark)) == ["3/3"]


def test_a_rewritten_line_is_told_again_but_not_the_lines_before_it(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("begin\nmore\n\r10%"))
    assert brief(log.since()) == ["begin\nmore\n10%"]
    mark = log.position()
    log.add(out("\r20%\n"))
    assert brief(log.since(mark)) == ["20%\n"]


def test_a_line_that_only_grew_is_continued(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("loading"))
    mark = log.position()
    log.add(out(" done\n"))
    assert brief(log.since(mark)) == [" done\n"]
    mark = log.position()
    assert log.since(mark) == []


def test_a_display_that_was_updated_is_told_again(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(show("first", "a"))
    log.add(show("other"))
    mark = log.position()
    assert log.add(show("second", "a", update=True)) == ()
    assert brief(log.since(mark)) == [["second"]]
    assert brief(log.since()) == [["second"], ["other"]]


def test_an_update_reaches_earlier_cells_and_is_shown_where_it_was_made(tmp_path: Path) -> None:
    index: DisplayIndex[OutputLog] = DisplayIndex()
    first, second = OutputLog(tmp_path, 1, index=index), OutputLog(tmp_path, 2, index=index)
    first.add(show("old", "a"))
    first.close()
    assert second.add(show("new", "a", update=True)) == (1,)
    assert second.add(show("newest", "a", update=True)) == (1,)
    assert brief(first.since()) == [["newest"]]
    items = second.since()
    assert brief(items) == [["newest"]]
    assert isinstance(items[0], DisplayItem)
    assert items[0].cell == 1


def test_an_update_of_an_unknown_display_changes_nothing(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    assert log.add(show("x", "unknown", update=True)) == ()
    assert log.since() == []


def test_clearing_drops_what_was_shown(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("before\n"))
    log.add(show("before", "a"))
    mark = log.position()
    log.add(Clear(wait=False))
    assert log.since() == []
    log.add(out("after\n"))
    assert brief(log.since()) == brief(log.since(mark)) == ["after\n"]
    log.add(show("gone", "a", update=True))
    assert brief(log.since()) == ["after\n"]


def test_a_clear_that_waits_happens_with_the_next_output(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("frame 1\n"))
    log.add(Clear(wait=True))
    assert brief(log.since()) == ["frame 1\n"]
    log.add(out("frame 2\n"))
    assert brief(log.since()) == ["frame 2\n"]


def test_a_loop_of_clear_and_show_leaves_one_file(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1, caps=LogCaps(bundle_bytes=1000))
    picture = base64.b64encode(bytes(20_000)).decode()
    for _ in range(50):
        log.add(Clear(wait=True))
        log.add(Display({"image/png": picture}, {}))
    assert len(list(tmp_path.iterdir())) == 1
    assert log.disk_bytes == 20_000


def test_displays_over_the_limit_are_counted_and_the_result_is_kept(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1, caps=LogCaps(displays=3))
    for number in range(10):
        log.add(show(str(number)))
    log.add(Display({"text/plain": "result"}, {}, result=True))
    assert brief(log.since()) == [
        ["0"],
        ["1"],
        ["2"],
        ["result"],
        "[… 7 more displays dropped: a cell keeps 3 …]",
    ]


def test_a_flood_stays_within_memory_and_is_counted_exactly(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1, caps=LogCaps(file_bytes=4_000_000))
    chunk = "0123456789abcde\n" * 4096
    tracemalloc.start()
    try:
        for _ in range(300):
            log.add(out(chunk))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert log.characters == 300 * len(chunk)
    assert log.disk_bytes < 4_200_000
    for _ in range(2):
        items = log.since()
        shown = sum(len(item.text) for item in items if isinstance(item, TextItem))
        left_out = sum(item.characters for item in items if isinstance(item, GapItem))
        assert shown + left_out == log.characters
        assert [type(item) for item in items] == [TextItem, GapItem, TextItem]
        log.close()


def test_alternating_streams_do_not_grow_without_bound(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    for _ in range(20_000):
        log.add(out("a"))
        log.add(err("b"))
    log.close()
    items = log.since()
    assert len(items) < 5000
    assert sum(len(item.text) for item in items if isinstance(item, TextItem)) == 40_000


def test_exceptions_are_bounded(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    frames = tuple(f"frame {number}" + "x" * 50_000 for number in range(500))
    for _ in range(100):
        log.add(Failure("E" * 10_000, "v" * 10_000_000, frames))
    items = log.since()
    assert len(items) == 4
    assert isinstance(items[0], FailureItem)
    failure = items[0].failure
    assert sum(map(len, failure.traceback)) < 200_000
    assert len(failure.value) < 20_000
    assert failure.traceback[0].startswith("frame 0x")
    assert failure.traceback[-1].startswith("frame 499x")


def test_closing_moves_everything_large_to_files_and_reads_the_same(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 5)
    data = base64.b64encode(bytes(range(256)) * 200).decode()
    log.add(out("line\n" * 4000))
    log.add(Display({"image/png": data, "text/plain": "<Figure>"}, {"isolated": True}))
    before = brief(log.since())
    whole = "".join(log.text())
    log.close()
    assert brief(log.since()) == before
    assert "".join(log.text()) == whole
    assert {path.name for path in tmp_path.iterdir()} == {"5.txt", "5-1.png"}
    log.evict()
    assert not list(tmp_path.iterdir())
    assert brief(log.since()) == ["[… this output was removed to make room for later cells …]"]
    assert "".join(log.text()) == "[… this output was removed to make room for later cells …]\n"


def test_outputs_are_found_by_number_and_kind(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(Display({"text/plain": "p", "text/html": "<p>"}, {}))
    log.add(show("second"))
    found = {key: log.output(key) for key in ("1", "1.txt", "1.html", "2", "3", "1.png", "x")}
    assert {key: part.mime for key, part in found.items() if part} == {
        "1": "text/html",
        "1.txt": "text/plain",
        "1.html": "text/html",
        "2": "text/plain",
    }


def test_the_whole_text_puts_displays_and_tracebacks_on_lines_of_their_own(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("no newline"))
    log.add(show("table"))
    log.add(Failure("E", "v", ("\x1b[31mframe\x1b[0m", "E: v")))
    assert "".join(log.text()) == "no newline\ntable\nframe\nE: v\n"


def test_news_is_the_end_of_what_came_since(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add(out("one\n"))
    mark = log.position()
    log.add(out("two\nthree\n"))
    assert log.news(mark, 100) == "two\nthree\n"
    assert log.news(mark, 7) == "three\n"


@pytest.mark.parametrize("unit", ["\n\x1b[Ax", "x\b", "\u202ex", "\x1b[31mx", "\x85x", "\rx"])
def test_a_huge_hostile_message_is_taken_in_a_moment_and_stays_safe(
    tmp_path: Path, unit: str
) -> None:
    log = OutputLog(tmp_path, 1)
    start = time.process_time()
    log.add(out(unit * 2_000_000))
    assert time.process_time() - start < 2
    log.close()
    assert all(is_plain(piece) for piece in log.text())


def test_writers_and_readers_may_be_in_different_threads(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    done = threading.Event()
    failures: list[str] = []

    def read() -> None:
        while not done.is_set():
            text = "".join(log.text())
            if text.strip("x\n"):
                failures.append(text[:100])

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3000):
        log.add(out("x" * 99 + "\n"))
    log.close()
    done.set()
    reader.join()
    assert failures == []
