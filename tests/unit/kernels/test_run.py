"""The end of a cell whose kernel does not say that its output is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kernel_mcp.kernels.channels import Channels
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.kernels.run import MOST_LOOKS, IdleWait, Run

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
    assert run.unsure


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
    assert not run.unsure


def test_a_kernel_that_never_ends_its_output_is_not_waited_for_for_ever() -> None:
    run, line, _ = ending()
    line.resting = True
    for _ in range(MOST_LOOKS):
        line.pass_time()
    assert run.finished.is_set()
    assert run.unsure
