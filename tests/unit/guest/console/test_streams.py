"""stdout and stderr in one order."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from kernel_specs.restricted.console.iopub import IOPubPublisher
from kernel_specs.restricted.console.streams import CHUNK_BYTES, Console, standard_name


class Collector:
    """Stands for IOPub: keeps the text in order."""

    def __init__(self) -> None:
        """Nothing was printed."""
        self.lock = threading.RLock()
        self.flush_text: Callable[[], None] = lambda: None
        self.pieces: list[tuple[str, str]] = []
        self.pumped = 0
        self.waiting = False

    def put_text(self, name: str, text: str) -> None:
        """Keep a piece of text."""
        self.waiting = True
        self.pieces.append((name, text))

    def pump(self) -> bool:
        """Count."""
        self.waiting = False
        self.pumped += 1
        return True

    def wait(self) -> None:
        """Never full."""

    def joined(self) -> list[tuple[str, str]]:
        """Text with neighbours of one stream joined."""
        found: list[tuple[str, str]] = []
        for name, text in self.pieces:
            if found and found[-1][0] == name:
                found[-1] = (name, found[-1][1] + text)
            else:
                found.append((name, text))
        return found


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def console(collector: Collector) -> Console:
    return Console(cast(IOPubPublisher, collector))


@pytest.fixture
def streams(console: Console) -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    return console._streams["stdout"], console._streams["stderr"]


@contextmanager
def pipes(console: Console) -> Iterator[None]:
    """Pipes for file descriptors 1 and 2 of this process, which pytest moves between fixtures."""
    saved = os.dup(1), os.dup(2)
    console.redirect()
    try:
        yield
    finally:
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)
        for fd in console.pipes:
            os.close(fd)


def test_the_streams_of_a_console_are_told_from_others(streams: Any) -> None:
    assert [standard_name(stream) for stream in streams] == ["stdout", "stderr"]
    others = [io.TextIOWrapper(io.BytesIO()), io.StringIO(), None]
    assert [standard_name(stream) for stream in others] == ["", "", ""]
    streams[0].detach()
    assert standard_name(streams[0]) == ""


def test_text_waits_for_a_chunk_and_is_handed_over_on_demand(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, _ = streams
    out.write("a")
    assert collector.pieces == []
    console.hand_over()
    assert collector.pieces == [("stdout", "a")]
    out.write("x" * (CHUNK_BYTES + 1))
    assert collector.pieces[1][0] == "stdout"


def test_a_flush_with_nothing_to_send_sends_nothing(
    console: Console, collector: Collector, streams: tuple[io.TextIOWrapper, io.TextIOWrapper]
) -> None:
    with pipes(console):
        for stream in streams:
            stream.flush()
        console.flush()
        assert collector.pumped == 0
        streams[0].write("text")
        streams[0].flush()
        console.flush()
        assert collector.pumped == 1


def test_the_order_of_both_streams_is_kept(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, err = streams
    expected: list[tuple[str, str]] = []
    for number in range(2000):
        name, stream = ("stderr", err) if number % 7 in {2, 3, 6} else ("stdout", out)
        stream.write(f"{number} " * (1 + number % 50))
        expected.append((name, f"{number} " * (1 + number % 50)))
    console.hand_over()
    reference = Collector()
    reference.pieces = expected
    assert collector.joined() == reference.joined()


def test_a_flood_on_one_stream_calls_python_once_per_chunk(
    collector: Collector, streams: Any
) -> None:
    _, err = streams
    for _ in range(100_000):
        err.write("0123456789")
    assert len(collector.pieces) < 30


def test_line_by_line_each_line_is_taken_at_once(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, err = streams
    console.by_line()
    print("one", file=out)
    assert collector.joined() == [("stdout", "one\n")]
    print("two", file=err)
    print("three", file=err)
    assert collector.joined()[1:] == [("stderr", "two\nthree\n")]


def test_many_lines_change_to_chunks_and_few_back(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, _ = streams
    console.by_line()
    for _ in range(1000):
        print("line", file=out)
    console.choose_pace()
    before = len(collector.pieces)
    for _ in range(1000):
        print("line", file=out)
    assert len(collector.pieces) == before
    console.by_line()
    print("line", file=out)
    assert len(collector.pieces) > before


def test_streams_cannot_be_closed_but_replaced(
    console: Console, collector: Collector, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = streams
    monkeypatch.setattr(sys, "stdout", out)
    out.close()
    out.write("open")
    out.detach()
    console.hand_over()
    sys.stdout.write("again")
    console.hand_over()
    assert collector.joined() == [("stdout", "openagain")]


def test_surrogates_become_escapes_and_file_numbers_are_the_real_ones(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, err = streams
    out.write("\udcff")
    console.hand_over()
    assert collector.pieces == [("stdout", "\\udcff")]
    assert (out.fileno(), err.fileno()) == (1, 2)
    assert not out.isatty()
    assert out.encoding == "utf-8"


def test_what_children_wrote_comes_before_what_follows(
    console: Console, collector: Collector, streams: Any
) -> None:
    out, _ = streams
    with pipes(console):
        out.write("before ")
        console._audit("subprocess.Popen", ())
        os.write(1, b"child ")
        os.write(2, b"error ")
        out.write("after ")
        console.hand_over()
    assert collector.joined() == [
        ("stdout", "before child "),
        ("stderr", "error "),
        ("stdout", "after "),
    ]


def test_characters_cut_by_a_pipe_are_put_together(console: Console, collector: Collector) -> None:
    with pipes(console):
        for byte in "grün €".encode():
            os.write(1, bytes([byte]))
            console.hand_over()
    assert collector.joined() == [("stdout", "grün €")]


def test_all_that_a_pipe_holds_is_taken(console: Console, collector: Collector) -> None:
    with pipes(console):
        for _ in range(3):
            os.write(1, b"x" * 50_000)
            console.hand_over()
        console.hand_over()
    assert sum(len(text) for _, text in collector.pieces) == 150_000


def test_a_child_that_forks_again_says_nothing_about_it() -> None:
    """The lock of a child is its own: what the parent held cannot be released there."""
    code = """
import os, threading
from kernel_specs.restricted.console.streams import Console
class Quiet:
    waiting = False
    def __init__(self):
        self.lock = threading.RLock()
    def forget(self):
        self.lock = threading.RLock()
    def nothing(self, *_):
        pass
    put_text = pump = wait = nothing
Console(Quiet()).install()
if os.fork() == 0:
    for _ in range(3):
        if os.fork() == 0:
            os._exit(0)
        os.wait()
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
