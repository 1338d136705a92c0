"""The flush timer: it ticks while a cell runs or text waits, and quick cells wake nobody."""

from __future__ import annotations

import select
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.service import LINGER_SECONDS, ServiceThread, Ticker

TICK_S = 0.01
TICKS_MS = 100
"""Time for several ticks."""


def ticks(ticker: Ticker, milliseconds: int = TICKS_MS) -> bool:
    """Return True if the descriptor becomes readable."""
    poll = select.poll()
    poll.register(ticker.fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


@pytest.fixture
def iopub() -> Any:
    return SimpleNamespace(waiting=False, service_thread=None, pump=lambda: True)


@pytest.fixture
def console() -> Any:
    def flush() -> bool:
        made.looked += 1
        return bool(made.said)

    made = SimpleNamespace(pipes=[], text_waits=None, by_line=lambda: None, said=False, looked=0)
    made.flush, made.choose_pace = flush, lambda: None
    return made


@pytest.fixture
def service(iopub: Any, console: Any) -> Iterator[ServiceThread]:
    gate = InterruptGate()
    made = ServiceThread(cast(Any, console), iopub, gate, TICK_S)
    yield made
    made.io_loop.close(all_fds=False)
    made.leave()


def test_a_timer_ticks_again_and_again_until_it_is_stopped() -> None:
    ticker = Ticker(TICK_S)
    assert not ticks(ticker)
    ticker.start()
    for _ in range(2):
        assert ticks(ticker, 60_000)
        ticker.take()
    ticker.stop()
    ticker.take()
    assert not ticks(ticker)


def test_quick_cells_wake_nobody(service: ServiceThread) -> None:
    for _ in range(3):
        service.cell_started()
        service.cell_ended()
    assert not ticks(service._ticker)


def test_after_the_last_one_text_without_a_line_end_is_looked_for(
    service: ServiceThread, console: Any, iopub: Any
) -> None:
    service.cell_started()
    service.cell_ended()
    for said in (True, True, False):  # as long as some comes
        assert ticks(service._ticker, 60_000)
        console.said = said
        service._tick()
    assert console.looked == 3
    assert not ticks(service._ticker, round(3000 * LINGER_SECONDS))


def test_it_ticks_while_a_cell_runs(service: ServiceThread) -> None:
    service.cell_started()
    assert ticks(service._ticker, 60_000)


def test_it_ticks_on_while_text_waits(service: ServiceThread, iopub: Any) -> None:
    service.cell_started()
    iopub.waiting = True
    service.cell_ended()
    assert ticks(service._ticker, 60_000)
    iopub.waiting = False
    service._rest(lingers=False)
    assert not ticks(service._ticker)


def test_more_text_does_not_put_the_tick_off(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[None] = []
    monkeypatch.setattr(service._ticker, "start", lambda: started.append(None))
    service.cell_started()
    for _ in range(3):
        service.tick_soon()
    assert len(started) == 1


def test_text_that_comes_while_it_is_stopped_is_not_forgotten(
    service: ServiceThread, iopub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = service._ticker.start_once

    def stop_late() -> None:
        rest()
        iopub.waiting = True  # of another thread, to which the timer seems to run
        service.tick_soon()

    monkeypatch.setattr(service._ticker, "start_once", stop_late)
    service.cell_started()
    service.cell_ended()
    assert ticks(service._ticker, 60_000)
