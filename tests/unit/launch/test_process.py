"""How the end of a process is told, and what its output ring keeps."""

from __future__ import annotations

import mmap
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_mcp.launch.process import (
    HEADER_BYTES,
    RING_BYTES,
    OutputRingReader,
    exit_status,
    fatal_line,
)
from kernel_mcp.linux.proc import ExitStatus
from kernel_specs.restricted.console import iopub as guest


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
    assert fatal_line("#\n# Fatal process out of memory: x\n") == "# Fatal process out of memory: x"
    assert fatal_line("all is well\n") == ""
    assert len(fatal_line("Fatal Python error: " + "x" * 5000)) == 200


def test_an_orderly_end_has_no_detail() -> None:
    assert exit_status(0, wrapped=True, output="Fatal Python error: no").detail == ""
    assert exit_status(1, wrapped=True, output="Fatal Python error: no").detail != ""


def both() -> tuple[OutputRingReader, guest.OutputRingWriter]:
    host = OutputRingReader()
    return host, guest.OutputRingWriter(host.guest_fd())


@settings(max_examples=50)
@given(st.lists(st.text(max_size=60), max_size=20), st.integers(0, 400))
def test_what_was_not_heard_is_read_back(texts: list[str], heard: int) -> None:
    host, kernel = both()
    for text in texts:
        kernel.add(text)
    whole = "".join(texts)
    assert host.unreceived(heard) == whole[heard:].encode("utf-8", "replace").decode()
    host.close()


def test_of_more_than_the_ring_holds_the_end_is_kept() -> None:
    host, kernel = both()
    for number in range(20_000):
        kernel.add(f"line {number}\n")
    kept = host.unreceived(0)
    assert len(kept) == RING_BYTES
    assert kept.endswith("line 19998\nline 19999\n")
    assert host.unreceived(sum(len(f"line {n}\n") for n in range(19_999))) == "line 19999\n"
    host.close()


def test_one_text_larger_than_the_ring_is_cut_to_its_end() -> None:
    host, kernel = both()
    kernel.add("a" * RING_BYTES + "b" * 10)
    assert host.unreceived(0) == "a" * (RING_BYTES - 10) + "b" * 10
    host.close()


@given(st.binary(max_size=64), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_counters_and_bytes_that_lie_give_bounded_text(
    data: bytes, characters: int, size: int
) -> None:

    host = OutputRingReader()
    fd = host.guest_fd()
    with mmap.mmap(fd, 0) as memory:
        struct.pack_into("<QQ", memory, 0, characters, size)
        memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    os.close(fd)
    assert len(host.unreceived(0)) <= RING_BYTES
    host.close()


def test_the_memory_cannot_be_resized_by_the_kernel() -> None:

    host = OutputRingReader()
    fd = host.guest_fd()
    for size in (0, 10 * RING_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    host.close()
