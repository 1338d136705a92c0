"""Messages: whatever LeanSession writes or reads, jupyter_client's Session reads or wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from kernel_specs.restricted.wire.session import LeanSession, pack

KEY = b"secret"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=10,
)


class Wire:
    """A socket that keeps what was sent."""

    def __init__(self) -> None:
        """Nothing was sent."""
        self.frames: list[bytes] = []

    def send_multipart(self, parts: list[bytes], *_: Any, **__: Any) -> None:
        """Keep one message."""
        self.frames = list(parts)


@given(content=st.dictionaries(st.text("abc"), JSON, max_size=4))
def test_jupyter_reads_what_the_lean_session_writes(content: dict[str, Any]) -> None:
    lean, stock, wire = LeanSession(key=KEY), Session(key=KEY), Wire()
    parent = stock.msg("execute_request", {})
    lean.send(wire, "stream", content, parent, ident=b"topic", metadata={"m": 1})
    idents, frames = stock.feed_identities(wire.frames)
    message = stock.deserialize(frames)
    assert idents == [b"topic"]
    assert message["content"] == content
    assert message["metadata"] == {"m": 1}
    assert message["header"]["msg_type"] == "stream"
    assert message["header"]["date"].tzinfo is not None
    assert message["parent_header"]["msg_id"] == parent["msg_id"]


@given(content=st.dictionaries(st.text("abc"), JSON, max_size=4))
def test_the_lean_session_reads_what_jupyter_writes(content: dict[str, Any]) -> None:
    lean, stock, wire = LeanSession(key=KEY), Session(key=KEY), Wire()
    stock.send(wire, "execute_request", content, ident=[b"client"])  # type: ignore[arg-type]
    idents, frames = lean.feed_identities(wire.frames)
    message = lean.deserialize(frames)
    assert idents == [b"client"]
    assert message["content"] == content
    assert message["msg_type"] == "execute_request"


def test_the_parent_header_follows_the_request() -> None:
    lean, wire = LeanSession(key=KEY), Wire()
    for name in ("first", "second", "first"):
        lean.send(wire, "status", {}, {"header": {"msg_id": name}, "msg_id": name})
        assert json.loads(wire.frames[3])["msg_id"] == name


def test_buffers_still_go_along() -> None:
    lean, wire = LeanSession(key=KEY), Wire()
    lean.send(wire, "comm_msg", {}, buffers=[b"binary"])
    assert wire.frames[-1] == b"binary"


def test_a_forged_or_cut_message_is_refused() -> None:
    lean, stock, wire = LeanSession(key=KEY), Session(key=b"other"), Wire()
    stock.send(wire, "execute_request", {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Signature"):
        lean.deserialize(wire.frames[1:])
    with pytest.raises(TypeError, match="malformed"):
        lean.deserialize(wire.frames[1:4])


def test_a_forked_child_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lean, wire = LeanSession(key=KEY), Wire()
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert lean.send(wire, "status", {}) is None
    assert wire.frames == []


def test_what_json_cannot_hold_is_made_to_fit() -> None:
    assert pack({"text": "\ud800"}) == b'{"text": "?"}'
    with pytest.warns(UserWarning, match="serialization failed"):
        assert json.loads(pack({"number": float("nan")})) == {"number": "nan"}


def test_renewed_sessions_differ() -> None:
    lean = LeanSession(key=KEY)
    before = lean.msg_id
    lean.renew(b"another", "hmac-sha512")
    assert len(lean.sign([b"x"])) == 128
    assert lean.msg_id.partition("_")[0] != before.partition("_")[0]
