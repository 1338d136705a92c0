"""The bytes of a dump: in parts of any size, without copies, and without traces of what failed."""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kernel_specs.restricted.hibernation.attempt_limits import TooLargeError
from kernel_specs.restricted.hibernation.dumps import (
    BUFFER_BYTES,
    NOT_WHOLE,
    PIECE_BYTES,
    Arrival,
    ByteBudget,
    DumpBytes,
    Pieces,
    Segment,
    sharing,
)


class PlainPickler(pickle.Pickler):
    """Knows of no modules, and that nothing changes."""

    def __init__(self, file: Any, aside: Callable[[Any], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=aside)
        self.modules: dict[str, None] = {}
        self.changes: dict[str, None] = {}
        self.ranges: list[Any] = []
        self.named: set[int] = set()

    def begin(self) -> None:
        """No value has anything to forget."""

    def identifying(self, written: Any = None) -> None:
        """No object is told from one that is equal."""


class Large:
    """Pickles as its memory, as arrays do."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, _: Any) -> Any:
        return bytearray, (pickle.PickleBuffer(self.data),)


class Refuses:
    """Fails after others have been pickled with it."""

    def __init__(self, *before: object) -> None:
        self.before = before

    def __getstate__(self) -> Any:
        return [*self.before, iter_of_nothing()]


def iter_of_nothing() -> Any:
    yield


def filled(values: dict[str, Any], size: int = 10**9) -> tuple[Segment, dict[str, str]]:
    """A segment with the values that could be pickled, and why others could not."""
    segment = Segment(ByteBudget(size), PlainPickler)
    lost = {name: why for name, value in values.items() if (why := added(segment, name, value))}
    return segment, lost


def added(segment: Segment, name: str, value: Any) -> str:
    """Why a value could not be added, or an empty text."""
    try:
        segment.add(value)
    except (TypeError, TooLargeError) as error:
        segment.undo()
        return str(error)
    segment.keep(name)
    return ""


def passed_on(segments: list[Segment], part: int) -> dict[str, Any]:
    """The values of segments after their way through a dump in parts of this size."""
    dump = DumpBytes({"segments": [segment.description() for segment in segments]}, segments)
    pieces, count = Pieces(), 0
    while data := dump.read(part):
        count += len(data)
        pieces.add(data)
    assert count == dump.size
    return values_of(Arrival(pieces))


def values_of(arrival: Arrival) -> dict[str, Any]:
    values = {}
    for description in arrival.header["segments"]:
        pickles, buffers = arrival.segment(description)
        unpickler = pickle.Unpickler(pickles, buffers=iter(buffers))
        for name in description["names"]:
            values[name] = unpickler.load()[0]
    return values


@pytest.mark.parametrize("part", [1, 7, 1000, 10**6])
def test_values_survive_in_parts_of_any_size(part: int) -> None:
    segment, _ = filled({"a": [1, "x"], "b": Large(bytearray(b"m" * BUFFER_BYTES)), "c": 3})
    found = passed_on([segment], part)
    assert found == {"a": [1, "x"], "b": bytearray(b"m" * BUFFER_BYTES), "c": 3}


def test_segments_follow_each_other() -> None:
    segments = [filled({name: [name]})[0] for name in ("a", "b", "c")]
    assert passed_on(segments, 100) == {"a": ["a"], "b": ["b"], "c": ["c"]}


def test_objects_that_values_share_stay_shared() -> None:
    common = [1]
    found = passed_on([filled({"a": common, "b": {"x": common}})[0]], 100)
    assert found["b"]["x"] is found["a"]


def test_a_failed_value_leaves_no_trace_in_those_after_it() -> None:
    common, late = ["common"], ["late"]
    values = {
        "a": common,
        "bad": Refuses(common, late, Large(bytearray(BUFFER_BYTES))),
        "b": [common, late],
        "c": late,
    }
    segment, lost = filled(values)
    assert list(lost) == ["bad"]
    assert segment.buffers == []
    found = passed_on([segment], 100)
    assert found == {"a": ["common"], "b": [["common"], ["late"]], "c": ["late"]}
    assert found["b"][0] is found["a"]
    assert found["b"][1] is found["c"]


def test_the_room_counts_pickles_and_buffers_and_is_given_back() -> None:
    values = {
        "small": "x" * 100,
        "large": Large(bytearray(2 * BUFFER_BYTES)),
        "long": "y" * (2 * BUFFER_BYTES),
        "fits": Large(bytearray(BUFFER_BYTES)),
    }
    segment, lost = filled(values, BUFFER_BYTES + 1000)
    assert segment.names == ["small", "fits"]
    assert "too large" in lost["large"]
    assert "too large" in lost["long"]


def test_a_buffer_is_not_copied_before_it_is_read() -> None:
    memory = bytearray(BUFFER_BYTES)
    segment, _ = filled({"a": Large(memory)})
    memory[0] = 7
    assert passed_on([segment], 10**6)["a"][0] == 7


def test_a_dump_goes_through_a_pipe_in_one_piece() -> None:
    large = bytearray(os.urandom(3 * 10**6))
    values = {"a": Large(large), "long": "x" * (3 * PIECE_BYTES), "after": [1]}
    segments = [filled({name: value})[0] for name, value in values.items()]
    dump = DumpBytes({"segments": [segment.description() for segment in segments]}, segments)
    reader, writer = os.pipe()
    thread = threading.Thread(target=dump.write, args=(writer,))
    thread.start()
    arrival = Arrival(io.FileIO(reader))
    found = values_of(arrival)
    thread.join()
    arrival.close()
    os.close(writer)
    assert found == {"a": large, "long": values["long"], "after": [1]}


def test_a_dump_that_was_cut_anywhere_is_not_whole() -> None:
    segment, _ = filled({"a": [1, "x"], "b": Large(bytearray(b"m" * BUFFER_BYTES))})
    dump = DumpBytes({"segments": [segment.description()]}, [segment])
    data = dump.read(dump.size)
    places = [*range(len(data) - BUFFER_BYTES + 3), len(data) - 1]
    for place in places:
        pieces = Pieces()
        pieces.add(data[:place])
        with pytest.raises(ValueError, match=NOT_WHOLE):
            values_of(Arrival(pieces))


def test_an_empty_dump_arrives_too() -> None:
    assert passed_on([], 3) == {}


def test_values_that_share_objects_are_told_from_those_that_only_look_alike() -> None:
    shared = [1]
    values: list[Any] = [
        shared,
        "a text",
        {"of": "a text"},
        [[shared]],
        (1, 2),
        {"a": (1, 2)},
        [list, len],
        {"also": len, "and": list},
    ]
    segments = []
    for number, value in enumerate(values):
        segment = Segment(ByteBudget(10**6), PlainPickler)
        segment.add(value)
        segment.keep(str(number))
        segment.look()
        segments.append(segment)
    groups = [[int(part.names[0]) for part in group] for group in sharing(segments)]
    assert groups == [[0, 3], [1], [2], [4], [5], [6], [7]]


def test_a_room_for_drafts_has_more_for_pickles_and_none_for_what_never_fits() -> None:
    room = ByteBudget(100, drafts=2)
    room.take(90)
    room.take(90)
    room.take(100, copied=False)
    with pytest.raises(TooLargeError, match="too large"):
        room.take(90)
    with pytest.raises(TooLargeError, match="too large"):
        room.take(101, copied=False)
