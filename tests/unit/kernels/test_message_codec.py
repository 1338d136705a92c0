"""Messages from a kernel are believed only after every field has been checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client._version import protocol_version
from jupyter_client.session import Session

from kernel_mcp.kernels.message_codec import (
    MAX_VALUES,
    Message,
    MessageCodec,
    Overload,
    WireError,
    event_from,
    whole_number,
)
from kernel_mcp.output.items import Clear, Display, Failure, Stream
from tests.unit.json_values import JSON

KEY = "k" * 32
DELIM = b"<IDS|MSG>"


def frames(
    header: Any, parent: Any, content: Any, *, key: str = KEY, topic: bytes = b"topic"
) -> list[bytes]:
    """A signed message, as the kernel at the other end of `MessageCodec(key)` would send it."""
    import hmac

    whole: tuple[Any, ...] = (header, parent, {}, content)
    parts = [json.dumps(part).encode() for part in whole]
    digest = hmac.new(key.encode(), b"".join(parts), "sha256").hexdigest().encode()
    return [topic, DELIM, digest, *parts]


def test_a_request_is_read_back_by_the_other_end() -> None:
    msg_id, sent = MessageCodec(KEY).request("execute_request", {"code": "1"})
    message = MessageCodec(KEY).decode(sent)
    assert message.kind == "execute_request"
    assert message.content == {"code": "1"}
    assert msg_id


def test_jupyters_own_session_reads_a_request() -> None:
    msg_id, sent = MessageCodec(KEY).request("execute_request", {"code": "'\ud800' + 'é'"})
    session = Session(key=KEY.encode())
    identities, parts = session.feed_identities(sent)
    message = session.deserialize(parts)
    assert identities == []
    assert message["msg_id"] == msg_id
    assert message["msg_type"] == "execute_request"
    assert message["content"] == {"code": "'?' + 'é'"}
    assert message["header"]["version"] == protocol_version
    assert message["parent_header"] == message["metadata"] == {}


def test_a_message_of_the_right_shape_is_decoded() -> None:
    wire = MessageCodec(KEY)
    msg_id, request = wire.request("execute_request", {})
    parent = json.loads(request[2])
    assert wire.decode(frames({"msg_type": "status"}, parent, {"x": 1})) == Message(
        "status", msg_id, {"x": 1}
    )
    assert wire.decode(frames({"msg_type": "status"}, {}, {"x": 1})).parent == ""


def test_late_answers_to_the_kernel_of_a_checkpoint_are_accepted() -> None:
    first, second, third, other = (MessageCodec(KEY) for _ in range(4))
    second.follow(first)
    third.follow(second)
    for former in (first, second):
        msg_id, request = former.request("execute_request", {})
        message = frames({"msg_type": "stream"}, json.loads(request[2]), {})
        assert third.decode(message).parent == msg_id
        with pytest.raises(WireError):
            other.decode(message)
    with pytest.raises(WireError):
        third.decode(frames({"msg_type": "stream"}, {"msg_id": "1", "session": [1]}, {}))


def test_what_answers_no_request_of_this_end_is_refused() -> None:
    wire = MessageCodec(KEY)
    msg_id, request = wire.request("execute_request", {})
    parent = json.loads(request[2])
    name = parent["session"]
    for forged in (
        {**parent, "session": "other"},
        {"msg_id": msg_id},
        {"session": name},
        {"session": "other"},
        {**parent, "msg_id": f"{name}_1"},
        {**parent, "msg_id": f"{name}_{'9' * 5000}"},
        {**parent, "msg_id": f"{name}_\u0660"},
        {**parent, "msg_id": "other_0"},
        json.loads(MessageCodec(KEY).request("execute_request", {})[1][2]),
    ):
        with pytest.raises(WireError):
            wire.decode(frames({"msg_type": "stream"}, forged, {"name": "stdout", "text": "x"}))
    assert wire.decode(frames({"msg_type": "stream"}, parent, {})).parent == msg_id


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [b"x"],
        [DELIM],
        frames({"msg_type": "status"}, {}, {}, key="other"),
        frames({"msg_type": "status"}, {}, {})[:-1],
        frames([], {}, {}),
        frames({"msg_type": 7}, {}, {}),
        frames({"msg_type": "status"}, {"msg_id": 7}, {}),
        frames({"msg_type": "status"}, {}, [1]),
        frames({"msg_type": "status"}, "parent", {}),
    ],
)
def test_anything_else_is_refused(bad: list[bytes]) -> None:
    with pytest.raises(WireError):
        MessageCodec(KEY).decode(bad)


def test_json_nested_too_deeply_is_refused() -> None:
    import hmac

    parts = [b'{"msg_type": "status"}', b"{}", b"{}", b"[" * 200_000]
    digest = hmac.new(KEY.encode(), b"".join(parts), "sha256").hexdigest().encode()
    with pytest.raises(WireError):
        MessageCodec(KEY).decode([DELIM, digest, *parts])


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_random_frames_never_crash_the_decoder(parts: list[bytes]) -> None:
    with pytest.raises(WireError):
        MessageCodec(KEY).decode(parts)


KINDS = st.sampled_from(
    ["stream", "display_data", "execute_result", "update_display_data", "clear_output", "error"]
)
CONTENT = st.dictionaries(
    st.sampled_from(
        ["name", "text", "data", "metadata", "transient", "wait", "ename", "evalue", "traceback"]
    ),
    JSON,
)


@given(KINDS, CONTENT)
def test_any_content_becomes_an_event_of_the_stated_types_or_is_refused(
    kind: str, content: dict[str, Any]
) -> None:
    try:
        event = event_from(Message(kind, "", content))
    except WireError:
        return
    match event:
        case Stream(name, text):
            assert name in ("stdout", "stderr")
            assert isinstance(text, str)
        case Display(data, metadata, display_id):
            assert all(isinstance(key, str) for key in data)
            assert isinstance(metadata, dict)
            assert display_id is None or isinstance(display_id, str)
        case Failure(name, value, traceback):
            assert all(isinstance(part, str) for part in (name, value, *traceback))
        case Clear(wait):
            assert isinstance(wait, bool)
        case _:
            pytest.fail(f"unexpected {event!r}")


def signed(kind: str, content: bytes) -> list[bytes]:
    """A message whose content is any bytes."""
    import hmac

    parts = [json.dumps({"msg_type": kind}).encode(), b"{}", b"{}", content]
    digest = hmac.new(KEY.encode(), b"".join(parts), "sha256").hexdigest().encode()
    return [DELIM, digest, *parts]


@pytest.mark.parametrize(
    "inner", [b"[],", b"{},", b'"",', b"1,", b'{"a":1},', b'"\\\\",', b'"\\"",', b'"[",']
)
def test_json_of_too_many_values_is_refused_before_it_is_parsed(inner: bytes) -> None:
    content = b'{"data":{"application/json":[' + inner * (MAX_VALUES + 1) + b"0]}}"
    with pytest.raises(Overload, match="more than 200,000 values"):
        MessageCodec(KEY).decode(signed("display_data", content))


@pytest.mark.parametrize("text", ["[,{", '",', "\\,", '\\",', '\\"[', "x", "\n"])
def test_text_of_any_length_passes_whatever_it_holds(text: str) -> None:
    whole = text * (2 * MAX_VALUES)
    content = json.dumps({"name": "stdout", "text": whole}).encode()
    event = event_from(MessageCodec(KEY).decode(signed("stream", content)))
    assert event == Stream("stdout", whole)


@pytest.mark.parametrize("place", [0, 1])
def test_a_header_of_megabytes_is_refused(place: int) -> None:
    parts: list[Any] = [{"msg_type": "status"}, {"msg_id": "a"}]
    parts[place]["more"] = "x" * 100_000
    with pytest.raises(WireError, match="too long"):
        MessageCodec(KEY).decode(frames(parts[0], parts[1], {}))


@pytest.mark.parametrize("mime", ["application/json", "application/x+json", "a/vega.v6.json"])
def test_values_of_json_types_may_be_objects(mime: str) -> None:
    content = {"data": {mime: {"a": [1]}}, "metadata": {}}
    event = event_from(Message("display_data", "", content))
    assert isinstance(event, Display)
    assert event.data == {mime: {"a": [1]}}


def test_a_bundle_of_many_types_is_refused() -> None:
    data = {f"text/{number}": "" for number in range(1000)}
    with pytest.raises(WireError, match="too many"):
        event_from(Message("display_data", "", {"data": data}))


def test_a_display_id_that_is_not_short_counts_as_none() -> None:
    content = {"data": {}, "transient": {"display_id": "x" * 1000}}
    event = event_from(Message("display_data", "", content))
    assert isinstance(event, Display)
    assert event.display_id is None


def test_both_ends_of_an_endless_traceback_are_kept() -> None:
    lines = [str(number) for number in range(100_000)]
    event = event_from(Message("error", "", {"ename": "E", "evalue": "e", "traceback": lines}))
    assert isinstance(event, Failure)
    assert event.traceback[0] == "0"
    assert event.traceback[-1] == "99999"
    assert len(event.traceback) <= 2000


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "1", 2**53, [1]])
def test_a_count_is_a_small_whole_number_or_none(value: object) -> None:
    assert whole_number(value) is None
    assert whole_number(7) == 7


@given(st.lists(st.binary(max_size=60), min_size=4, max_size=4))
def test_signed_rubbish_is_refused(parts: list[bytes]) -> None:
    import hmac

    digest = hmac.new(KEY.encode(), b"".join(parts), "sha256").hexdigest().encode()
    with pytest.raises(WireError):
        MessageCodec(KEY).decode([DELIM, digest, *parts])


@given(JSON, JSON, JSON)
def test_signed_json_of_any_shape_is_a_message_or_refused(
    header: Any, parent: Any, content: Any
) -> None:
    try:
        message = MessageCodec(KEY).decode(frames(header, parent, content))
    except WireError:
        return
    assert isinstance(message.kind, str)
    assert isinstance(message.parent, str)
    assert isinstance(message.content, dict)
