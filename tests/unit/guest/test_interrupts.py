"""The meaning of SIGINT at each moment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from kernel_specs.restricted import interrupts
from kernel_specs.restricted.interrupts import InterruptGate

OUTPUT_PATH = "/kernel/iopub.py"


@pytest.fixture
def gate() -> Iterator[InterruptGate]:
    """A gate that watches one file; the handler of the test run is put back."""
    before = signal.getsignal(signal.SIGINT)
    yield InterruptGate([OUTPUT_PATH])
    signal.signal(signal.SIGINT, before)


def frame_in(filename: str) -> FrameType:
    """A frame of code of the given file."""
    namespace: dict[str, Any] = {"frame": sys._getframe}
    exec(compile("def call(): return frame()", filename, "exec"), namespace)
    found: FrameType = namespace["call"]()
    return found


def test_idle_it_is_ignored(gate: InterruptGate) -> None:
    gate(signal.SIGINT, frame_in("<cell>"))
    gate.begin()
    gate.end()
    gate(signal.SIGINT, frame_in("<cell>"))


def test_in_user_code_it_raises_every_time(
    gate: InterruptGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "REST_SECONDS", 0)
    gate.begin()
    gate.open()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            gate(signal.SIGINT, frame_in("<cell>"))


def test_a_second_one_lets_the_first_be_reported(gate: InterruptGate) -> None:
    retried: list[bool] = []
    gate.retry = lambda: retried.append(True)
    gate.begin()
    gate.open()
    with pytest.raises(KeyboardInterrupt):
        gate(signal.SIGINT, frame_in("<cell>"))
    gate(signal.SIGINT, frame_in("<cell>"))
    assert retried == [True]
    gate.end()
    gate.begin()
    gate.open()
    with pytest.raises(KeyboardInterrupt):
        gate(signal.SIGINT, frame_in("<cell>"))


def test_before_user_code_it_waits_for_it(gate: InterruptGate) -> None:
    gate.begin()
    gate(signal.SIGINT, frame_in("<cell>"))
    with pytest.raises(KeyboardInterrupt):
        gate.open()


def test_after_user_code_it_does_not_reach_the_next_request(gate: InterruptGate) -> None:
    gate.begin()
    gate.open()
    gate.close()
    gate(signal.SIGINT, frame_in("<cell>"))
    gate.end()
    gate.begin()
    gate.open()


def test_inside_the_output_path_it_is_tried_again(gate: InterruptGate) -> None:
    retried: list[bool] = []
    gate.retry = lambda: retried.append(True)
    gate.begin()
    gate.open()
    gate(signal.SIGINT, frame_in(OUTPUT_PATH))
    assert retried == [True]
    with pytest.raises(KeyboardInterrupt):
        gate.check()
    gate.check()


def test_redelivery_reaches_the_main_thread(gate: InterruptGate) -> None:
    gate.begin()
    gate.open()
    gate(signal.SIGINT, frame_in(OUTPUT_PATH))
    helper = threading.Thread(target=gate.redeliver)

    def wait() -> None:
        helper.start()
        helper.join()
        signal.sigtimedwait([], 5)

    with pytest.raises(KeyboardInterrupt):
        wait()
    helper.join()


def test_a_sleeping_event_loop_has_its_cell_cancelled(gate: InterruptGate) -> None:
    async def cell() -> None:
        await asyncio.sleep(60)

    async def run() -> str:
        loop = asyncio.get_running_loop()
        task = loop.create_task(cell())
        gate.begin()
        gate.open()

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        gate.cancel = cancel
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        finally:
            timer.join()
        return "slept"

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(asyncio.wait_for(run(), 10)) == "cancelled"
    finally:
        loop.close()


def test_code_of_an_awaiting_cell_is_interrupted_in_place(gate: InterruptGate) -> None:
    gate.begin()
    gate.open()
    gate.cancel = lambda: pytest.fail("not the loop was interrupted")
    with pytest.raises(KeyboardInterrupt):
        gate(signal.SIGINT, frame_in("<cell>"))


def test_a_handler_of_user_code_is_replaced_for_the_next_request(gate: InterruptGate) -> None:
    gate.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gate.end()
    gate.begin()
    assert signal.getsignal(signal.SIGINT) is gate


def test_a_signal_of_the_request_before_wakes_no_cell(gate: InterruptGate) -> None:
    before = signal.set_wakeup_fd(-1)
    reader = gate.watch()
    try:
        gate.begin()
        signal.signal(signal.SIGINT, lambda *_: None)  # that request has a handler of its own
        os.kill(os.getpid(), signal.SIGINT)
        handled = gate.waiting()
        assert handled is not None
        os.kill(os.getpid(), signal.SIGINT)  # seen by nobody until the next request
        gate.end()
        gate.begin()
        gate.open()
        assert gate.waiting() is None
        gate.wake(handled)  # as the service thread does a moment later
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
