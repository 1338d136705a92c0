"""ZMTP as a client of a kernel: what is sent, what is understood, and what is too much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_specs.restricted.wire.zmtp import (
    GREETING,
    MAX_FRAMES,
    Decoder,
    ProtocolError,
    encode,
    opening,
    ready,
)

LIMIT = 10_000
HANDSHAKE = GREETING + ready(b"ROUTER")
FRAMES = st.lists(st.binary(max_size=600), min_size=1, max_size=8)


def decoder() -> Decoder:
    """One whose peer has greeted."""
    made = Decoder(LIMIT)
    made.feed(HANDSHAKE)
    assert made.message() is None
    assert made.ready
    return made


def messages(made: Decoder) -> list[list[bytes]]:
    found = []
    while (message := made.message()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize(
    ("kind", "said"), [(b"DEALER", []), (b"SUB", [[b"\x01"]])], ids=["DEALER", "SUB"]
)
def test_an_opening_is_all_that_a_client_says_before_its_messages(
    kind: bytes, said: list[list[bytes]]
) -> None:
    made = Decoder(LIMIT)
    made.feed(opening(kind) + encode([b"request"]))
    assert messages(made) == [*said, [b"request"]]
    assert made.ready


@given(st.lists(FRAMES, max_size=4), st.integers(1, 700))
def test_what_is_encoded_is_decoded_however_it_is_cut(sent: list[list[bytes]], size: int) -> None:
    made = Decoder(LIMIT)
    data = HANDSHAKE + b"".join(map(encode, sent))
    found = []
    for start in range(0, len(data), size):
        made.feed(data[start : start + size])
        found += messages(made)
    assert found == sent


@given(st.lists(FRAMES, max_size=4), st.integers(1, 700), st.integers(LIMIT + 1, 3 * LIMIT))
def test_a_message_that_is_too_large_may_be_left_out_alone(
    sent: list[list[bytes]], size: int, large: int
) -> None:
    made = Decoder(LIMIT, leaves_out=True)
    last = [*sent, [b"last"]]
    whole = [encode([b"id", bytes(large), b"end"]) + encode(each) for each in last]
    data = HANDSHAKE + b"".join(whole)
    found = []
    for start in range(0, len(data), size):
        made.feed(data[start : start + size])
        while (message := made.message()) is not None:
            found.append((made.left_out, message))
        assert made.waiting <= LIMIT
    assert found[1::2] == [(0, each) for each in last]
    assert found[::2] == [(large, [b"id", b"", b"end"])] * len(last)


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_random_bytes_are_refused_or_waited_for(pieces: list[bytes]) -> None:
    made = Decoder(LIMIT)
    try:
        for piece in pieces:
            made.feed(piece)
            assert messages(made) == []
    except ProtocolError:
        assert not made.ready


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_random_bytes_after_the_handshake_never_crash_it(pieces: list[bytes]) -> None:
    made = decoder()
    try:
        for piece in pieces:
            made.feed(piece)
            for message in messages(made):
                assert sum(map(len, message)) <= LIMIT
    except ProtocolError:
        pass


def test_a_message_may_be_as_long_as_the_limit_and_no_longer() -> None:
    made = decoder()
    whole = [bytes(LIMIT // 2), bytes(LIMIT // 2)]
    made.feed(encode(whole))
    assert made.message() == whole
    made.feed(encode([*whole, b"x"]))
    with pytest.raises(ProtocolError, match="more than 10,000 bytes"):
        made.message()


def test_a_message_that_is_announced_too_long_is_refused_before_it_comes() -> None:
    made = decoder()
    made.feed(b"\x02" + (2**63).to_bytes(8, "big"))
    with pytest.raises(ProtocolError, match="more than"):
        made.message()


def test_a_message_of_endless_parts_is_refused() -> None:
    made = decoder()
    made.feed(encode([b""] * (MAX_FRAMES + 1)))
    with pytest.raises(ProtocolError, match="parts"):
        made.message()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 200 OK".ljust(64), "greeting"),
        (GREETING.replace(b"\x7f\x03", b"\x7f\x02"), "greeting"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "authentication"),
        (GREETING + encode([b"early"]), "before the handshake"),
        (GREETING + b"\x04\x06\x05ERROR", "refused"),
        (GREETING + b"\xf8\x00", "unknown flags"),
        (GREETING + b"\x06" + (2**20).to_bytes(8, "big"), "a command of 1,048,576 bytes"),
    ],
)
def test_a_peer_that_does_not_keep_to_it_is_refused(data: bytes, words: str) -> None:
    made = Decoder(LIMIT)
    made.feed(data)
    with pytest.raises(ProtocolError, match=words):
        made.message()


def test_commands_after_the_handshake_are_passed_over() -> None:
    made = decoder()
    made.feed(b"\x04\x07\x04PING\0\0" + encode([b"x"]))
    assert made.message() == [b"x"]
