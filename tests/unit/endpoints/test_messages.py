"""Jupyter's messages as a kernel reads and writes them, against Jupyter's own client."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_client.session import Session as JupyterSession

from kernel_mcp.endpoints.messages import Messages, WireError, shown
from kernel_mcp.output.items import Clear, Display, Event, Failure, Stream

KEY = "0123456789abcdef"


@pytest.fixture
def client() -> JupyterSession:
    return JupyterSession(key=KEY.encode())


def frames_of(client: JupyterSession, kind: str, content: dict[str, Any]) -> list[bytes]:
    return [b"who", *client.serialize(client.msg(kind, content))]


def test_requests_of_jupyters_client_are_read(client: JupyterSession) -> None:
    request = Messages(KEY).read(frames_of(client, "execute_request", {"code": "ü\n1"}))
    assert request.identities == (b"who",)
    assert (request.kind, request.content) == ("execute_request", {"code": "ü\n1"})
    assert request.client == client.session


def test_of_headers_only_what_the_protocol_has_is_sent_back(client: JupyterSession) -> None:
    message = client.msg("kernel_info_request", {})
    nested: Any = []
    for _ in range(400):
        nested = [nested]
    message["header"]["nested"] = nested
    messages = Messages(KEY)
    request = messages.read([b"who", *client.serialize(message)])
    assert "nested" not in request.header
    assert request.header["msg_id"] == message["header"]["msg_id"]


def test_its_answers_are_read_by_jupyters_client(client: JupyterSession) -> None:
    messages = Messages(KEY)
    request = messages.read(frames_of(client, "complete_request", {}))
    frames = messages.write("complete_reply", {"text": "\ud800"}, request.header, [b"who"])
    identities, parts = client.feed_identities(frames)
    read = client.deserialize(parts)
    assert identities == [b"who"]
    assert (read["msg_type"], read["content"]) == ("complete_reply", {"text": "?"})
    assert read["parent_header"]["msg_id"] == request.header["msg_id"]


@pytest.mark.parametrize("change", ["key", "content", "short", "no delimiter"])
def test_what_is_not_signed_with_the_key_is_refused(client: JupyterSession, change: str) -> None:
    frames = frames_of(client, "execute_request", {"code": "1"})
    if change == "content":
        frames[-1] = b'{"code":"2"}'
    elif change == "short":
        frames = frames[:4]
    elif change == "no delimiter":
        frames = frames[2:]
    with pytest.raises(WireError):
        Messages("another" if change == "key" else KEY).read(frames)


@pytest.mark.parametrize("header", [{}, {"msg_id": 1, "msg_type": "x"}, {"msg_id": "1"}])
def test_a_header_of_another_shape_is_refused(header: dict[str, Any]) -> None:
    messages = Messages(KEY)
    frames = messages.write("execute_request", {}, {})
    parts = [b"%a" % 0, b"{}", b"{}", b"{}"]
    parts[0] = str(header).replace("'", '"').encode()
    with pytest.raises(WireError):
        messages.read([frames[0], messages._signer.sign(parts), *parts])


@pytest.mark.parametrize(
    ("event", "kind", "content"),
    [
        (Stream("stderr", "x"), "stream", {"name": "stderr", "text": "x"}),
        (Clear(wait=True), "clear_output", {"wait": True}),
        (
            Failure("E", "v", ()),
            "error",
            {"ename": "E", "evalue": "v", "traceback": ["E: v"]},
        ),
        (
            Display({"text/plain": "1"}, {}, None, update=False, result=True),
            "execute_result",
            {"data": {"text/plain": "1"}, "metadata": {}, "transient": {}, "execution_count": 7},
        ),
        (
            Display({"text/plain": "1"}, {"a": 1}, "id", update=True, result=False),
            "update_display_data",
            {
                "data": {"text/plain": "1"},
                "metadata": {"a": 1},
                "transient": {"display_id": "id"},
            },
        ),
        (
            Display({"text/plain": "1"}, {}, None, update=False, result=False),
            "display_data",
            {"data": {"text/plain": "1"}, "metadata": {}, "transient": {}},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outputs_become_messages(event: Event, kind: str, content: dict[str, Any]) -> None:
    assert shown(event, 7) == (kind, content)
