"""The end of a cell whose kernel does not say that its output is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kernel_mcp.kernels.channels import Channels
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.kernels.run import MOST_LOOKS, QUITS, UNSURE, CellUsage, IdleWait, Run
from kernel_mcp.output.items import Display, Event, Stream

ASKED = "asked"


class Line:
    """Fake channels for `IdleWait`; `pass_time` triggers its next look."""

    def __init__(self) -> None:
        self.received = 0
        self.resting = False
        self._later: list[Callable[[], object]] = []

    def send(self, _channel: str, _kind: str, _content: dict[str, Any]) -> str:
        return ASKED

    def call_later(self, _delay: float, callback: Callable[[], object]) -> None:
        self._later.append(callback)

    def pass_time(self) -> None:
        self._later.pop(0)()


def ending() -> tuple[Run, Line, IdleWait]:
    """A cell that has its reply and no `idle`; the kernel has answered the control request."""
    run, line = Run(lambda _event: None), Line()
    run.on_reply({"status": "ok"})
    end = IdleWait(run, cast(Channels, line))
    line.pass_time()
    end.hear("control", Message("kernel_info_reply", ASKED, {}, ()))
    return run, line, end


def test_a_cell_ends_when_its_kernel_answers_others_and_sends_nothing_more() -> None:
    run, line, _ = ending()
    line.pass_time()
    assert run.finished.is_set()
    assert run.notices == [UNSURE]


def test_pages_follow_the_output_and_a_wish_to_quit_is_told() -> None:
    shown: list[Event] = []
    run = Run(shown.append)
    page = {"source": "page", "data": {"text/plain": "help"}, "start": 0}
    hostile = [7, {"source": []}, {"source": "page", "data": [1]}, {"source": "ask_exit"}]
    run.on_reply({"status": "ok", "payload": [page, *hostile, {"source": "ask_exit"}]})
    run.sink(Stream("stdout", "printed"))
    run.on_idle()
    run.end()
    assert shown == [Stream("stdout", "printed"), Display({"text/plain": "help"}, {})]
    assert run.notices == [QUITS]


def test_messages_that_have_not_been_read_yet_are_waited_for() -> None:
    run, line, _ = ending()
    line.resting = True
    for _ in range(3):
        line.pass_time()
    assert not run.finished.is_set()
    line.resting = False
    run.on_idle()
    line.pass_time()
    assert run.finished.is_set()
    assert not run.notices


def test_a_kernel_that_never_ends_its_output_is_not_waited_for_for_ever() -> None:
    run, line, _ = ending()
    line.resting = True
    for _ in range(MOST_LOOKS):
        line.pass_time()
    assert run.finished.is_set()
    assert run.notices == [UNSURE]


@pytest.mark.parametrize(
    "used",
    [
        None,
        [1],
        {"cpu_s": "1", "peak_bytes": -1, "holders": {"x": 1}},
        {"cpu_s": float("nan"), "peak_bytes": 1.5, "memory_bytes": True, "cleared_bytes": None},
        {"cpu_s": -1.0, "holders": [["x"], "xy", 7, [7, 8]]},
    ],
)
def test_usage_that_is_malformed_is_unknown(used: object) -> None:
    run = Run(lambda _event: None)
    run.on_reply({"status": "ok", "used": used})
    assert run.usage == CellUsage()


def test_usage_is_bounded() -> None:
    run = Run(lambda _event: None)
    holders = [["n" * 1000, 5]] * 1000
    run.on_reply({"status": "ok", "used": {"cpu_s": 0.5, "peak_bytes": 7, "holders": holders}})
    assert (run.usage.cpu_s, run.usage.peak_bytes) == (0.5, 7)
    assert run.usage.holders == (("n" * 80, 5),) * 5


def test_an_aborted_cell_that_has_sent_output_was_interrupted_and_is_not_run_again() -> None:
    for outputs, status in ((0, "aborted"), (1, "error")):
        run = Run(lambda _event: None)
        run.on_reply({"status": "abort"})
        run.outputs = outputs  # which may arrive after the reply
        run.on_idle()
        assert run.status == status
