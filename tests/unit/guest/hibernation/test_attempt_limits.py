"""Time limits and interrupts around code that may do anything."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from kernel_specs.restricted import originals
from kernel_specs.restricted.hibernation.attempt_limits import (
    PATIENCE,
    Attempts,
    CannotKeepError,
    StoppedError,
    TimeBudget,
    TimeUpError,
    Watch,
    module_of,
    on_gpu,
    reason_for,
)


def for_ever() -> None:
    while True:
        pass


def asking(watch: Watch) -> None:
    while True:
        watch.ask()


def stubborn() -> None:
    """Swallows everything a few times."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            for_ever()


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for_ever()


def test_what_takes_too_long_is_ended() -> None:
    begin = time.thread_time()
    with Watch() as watch, pytest.raises(TimeUpError):
        watch.run(lambda: asking(watch), 0.05)
    assert time.thread_time() - begin < 2


def test_a_value_that_never_asks_is_ended_in_the_end() -> None:
    begin = time.thread_time()
    with Watch() as watch, pytest.raises(TimeUpError):
        watch.run(for_ever, 0.05, in_hand=True)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("sign", [signal.SIGALRM, signal.SIGINT])
def test_a_signal_raises_nothing_where_no_value_is_in_hand(sign: signal.Signals) -> None:
    def work() -> str:
        for _ in range(3):
            os.kill(os.getpid(), sign)
        return "done"

    with Watch() as watch:
        assert watch.run(work, 1e-9) == "done"
        with pytest.raises((TimeUpError, StoppedError)):
            watch.run(watch.ask, 1e-9)


def test_what_cannot_be_raised_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Late:
        def __del__(self) -> None:
            for_ever()

    def delete() -> None:
        late = Late()
        del late
        for_ever()

    with Watch() as watch, pytest.raises(TimeUpError):
        watch.run(delete, 0.05, in_hand=True)
    assert capsys.readouterr().err == ""


def test_time_that_only_passes_counts_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, now = TimeBudget(10), time.monotonic()  # without a processor from now on
    monkeypatch.setattr(
        originals.time, "monotonic", lambda: now + 20
    )  # without a processor for this
    assert 7.9 < budget.left <= 8
    monkeypatch.setattr(originals.time, "monotonic", lambda: now + 101)
    assert budget.left < 0


def test_code_that_waits_for_ever_is_ended_too() -> None:
    with Watch() as watch, pytest.raises(TimeUpError):
        watch.run(threading.Event().wait, 0.2 / PATIENCE, in_hand=True)


def test_a_swallowed_limit_comes_again() -> None:
    begin = time.thread_time()
    with Watch() as watch:
        watch.run(stubborn, 0.05, in_hand=True)
    assert time.thread_time() - begin < 2


def test_signals_and_timer_are_given_back() -> None:
    timer = signal.getitimer(signal.ITIMER_REAL)[0]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with Watch() as watch:
        assert watch.run(lambda: 5, 1) == 5
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert abs(signal.getitimer(signal.ITIMER_REAL)[0] - timer) < 1


def test_each_attempt_fails_for_itself() -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    with Watch() as watch:
        attempts = Attempts(watch, 0.4)
        assert attempts.do("a", lambda: 1)
        assert not attempts.do("b", fail)
        assert not attempts.do("c", for_ever)
        assert attempts.do("d", lambda: 1)
    assert attempts.lost == {"b": "ValueError: two lines", "c": "took longer than 0.1 s"}


def test_attempts_end_when_the_time_is_used_up() -> None:
    with Watch() as watch:
        attempts = Attempts(watch, 0.2)
        for name in "abcdefgh":
            attempts.do(name, for_ever)
    assert attempts.lost["a"].startswith("took longer")
    assert attempts.lost["h"] == "there was no time left"


def test_an_interrupt_ends_all_attempts() -> None:
    with Watch() as watch:
        attempts = Attempts(watch, 20)
        with pytest.raises(StoppedError):
            attempts.do("a", interrupt_itself)
        with pytest.raises(StoppedError):
            attempts.do("b", lambda: 1)


def test_an_interrupt_that_user_code_raises_itself_is_only_a_failure() -> None:
    def raise_it() -> None:
        raise KeyboardInterrupt

    with Watch() as watch:
        attempts = Attempts(watch, 20)
        assert not attempts.do("a", raise_it)
        assert attempts.do("b", lambda: 1)
    assert attempts.lost == {"a": "KeyboardInterrupt"}


def test_reasons_are_words() -> None:
    lock = threading.Lock()
    assert reason_for(CannotKeepError("a thread lock", lock), lock) == "thread lock"
    assert reason_for(CannotKeepError("an open file", lock), [lock]) == "holds an open file"
    assert reason_for(MemoryError(), lock) == "too large for the memory limit"
    assert reason_for(RecursionError(), lock) == "nested too deeply"
    refused = TypeError("cannot pickle 'psycopg.Connection' object")
    assert reason_for(refused, [lock]) == "holds a connection"
    assert len(reason_for(ValueError("x" * 10_000), lock)) < 200


def test_the_module_of_a_class_may_be_no_text() -> None:
    class Described:  # as the type of functions that Cython has built
        __module__ = property(lambda _: "of an instance")

    assert module_of(Described) == ""
    assert not on_gpu(Described())
    assert module_of(Watch) == Watch.__module__
