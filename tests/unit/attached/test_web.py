"""Messages of a Jupyter server's web socket, as its documentation has them."""

from __future__ import annotations

import pytest

from kernel_mcp.attached.web import Unsigned, packed, unpacked
from kernel_mcp.kernels.wire import WireError

PARTS = [b"iopub", b'{"msg_type": "status"}', b"{}", b"{}", b'{"execution_state": "idle"}', b"\0x"]


def test_parts_come_back() -> None:
    assert unpacked(packed(PARTS)) == PARTS


def test_the_form_is_that_of_the_protocol() -> None:
    number = lambda value: value.to_bytes(8, "little")  # noqa: E731
    places = [8 * 7, 61, 63, 65, 67, 69]
    message = b"".join(map(number, [6, *places])) + b"shell" + b"{}" * 4
    assert packed([b"shell", *[b"{}"] * 4]) == message


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        packed(PARTS)[:-1],
        packed(PARTS)[:20],
        packed([b"shell", b"{}"]),
        (2**63).to_bytes(8, "little") + b"x" * 100,
        (6).to_bytes(8, "little") + b"\xff" * 100,
        packed([b"shell", *[b"{}"] * 100]),
    ],
)
def test_what_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(message)


def test_requests_of_others_are_known_as_such() -> None:
    ours, theirs = Unsigned(), Unsigned()
    _, request = ours.request("execute_request", {})
    _, foreign = theirs.request("execute_request", {})
    answer = [b'{"msg_type": "status"}', request[0], b"{}", b"{}"]
    assert not ours.decode(answer).foreign
    heard = ours.decode([answer[0], foreign[0], *answer[2:]])
    assert (heard.foreign, heard.asked) == (True, "execute_request")
