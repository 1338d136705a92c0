"""Which event of a stream is the answer, with which the stream ends."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_mcp.http.bodies import TrafficMeter

pytestmark = [pytest.mark.anyio]
ANSWERS = (
    b'event: message\r\ndata: {"jsonrpc":"2.0","id":7,"result":{}}\r\n\r\n',
    b'event: message\r\ndata: {"jsonrpc":"2.0","id":7,"error":{"code":-1,"message":"x"}}\r\n\r\n',
    b'event: message\r\ndata: {"jsonrpc":"2.0","id":"7,\\"method\\"","result":{}}\r\n\r\n',
    b'event: message\r\ndata: {"jsonrpc":"2.0","id":"","method":"","result":{}}\r\n\r\n',
)
OTHERS = (
    b'event: message\r\ndata: {"jsonrpc":"2.0","id":7,"method":"elicitation/create"}\r\n\r\n',
    b'event: message\r\ndata: {"jsonrpc":"2.0","method":"notifications/message"}\r\n\r\n',
    b": ping\r\n\r\n",
)


@pytest.mark.parametrize(
    ("event", "ends"), [*((each, True) for each in ANSWERS), *((each, False) for each in OTHERS)]
)
async def test_a_stream_ends_with_its_answer_and_not_with_a_question(
    event: bytes, ends: bool
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    meter = TrafficMeter(receive, send)
    meter.at_end = lambda: sent.append("end")
    await meter.send({"type": "http.response.body", "body": event, "more_body": True})
    assert sent[0]["more_body"] is not ends
    assert (sent[1:] == ["end"]) is ends
